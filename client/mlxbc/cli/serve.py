"""Owns `mlxbc serve`: the daemon's own command line, run in this process."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from mlxbc.cli import exits

_NEEDED = ("mlxbcd", "mlx", "mlx_lm", "numpy", "uvloop", "tokenizers", "jinja2")
"""What the `daemon` extra brings. Looking for a package is cheap, and running half a daemon isn't helpful."""


def run(arguments: list[str]) -> int:
    """Become the daemon; the arguments are those of `mlxbcd`."""
    if not installed():
        return exits.UNAVAILABLE
    from mlxbcd.serve.main import main

    return main(arguments)


def installed() -> bool:
    """Whether the daemon's packages are here; says how to get them if not."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        exits.explain(
            f"the daemon is not installed (no {', '.join(missing)}); "
            f"in mlxbc's checkout: {sys.executable} -m pip install '.[daemon]'"
        )
    return not missing
