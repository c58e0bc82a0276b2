"""Owns the entry point for `llm`, the command and library of that name: the daemon's models are models of it.

Whoever has both installed has `llm -m mlxbc`. `llm` loads this module at every start, so it does nothing until asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    F = TypeVar("F", bound=Callable[..., Any])

try:
    from llm import hookimpl
except ModuleNotFoundError:  # some other program looks at the entry points of all packages

    def hookimpl(function: F) -> F:  # type: ignore[misc]  # the other one has options
        """Leave the function as it is: nobody is there to call it."""
        return function


@hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Tell `llm` of the models: `mlxbc` is the daemon's default one, `mlxbc/NAME` any other."""
    from mlxbc.llm_plugin.known import names
    from mlxbc.llm_plugin.models import AsyncMlxbc, Mlxbc

    register(Mlxbc(None), AsyncMlxbc(None))
    for name in names():
        register(Mlxbc(name), AsyncMlxbc(name))
