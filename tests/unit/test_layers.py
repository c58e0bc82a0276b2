"""Imports point down only, decisions are pure, and MLX comes in where it is meant to."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

_PICTURE: Final = """
cli:       http lsp client wire
http:      client wire
lsp:       client wire
llm_plugin: client wire
client:    wire
doctor:    service serve residency engine model config machine errors wire
service:   serve config errors wire
serve:     config machine residency engine methods spec cache sampling state model text plan trace device errors wire
residency: engine methods spec cache sampling state model text trace device plan errors wire
engine:    methods spec cache sampling state model plan trace device errors
methods:   spec sampling state model plan errors
spec:      sampling state model plan errors
cache:     state errors
sampling:  plan errors
state:     model errors
model:     errors wire
text:      errors wire
plan:      errors wire
trace:
device:
config:    errors wire
machine:
errors:    wire
wire:
"""
MAY_IMPORT: Final = {
    name: set(below.split()) for name, below in (line.split(":") for line in _PICTURE.split("\n")[1:-1])
}
"""Each layer and the layers it may use."""

WIRE: Final = {"wire", "framing", "paths", "errors", "variables"}
"""The client's modules that both sides import. `schema` is built on them for people."""

OURS: Final = {"mlxbc", "mlxbcd"}
USES_MLX: Final = {"serve", "residency", "engine", "methods", "spec", "cache", "sampling", "state", "model"}
USES_THE_ZOO: Final = {"residency", "state", "model"}

HANDS_OVER: Final = {
    "mlxbc.cli.doctor": "mlxbcd.doctor.examine",
    "mlxbc.cli.config": "mlxbcd.config.sources",
    "mlxbc.cli.serve": "mlxbcd.serve.main",
    "mlxbc.cli.service": "mlxbcd.service.manager",
    "mlxbc.cli.pull": "mlxbcd.residency.pull",
}
"""Commands that are the daemon's own work, done by its package if that is installed."""

AFTER_MLX: Final = {
    f"mlxbcd.serve.{name}" for name in ("caching", "errands", "generation", "live", "output", "preparing", "standing")
}
"""The modules of the front that may only be imported once the BLAS is in place. All others know nothing of MLX."""

DECISIONS: Final = {
    "mlxbc.wire",
    "mlxbc.framing",
    "mlxbc.misfit",
    "mlxbcd.cache.eviction",
    "mlxbcd.cache.index",
    "mlxbcd.cache.keys",
    "mlxbcd.cache.nodes",
    "mlxbcd.engine.budget",
    "mlxbcd.engine.costs",
    "mlxbcd.engine.packing",
    "mlxbcd.engine.scheduler",
    "mlxbcd.plan.freeze",
    "mlxbcd.plan.request",
    "mlxbcd.plan.snapshots",
    "mlxbcd.plan.resolve",
    "mlxbcd.residency.eviction",
    "mlxbcd.serve.backlog",
    "mlxbcd.spec.accept",
    "mlxbcd.spec.costs",
    "mlxbcd.spec.depth",
    "mlxbcd.spec.echo",
    "mlxbcd.spec.forcing",
    "mlxbcd.spec.lookup",
    "mlxbcd.spec.pace",
    "mlxbcd.spec.rates",
    "mlxbcd.spec.statistics",
    "mlxbcd.state.geometry",
    "mlxbcd.text.channels",
    "mlxbcd.text.matching",
    "mlxbcd.text.stable",
    "mlxbcd.text.stops",
}
"""Pure: what they answer follows from what they are given."""

WITHOUT_MLX: Final = {
    "mlxbcd.model.blas",
    "mlxbcd.model.size",
    "mlxbcd.residency.names",
    "mlxbcd.residency.pull",
    "mlxbcd.residency.store",
}
"""Modules of layers that know MLX, which run before it is there, or without it."""

IMPURE: Final = {"asyncio", "logging", "os", "random", "secrets", "select", "socket", "subprocess", "threading", "time"}


@dataclass(frozen=True)
class Import:
    """One import, of a module or of a name in it.

    Attributes:
        lazy: it happens when a function runs, or never (for type checkers).
    """

    module: str
    lazy: bool


def sources() -> dict[str, Path]:
    """Every module of both packages."""
    found = {}
    for package in ("mlxbc", "mlxbcd"):
        spec = find_spec(package)
        assert spec
        assert spec.origin
        root = Path(spec.origin).parent
        for path in root.rglob("*.py"):
            parts = path.relative_to(root.parent).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


SOURCES: Final = sources()
MODULES: Final = sorted(SOURCES.keys() - {"mlxbc.__main__"})


@cache
def imports(module: str) -> tuple[Import, ...]:
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    return tuple(_imports(tree, lazy=False))


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            yield from (Import(alias.name, lazy) for alias in names)
        case ast.ImportFrom(level=level, module=str(origin), names=names):
            assert level == 0, "relative imports hide a module's name"
            for alias in names:
                whole = f"{origin}.{alias.name}"
                yield Import(whole if whole in SOURCES else origin, lazy)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            lazy = True
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, lazy=lazy)


