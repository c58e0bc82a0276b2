"""Benchmarks of the project beside its peer, mlx-lm, on the machine they run on: `run.py` is the command."""
