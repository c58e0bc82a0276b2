"""Owns the way to mlx-lm's model zoo: its model classes without its package root, which imports transformers.

`bind` puts a light stand-in for the root into `sys.modules`. Its submodules (`mlx_lm.models.llama`, …) then import as
usual, in a tenth of a second. The stand-in becomes the real package only if somebody asks it for something that the
real root defines (`mlx_lm.load`), which the daemon never does.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mlxbcd.errors import ServeError

_ROOT: Final = "mlx_lm"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A module file of the zoo. No dot and no slash, so a config cannot point outside its directory."""


class _Root(ModuleType):
    """Stands in for mlx-lm's root package until one of the root's own names is asked for."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__file__ = spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__package__ = spec.name

    def __getattr__(self, name: str) -> Any:
        # Introspection asks every module for dunder names; that is no use of the package.
        if not name.startswith("__"):
            spec = self.__spec__
            self.__class__ = ModuleType  # type: ignore[assignment]  # from now on a module like others
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(self)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def bind() -> Path:
    """Make `mlx_lm.models` importable without mlx-lm's root; any number of times.

    A real root that is imported already is left alone.

    Returns:
        The directory of the zoo's modules.

    Raises:
        ServeError: `load_failed` where mlx-lm is not installed.
    """
    root = sys.modules.get(_ROOT)
    if root is None:
        spec = importlib.util.find_spec(_ROOT)
        if spec is None or not spec.submodule_search_locations:
            raise ServeError("load_failed", "mlx-lm is not installed; in mlxbc's checkout: pip install '.[daemon]'")
        root = sys.modules[_ROOT] = _Root(spec)
    return Path(root.__path__[0]) / "models"


def model_classes(config: Mapping[str, Any]) -> tuple[type[Any], type[Any]]:
    """The zoo's (Model, ModelArgs) for a model's config.json.

    Raises:
        ServeError: `load_failed` where the architecture is not in the zoo, or the config wants its own code run.
    """
    if config.get("model_file") is not None:
        raise ServeError(
            "load_failed",
            "this model brings its own program code (model_file), which is never run; take one without",
        )
    name = module_name(config)
    directory = bind()
    # Listed, not probed: a file system that ignores case would find `Llama` too.
    if not _NAME.fullmatch(name) or f"{name}.py" not in {path.name for path in directory.glob("*.py")}:
        raise _unknown(name)
    try:
        module = importlib.import_module(f"{_ROOT}.models.{name}")
    except (ImportError, SystemExit) as error:
        # One module of the zoo ends the process when its extra package is missing.
        raise ServeError(
            "load_failed", f"architecture {name!r} needs a Python package that is not installed ({error})"
        ) from error
    try:
        return module.Model, module.ModelArgs
    except AttributeError:
        raise _unknown(name) from None


def module_name(config: Mapping[str, Any]) -> str:
    """The zoo's module for a config, by mlx-lm's own tables of aliases.

    Raises:
        ServeError: `load_failed` where the config names no `model_type`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ServeError("load_failed", "config.json names no model_type; is this a language model's directory?")
    aliases, by_architecture = _aliases()
    architectures = config.get("architectures") or ()
    for architecture in (architectures,) if isinstance(architectures, str) else architectures:
        if (model_type, architecture) in by_architecture:
            return by_architecture[model_type, architecture]
    return aliases.get(model_type, model_type)


@cache
def _aliases() -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """mlx-lm's alias tables, read from its source: importing the module that holds them imports transformers."""
    source = bind().parent / "utils.py"
    tables: dict[str, Any] = {"MODEL_REMAPPING": {}, "MODEL_ARCHITECTURE_REMAPPING": {}}
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in tables:
                tables[name] = ast.literal_eval(value)
    return tables["MODEL_REMAPPING"], tables["MODEL_ARCHITECTURE_REMAPPING"]


def _unknown(name: str) -> ServeError:
    return ServeError("load_failed", f"architecture {name[:80]!r} is not supported by this version of mlx-lm")
