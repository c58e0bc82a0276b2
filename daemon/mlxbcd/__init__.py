"""The mlxbc daemon. Layers, top to bottom: serve, residency/text/plan, engine, methods, sampling, state, model."""

from __future__ import annotations

__version__ = "0.1.0"
