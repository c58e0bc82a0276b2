"""Owns swapping the class of one module of one loaded model, so that its calls pass through a function of ours.

The new class is a subclass of the old one with its name: `isinstance`, attributes and parameters stay as they were, and
other instances of the old class don't notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn


def swap(module: nn.Module, call: Callable[..., Any]) -> type[nn.Module]:
    """Let calls of `module` run ``call(plain, module, args, kwargs)``, with `plain` what they ran before.

    Returns:
        The class it had; assigning it to ``module.__class__`` undoes the swap.
    """
    plain: type[nn.Module] = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(plain.__call__, self, args, kwargs)

    module.__class__ = type(plain.__name__, (plain,), {"__call__": __call__, "__module__": plain.__module__})
    return plain
