"""The oracles: what many rows give together is what each of them gives alone."""
