"""Owns the peer's copy of a model: a directory from which mlx-lm loads the arrays that our daemon holds in memory.

On the CPU the daemon expands packed weights to float32, since everything else is slower there, and the peer must not be
slower for lack of it. The copy is made once, in a process of its own (so that a harness that measures servers never
loads MLX), and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mlxbc.paths import cache_dir

_PACKED = frozenset({"quantization", "quantization_config"})
_FORMAT = b"1"


def exported(model: Path) -> Path:
    """The peer's directory for a model directory, made if need be."""
    target = cache_dir() / "bench" / _fingerprint(model)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-P", __file__, model, target], check=True)
    return target


def _fingerprint(model: Path) -> str:
    """Changes with the model's files."""
    digest = hashlib.sha256(_FORMAT)
    for file in sorted(model.iterdir()):
        found = file.stat()
        digest.update(f"{file.resolve()} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _export(model: Path, target: Path) -> None:
    """Write the copy. It appears whole or not at all."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlxbcd.model.load import load

    loaded = load(model)
    # A quantisation that stays in memory is one that mlx-lm reads from the config too.
    config = {
        key: value for key, value in loaded.config.items() if loaded.quantization is not None or key not in _PACKED
    }
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        copy = Path(scratch) / "model"
        copy.mkdir()
        for file in model.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
                shutil.copyfile(file, copy / file.name)
        (copy / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        arrays = dict(tree_flatten(loaded.model.parameters()))
        mx.save_safetensors(str(copy / "model.safetensors"), arrays, {"format": "mlx"})
        copy.rename(target)


if __name__ == "__main__":
    _export(Path(sys.argv[1]), Path(sys.argv[2]))
