"""Owns the command `python tests/bench/run.py NAME…`: runs benchmarks beside mlx-lm, prints one table, writes JSON."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

_TESTS = str(Path(__file__).resolve().parents[1])
if _TESTS not in sys.path:
    # Run as a script, Python puts this directory there instead, where `wire` and others would be found as plain names.
    sys.path[0] = _TESTS

from bench import machine
from bench.registry import BENCHES, Settings, run_bench
from bench.table import Row, render, to_json


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 if every benchmark ran, whatever its figures, else 1."""
    # An installed package has its bytecode. So does the peer; our sources may not, if the environment forbids it.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    args = _parse(argv)
    settings = Settings(_model(args.model), quick=args.quick, llama_server=args.llama_server, gguf=args.gguf)
    lines = [f"machine: {machine.describe()}", f"versions: {machine.versions()}", f"blas: {_blas()}"]
    lines += [f"model: {settings.model}", f"command: {shlex.join(['python', *sys.argv])}"]
    if settings.quick:
        lines.append("quick: these figures only show that the benchmarks run")
    rows: list[Row] = []
    failed = []
    for name in args.names or BENCHES:
        began = perf_counter()
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            rows += _isolated(name, settings)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{name} took {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    lines.append(f"load at the end: {' '.join(f'{value:.2f}' for value in os.getloadavg())}")
    lines += [f"failed: {name}" for name in failed]
    print("\n".join(lines))
    print("\n" + render(rows))
    if args.json is not None:
        args.json.write_text(to_json(rows), encoding="utf-8")
    return 1 if failed else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure mlxbc beside mlx-lm: same machine, same weights, same BLAS, turn by turn.",
        epilog="A ratio above 1 says that mlxbc is better, whatever the unit.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHES)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there")
    parser.add_argument(
        "--model", metavar="NAME", default="smollm2", help="a model's name or directory (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="run small, to see that everything works")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="compare `gap` with llama.cpp's server too")
    parser.add_argument("--gguf", type=Path, metavar="PATH", help="the model for it")
    args = parser.parse_args(argv)
    if (args.llama_server is None) != (args.gguf is None):
        parser.error("--llama-server and --gguf go together")
    unknown = [name for name in args.names if name not in BENCHES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}")
    return args


def _model(name: str) -> Path:
    from mlxbcd.errors import ServeError
    from mlxbcd.residency.names import resolve

    try:
        return resolve(str(Path(name).resolve()) if Path(name).is_dir() else name).path
    except ServeError as error:
        sys.exit(f"run.py: {error.message}")


def _blas() -> str:
    """What both sides multiply with. Asking builds it, so that no benchmark pays for that."""
    from mlxbcd.model.blas import enable

    report = enable()
    return f"{report.kind} ({report.detail})"


def _isolated(name: str, settings: Settings) -> list[Row]:
    """Run one benchmark in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run_bench, name, settings).result()


if __name__ == "__main__":
    sys.exit(main())
