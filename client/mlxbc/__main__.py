"""Owns `python -m mlxbc`, the same as the `mlxbc` command."""

from __future__ import annotations

import sys

from mlxbc.cli import main

sys.exit(main())