def layer(module: str) -> str:
    """The layer of a module of ours; empty for a package's root, which holds its version."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if package == "mlxbcd":
        return name
    if name in ("", "cli", "http", "llm_plugin", "lsp"):
        return name
    return "wire" if name in WIRE or name in {"schema", "misfit"} else "client"


def root(module: str) -> str:
    return module.partition(".")[0]


def chain_to(target: set[str], module: str) -> list[str]:
    """How importing `module` leads to importing a package of `target`: the modules on the way, or nothing."""
    ways, todo = {module: [module]}, [module]
    while todo:
        at = todo.pop()
        parent = at.rpartition(".")[0]
        for found in [*(one.module for one in imports(at) if not one.lazy), *([parent] if parent else [])]:
            if root(found) in target:
                return [*ways[at], found]
            if found in SOURCES and found not in ways:
                ways[found] = [*ways[at], found]
                todo.append(found)
    return []


def test_the_layers_have_an_order() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()  # raises if there is a circle


def test_the_table_has_every_layer_and_no_other() -> None:
    assert {layer(module) for module in MODULES} - {""} == set(MAY_IMPORT)
    assert set().union(*MAY_IMPORT.values()) <= set(MAY_IMPORT)


def test_imports_point_down() -> None:
    up = [
        f"{module} imports {one.module}"
        for module in MODULES
        for one in imports(module)
        if root(one.module) in OURS and module not in HANDS_OVER and layer(module)
        if layer(one.module) not in {"", layer(module), *MAY_IMPORT[layer(module)]}
    ]
    assert up == []


def test_of_the_client_the_daemon_uses_the_wire_alone() -> None:
    taken = {
        one.module
        for module in MODULES
        for one in imports(module)
        if root(module) == "mlxbcd" and root(one.module) == "mlxbc"
    }
    assert taken == {f"mlxbc.{name}" for name in WIRE}


def test_the_client_reaches_for_the_daemon_only_to_hand_over_and_only_then() -> None:
    reaching = {
        module: {one.module for one in imports(module)} & SOURCES.keys()
        for module in MODULES
        if root(module) == "mlxbc" and any(root(one.module) == "mlxbcd" for one in imports(module))
    }
    assert reaching.keys() == HANDS_OVER.keys()
    assert all(HANDS_OVER[module] in reached for module, reached in reaching.items())
    assert all(one.lazy for module in reaching for one in imports(module) if root(one.module) == "mlxbcd")


def test_only_some_layers_know_mlx_and_fewer_know_the_zoo() -> None:
    def naming(package: str) -> set[str]:
        return {layer(module) for module in MODULES if any(root(one.module) == package for one in imports(module))}

    assert naming("mlx") <= USES_MLX
    assert naming("mlx_lm") <= USES_THE_ZOO


def test_a_decision_reads_no_clock_and_touches_no_device() -> None:
    for module in DECISIONS:
        assert not {root(one.module) for one in imports(module)} & IMPURE, module
        assert chain_to({"mlx", "mlx_lm", "numpy"}, module) == []


def without_mlx() -> list[str]:
    """Everything that runs before MLX is there, or without it: the client, the front, the text, and fetching models."""
    return [
        module
        for module in MODULES
        if root(module) == "mlxbc"
        or layer(module) in ("doctor", "service", "config", "machine", "trace", "text", "plan", "errors", "device")
        or (layer(module) == "serve" and module not in AFTER_MLX)
        or module in DECISIONS
        or module in WITHOUT_MLX
    ]


def test_no_chain_of_imports_leads_to_mlx_where_it_is_not_wanted() -> None:
    assert [chain for module in without_mlx() if (chain := chain_to({"mlx", "mlx_lm"}, module))] == []


def test_python_agrees_with_what_the_sources_say() -> None:
    script = f"import sys, {', '.join(without_mlx())}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"mlx", "mlx_lm", "transformers"} & set(ended.stdout.split())


@pytest.mark.parametrize("server", ["http", "lsp"])
def test_a_server_beside_the_client_is_loaded_for_nobody_else(server: str) -> None:
    eager = {one.module for module in MODULES if layer(module) != server for one in imports(module) if not one.lazy}
    assert {one for one in eager if one in SOURCES and layer(one) == server} == set()


def test_a_chain_that_exists_is_found() -> None:
    chain = chain_to({"mlx"}, "mlxbcd.engine.engine")
    assert chain[0] == "mlxbcd.engine.engine"
    assert root(chain[-1]) == "mlx"


def test_every_module_says_first_what_it_owns() -> None:
    silent = []
    for module in MODULES:
        tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
        if layer(module) and tree.body and not (ast.get_docstring(tree) or "").startswith("Owns "):
            silent.append(module)
    assert silent == []
