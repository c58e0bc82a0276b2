"""Owns the BLAS that MLX's Linux CPU back end calls: a fast one is put in front of the slow one it ships with.

MLX's Linux wheel links the netlib reference BLAS: one thread, 2 to 3 GFLOP/s, some forty times less than a core can do.
It imports `cblas_sgemm` by its plain name, so whatever library defines that name in the global scope first is used
instead. `enable` loads such a library *before* `mlx.core` is imported:

* `sgemm.c`, built once with the C compiler into the user's cache, has kernels of its own for products of few rows,
  which is what decoding consists of, and shares work between threads;
* for the others it calls the OpenBLAS that NumPy's wheel brings, one thread per call.

Only float32 goes through a BLAS in MLX; that is why models run as float32 there. On macOS, and where MLX was built
against a BLAS of the system's, nothing is done. Whatever goes wrong, the reference BLAS remains and the report says
why.

Environment: ``MLXBC_BLAS=reference`` switches this off, ``MLXBC_BLAS_THREADS`` sets the number of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from mlxbc import paths

log = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("sgemm.c")
_COMPILERS: Final = ("cc", "gcc", "clang")
_FLAGS: Final = ("-O2", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
_BUILD_TIMEOUT_S: Final = 120
MAX_THREADS: Final = 64
_DEFAULT_THREADS: Final = 4
"""More don't pay: decoding is bound by the memory, which a few cores saturate."""


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What multiplies matrices on the CPU.

    Attributes:
        kind: `openblas-shim` is the fast one of this module; `reference` is the slow one that MLX ships with; `native`
            is the platform's own, which needs no help.
        detail: one line for a person; for `reference`, why it is in use and what would help.
    """

    kind: Literal["openblas-shim", "reference", "native"]
    detail: str


class _Unavailable(Exception):
    """Why the fast BLAS cannot be had."""


_enabled: BlasReport | None = None


def enable(kind: str = "auto", threads: int = 0) -> BlasReport:
    """Load the fast BLAS if this platform wants it. Call it before `mlx.core` is imported; once per process is enough.

    Args:
        kind: "auto", "openblas-shim" or "reference"; "auto" asks `MLXBC_BLAS`.
        threads: that multiply; 0 asks `MLXBC_BLAS_THREADS`, and else takes one per core, at most 4.

    Never raises for what it finds on the machine: the report tells.
    """
    global _enabled
    if _enabled is None:
        _enabled = _enable(kind, threads)
    return _enabled


def _enable(kind: str = "auto", threads: int = 0) -> BlasReport:
    if not sys.platform.startswith("linux"):
        return BlasReport("native", "MLX uses the platform's own BLAS")
    if not _ships_reference_blas():
        return BlasReport("native", "this build of MLX brings no BLAS of its own")
    try:
        wanted = kind if kind != "auto" else os.environ.get("MLXBC_BLAS", "auto")
        if wanted == "reference":
            raise _Unavailable("the settings ask for it")
        if wanted not in ("", "auto", "openblas-shim"):
            raise _Unavailable(f"MLXBC_BLAS={wanted!r} is not known; leave it unset, or set it to reference")
        if "mlx.core" in sys.modules:
            raise _Unavailable("MLX was imported before the fast one could be loaded")
        threads = _load(_built(paths.cache_dir() / "blas"), _openblas(), _threads(threads))
    except (_Unavailable, OSError) as error:
        return BlasReport("reference", f"matrices are multiplied by MLX's slow reference BLAS: {error}")
    return BlasReport("openblas-shim", f"NumPy's OpenBLAS and own kernels, {threads} thread{'s'[: threads > 1]}")


def _ships_reference_blas() -> bool:
    spec = importlib.util.find_spec("mlx")
    roots = (spec and spec.submodule_search_locations) or ()
    return any(True for root in roots for _ in Path(root).parent.glob("mlx_cpu.libs/libblas*"))


# ------------------------------------------------------------------------------------------------------- building


def _built(directory: Path) -> Path:
    """The compiled `sgemm.c` for this machine, made if need be."""
    _own_directory(directory)
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise _Unavailable("there is no C compiler to build the fast one; install gcc or clang")
    library = directory / f"sgemm-{_fingerprint(compiler)}.so"
    if not library.exists():
        _compile(compiler, library)
    _check_owner(library, library.lstat(), stat.S_ISREG)
    return library


def _own_directory(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    _check_owner(directory, directory.lstat(), stat.S_ISDIR)


def _check_owner(path: Path, found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """What is loaded into the process must be the user's own, and nobody else's to change."""
    if not is_kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise _Unavailable(f"{path} is not yours alone; remove it")


def _fingerprint(compiler: str) -> str:
    """Changes with whatever the built code depends on: source, compiler, flags, and the processor it is tuned for."""
    real = Path(compiler).resolve()
    found = real.stat()
    parts = (
        _SOURCE.read_bytes(),
        f"{real} {found.st_size} {found.st_mtime_ns}".encode(),
        " ".join(_FLAGS).encode(),
        f"{platform.machine()} {_cpu_flags()}".encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _compile(compiler: str, library: Path) -> None:
    log.info("building the fast BLAS for this processor with %s, which is done once", compiler)
    began = time.monotonic()
    descriptor, partial = tempfile.mkstemp(prefix=".sgemm-", suffix=".so", dir=library.parent)
    os.close(descriptor)
    try:
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", partial, str(_SOURCE)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise _Unavailable(f"{compiler} could not build the fast one: {complaint.strip()}")
        os.chmod(partial, 0o700)
        os.replace(partial, library)
        log.info("built it in %.1f s", time.monotonic() - began)
    except subprocess.TimeoutExpired:
        raise _Unavailable(f"{compiler} took longer than {_BUILD_TIMEOUT_S} s to build the fast one") from None
    finally:
        Path(partial).unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------- loading


def _openblas() -> Path:
    spec = importlib.util.find_spec("numpy")
    roots = (spec and spec.submodule_search_locations) or ()
    found = next((path for root in roots for path in Path(root).parent.glob("numpy.libs/libscipy_openblas64_*")), None)
    if found is None:
        raise _Unavailable("NumPy brings no OpenBLAS here; install NumPy from its wheel")
    return found


def _load(library: Path, openblas: Path, threads: int = 1) -> int:
    """Put `library` in front of MLX's BLAS; returns the number of threads that it really has."""
    with _environment({"OPENBLAS_NUM_THREADS": "1"}):
        full = ctypes.CDLL(str(openblas))
    try:
        # The environment was too late if NumPy has loaded it already.
        full.scipy_openblas_set_num_threads64_(1)
        gemm = ctypes.cast(full.scipy_cblas_sgemm64_, ctypes.c_void_p)
        # Local scope until it has shown that it multiplies.
        shim = ctypes.CDLL(str(library))
        started: int = shim.mlxbc_blas_start(gemm, threads)
    except AttributeError as error:
        raise _Unavailable(f"NumPy's OpenBLAS is not of the kind expected ({error})") from None
    if not _multiplies(shim):
        raise _Unavailable(f"the fast one gives wrong products on this processor; remove {library} to build it again")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
    return started


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a moment: OpenBLAS reads them when it is loaded, child processes must not."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _threads(wanted: int = 0) -> int:
    """Threads to use: `wanted`, or as the environment says, or one per core.

    Helpers only ever take work that is waiting, so on a busy machine too many do no harm.
    """
    cores = len(os.sched_getaffinity(0))
    if wanted:
        return min(wanted, MAX_THREADS)
    asked = os.environ.get("MLXBC_BLAS_THREADS", "")
    if asked.isascii() and asked.isdigit() and int(asked) > 0:
        return min(int(asked), MAX_THREADS)
    return min(cores, _DEFAULT_THREADS)


def _multiplies(shim: ctypes.CDLL) -> bool:
    """Whether small integer products, which float32 holds exactly, come out exactly: few rows and many."""
    real = ctypes.c_float
    for rows in (3, 40):
        columns, depth = 11, 37
        a = [float((i * 7) % 11 - 5) for i in range(rows * depth)]
        b = [float((i * 5) % 13 - 6) for i in range(columns * depth)]
        out = (real * (rows * columns))()
        shim.cblas_sgemm(
            *(101, 111, 112, rows, columns, depth),
            *(real(1.0), (real * len(a))(*a), depth, (real * len(b))(*b), depth),
            *(real(0.0), out, columns),
        )
        expected = [
            sum(a[i * depth + t] * b[j * depth + t] for t in range(depth)) for i in range(rows) for j in range(columns)
        ]
        if list(out) != expected:
            return False
    return True


def _cpu_flags() -> str:
    """The extensions that /proc/cpuinfo says the processor has, in one line; empty where it doesn't say."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return " ".join(sorted(value.split()))
    return ""
