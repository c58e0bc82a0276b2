"""Owns MLX inside a benchmark's own process: our engine's model, and the peer's with the very same arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxbcd.model import zoo
from mlxbcd.model.load import read_config
from mlxbcd.residency.build import Built, build


def built(directory: Path) -> Built:
    """The model as the daemon builds it, on this thread."""
    if mx.default_device().type == mx.DeviceType.cpu:
        # As in the daemon, and for the peer too: compiling calls g++ at run time, for no gain.
        mx.disable_compile()
    return build(directory, lambda done, total: None, lambda: False)


def twin(directory: Path, model: Any, layers: int | None = None) -> Any:
    """Another instance of the class of `model`, with its arrays and none of the daemon's seams.

    Attention is bound per module of the zoo, so its calls pass through the daemon's function, which hands a stock cache
    straight on to the zoo's.

    Args:
        layers: only so many of the first ones.
    """
    config = read_config(directory)
    if layers is not None:
        config |= {"num_hidden_layers": layers}
    model_class, args_class = zoo.model_classes(config)
    other = model_class(args_class.from_dict(config))
    # What the further layers have is nobody's.
    other.update(model.parameters(), strict=layers is None)
    other.eval()
    return other
