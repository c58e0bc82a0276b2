"""Owns the peer's HTTP server as a process: mlx-lm's own, unchanged, multiplying with the BLAS that our daemon uses."""

from __future__ import annotations

from mlxbcd.model.blas import enable

if __name__ == "__main__":
    enable()
    from mlx_lm.server import main

    main()
