"""The BLAS in front of MLX: right products, the same bits in any company, and no failure that is fatal."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.model import blas

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, blas._COMPILERS)),
    reason="needs Linux and a C compiler",
)

Array: TypeAlias = npt.NDArray[np.float32]
Sgemm: TypeAlias = Callable[..., None]

ROW_MAJOR, COLUMN_MAJOR, PLAIN, TRANSPOSED = 101, 102, 111, 112
FEW_ROWS = 32


def started(library: Path, threads: int) -> Sgemm:
    """`cblas_sgemm` of a library, in a scope of its own."""
    full = ctypes.CDLL(str(blas._openblas()))
    shim = ctypes.CDLL(str(library))
    assert shim.mlxbc_blas_start(ctypes.cast(full.scipy_cblas_sgemm64_, ctypes.c_void_p), threads) == threads
    integer, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    shim.cblas_sgemm.argtypes = [integer] * 6 + [real, pointer, integer, pointer, integer, real, pointer, integer]
    shim.cblas_sgemm.restype = None
    sgemm: Sgemm = shim.cblas_sgemm
    return sgemm


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return blas._built(tmp_path_factory.mktemp("cache") / "blas")


@pytest.fixture(scope="module")
def sgemm(library: Path) -> Sgemm:
    return started(library, 2)


@pytest.fixture(scope="module")
def by_threads(library: Path) -> Mapping[int, Sgemm]:
    """The same library once more for each number of threads."""
    copies = {threads: library.with_name(f"{threads}.so") for threads in (1, 3)}
    return {threads: started(Path(shutil.copy(library, copy)), threads) for threads, copy in copies.items()}


def padded(random: np.random.Generator, rows: int, columns: int, extra: int) -> Array:
    """A matrix inside a wider one, so that its leading dimension is not its width."""
    return random.standard_normal((rows, columns + extra), dtype=np.float32)[:, :columns]


def product(
    sgemm: Sgemm, a: Array, b: Array, *, ta: bool = False, tb: bool = True, out: Array | None = None, **scale: float
) -> Array:
    """op(a) · op(b) by a library; `a` and `b` as they lie in memory."""
    (rows, depth), columns = a.shape[::-1] if ta else a.shape, b.shape[0] if tb else b.shape[1]
    c = np.full((rows, columns), np.nan, np.float32) if out is None else out
    lead = [array.strides[0] // array.itemsize for array in (a, b, c)]
    sgemm(
        *(ROW_MAJOR, TRANSPOSED if ta else PLAIN, TRANSPOSED if tb else PLAIN, rows, columns, depth),
        *(scale.get("alpha", 1.0), a.ctypes.data, lead[0], b.ctypes.data, lead[1]),
        *(scale.get("beta", 0.0), c.ctypes.data, lead[2]),
    )
    return c


SIZES = st.integers(1, 70)


@given(
    rows=SIZES,
    columns=st.integers(1, 230),
    depth=st.one_of(SIZES, st.sampled_from([64, 576])),
    ta=st.booleans(),
    tb=st.booleans(),
    alpha=st.sampled_from([1.0, 0.5, -2.0, 0.0]),
    beta=st.sampled_from([0.0, 1.0, -0.5]),
    extra=st.integers(0, 7),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_products_are_right_for_every_shape_transposition_scale_and_leading_dimension(
    sgemm: Sgemm,
    rows: int,
    columns: int,
    depth: int,
    ta: bool,
    tb: bool,
    alpha: float,
    beta: float,
    extra: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    a = padded(random, depth, rows, extra) if ta else padded(random, rows, depth, extra)
    b = padded(random, columns, depth, extra) if tb else padded(random, depth, columns, extra)
    around = random.standard_normal((rows, columns + extra), dtype=np.float32)
    c, margin = around[:, :columns], around[:, columns:].copy()
    wide = [array.astype(np.float64) for array in (a.T if ta else a, b.T if tb else b, c)]
    exact = alpha * (wide[0] @ wide[1]) + beta * wide[2]
    if beta == 0.0:
        c[...] = np.nan  # what was there must not matter
    product(sgemm, a, b, ta=ta, tb=tb, out=c, alpha=alpha, beta=beta)
    np.testing.assert_allclose(c, exact, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(exact).max()) * depth**0.5)
    np.testing.assert_array_equal(around[:, columns:], margin)


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 49152, 64), (8, 4096, 576), (300, 700, 128), (900, 64, 512)]
)
@pytest.mark.parametrize("tb", [False, True])
def test_large_products_that_threads_share_are_right(
    sgemm: Sgemm, rows: int, columns: int, depth: int, tb: bool
) -> None:
    random = np.random.default_rng(3)
    a = padded(random, rows, depth, 0)
    b = padded(random, columns, depth, 3) if tb else padded(random, depth, columns, 3)
    exact = a.astype(np.float64) @ (b.T if tb else b).astype(np.float64)
    np.testing.assert_allclose(product(sgemm, a, b, tb=tb), exact, rtol=1e-4, atol=1e-4)


def test_other_orders_and_empty_sums_reach_the_full_blas(sgemm: Sgemm) -> None:
    random = np.random.default_rng(4)
    a, b = padded(random, 3, 5, 0), padded(random, 5, 4, 0)
    c = np.empty((3, 4), np.float32)
    sgemm(*(COLUMN_MAJOR, PLAIN, PLAIN, 4, 3, 5, 1.0, b.ctypes.data, 4, a.ctypes.data, 5, 0.0, c.ctypes.data, 4))
    np.testing.assert_allclose(c, a @ b, rtol=1e-5)
    c = np.ones((3, 4), np.float32)
    sgemm(*(ROW_MAJOR, PLAIN, TRANSPOSED, 3, 4, 0, 1.0, a.ctypes.data, 5, b.ctypes.data, 4, 2.0, c.ctypes.data, 4))
    np.testing.assert_array_equal(c, np.full((3, 4), 2.0))


@given(
    rows=st.integers(1, FEW_ROWS),
    columns=st.integers(1, 100),
    depth=st.integers(1, 300),
    tb=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=100, deadline=None)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    sgemm: Sgemm, rows: int, columns: int, depth: int, tb: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    a = padded(random, rows, depth, 1)
    b = padded(random, columns, depth, 2) if tb else padded(random, depth, columns, 2)
    together = product(sgemm, a, b, tb=tb)
    for row in range(rows):
        np.testing.assert_array_equal(product(sgemm, a[row : row + 1], b, tb=tb)[0], together[row])


@pytest.mark.parametrize(("rows", "columns", "depth"), [(5, 9000, 576), (100, 1000, 576), (1000, 100, 576)])
def test_a_product_has_the_same_bits_for_any_number_of_threads(
    by_threads: Mapping[int, Sgemm], rows: int, columns: int, depth: int
) -> None:
    random = np.random.default_rng(5)
    a, b = padded(random, rows, depth, 0), padded(random, columns, depth, 0)
    alone = product(by_threads[1], a, b)
    for _ in range(5):
        np.testing.assert_array_equal(product(by_threads[3], a, b), alone)


def test_callers_on_many_threads_do_not_disturb_each_other(by_threads: Mapping[int, Sgemm]) -> None:
    random = np.random.default_rng(6)
    work = [(padded(random, rows, 256, 0), padded(random, 3000, 256, 0)) for rows in (1, 4, 8, 40)] * 2
    wanted = [product(by_threads[1], a, b) for a, b in work]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda pair: product(by_threads[3], *pair), work))
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(one, other)


# ----------------------------------------------------------------------------------------------------- in a process


def outcome(cache: Path, script: str = "", **environment: str) -> Any:
    """What `enable` reports in a fresh process, and what `script` puts into `found` after it."""
    program = (
        "import json, os\n"
        "found, before = None, dict(os.environ)\n"
        "from mlxbcd.model import blas\n"
        "report = blas.enable()\n"
        "assert blas.enable() is report\n"
        f"{script}\n"
        "print(json.dumps([report.kind, report.detail, found]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "MLXBC_BLAS": "", "MLXBC_BLAS_THREADS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cache(library: Path) -> Path:
    """A user's cache in which the library has been built."""
    return library.parent.parent / "user"


@pytest.fixture(autouse=True, scope="module")
def _filled(library: Path, cache: Path) -> None:
    (cache / "mlxbc").mkdir(parents=True)
    shutil.copytree(library.parent, cache / "mlxbc" / "blas")


def test_mlx_multiplies_with_the_library_and_the_environment_stays_as_it_was(cache: Path) -> None:
    kind, detail, (error, same, untouched) = outcome(
        cache,
        "import mlx.core as mx\n"
        "import numpy as np\n"
        "a = np.random.default_rng(1).standard_normal((4, 577)).astype(np.float32)\n"
        "b = np.random.default_rng(2).standard_normal((301, 577)).astype(np.float32)\n"
        "together = np.array(mx.matmul(mx.array(a), mx.array(b).T))\n"
        "alone = np.stack([np.array(mx.matmul(mx.array(a[i : i + 1]), mx.array(b).T))[0] for i in range(4)])\n"
        "error = float(np.abs(together - a.astype(np.float64) @ b.astype(np.float64).T).max())\n"
        "found = [error, bool((together == alone).all()), dict(os.environ) == before]",
        MLXBC_BLAS_THREADS="2",
    )
    assert (kind, detail) == ("openblas-shim", "NumPy's OpenBLAS and own kernels, 2 threads")
    assert error < 1e-3
    assert same
    assert untouched


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"MLXBC_BLAS": "reference"}, "the settings ask for it"),
        ({"MLXBC_BLAS": "magic"}, "'magic' is not known"),
        ({"PATH": ""}, "no C compiler"),
    ],
)
def test_without_it_the_reference_blas_stays_and_the_report_says_why(
    cache: Path, environment: dict[str, str], reason: str
) -> None:
    kind, detail, total = outcome(
        cache, "import mlx.core as mx; found = mx.matmul(mx.ones((2, 3)), mx.ones((3, 2))).sum().item()", **environment
    )
    assert kind == "reference"
    assert reason in detail
    assert "\n" not in detail
    assert total == 12.0


def test_after_mlx_it_is_too_late() -> None:
    import mlx.core

    assert mlx.core is not None
    report = blas._enable()
    assert (report.kind, "before the fast one" in report.detail) == ("reference", True)


def test_other_platforms_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas._enable().kind == "native"


def test_a_numpy_without_openblas_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(blas._Unavailable, match="no OpenBLAS"):
        blas._openblas()


# --------------------------------------------------------------------------------------------------------- building


def compiler(directory: Path, body: str) -> None:
    directory.mkdir()
    (directory / "cc").write_text(f"#!/bin/sh\n{body}\n")
    (directory / "cc").chmod(0o700)


def test_it_is_built_once_and_then_only_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    real = next(filter(None, map(shutil.which, blas._COMPILERS)))
    compiler(tmp_path / "bin", f'echo run >> {tmp_path}/runs; exec {real} "$@" -O0')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    first = blas._built(tmp_path / "blas")
    assert blas._built(tmp_path / "blas") == first
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == f"building the fast BLAS for this processor with {tmp_path}/bin/cc, which is done once"
    assert len(told) == 2, "and how long that took"
    assert (tmp_path / "runs").read_text() == "run\n"
    assert [path.name for path in (tmp_path / "blas").iterdir()] == [first.name]
    assert (tmp_path / "blas").stat().st_mode & 0o777 == 0o700


def test_another_processor_source_or_compiler_gets_a_build_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path / "a", "exit 0")
    compiler(tmp_path / "b", "exit 1")
    prints = {blas._fingerprint(str(tmp_path / name / "cc")) for name in "ab"}
    monkeypatch.setattr(blas, "_cpu_flags", lambda: "sse2")
    prints.add(blas._fingerprint(str(tmp_path / "a" / "cc")))
    monkeypatch.setattr(blas, "_SOURCE", tmp_path / "a" / "cc")
    prints.add(blas._fingerprint(str(tmp_path / "a" / "cc")))
    assert len(prints) == 4


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path / "bin", 'echo "x.c:1: error: no float here" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(blas._Unavailable, match="no float here"):
        blas._built(tmp_path / "blas")
    assert list((tmp_path / "blas").iterdir()) == []


def test_what_others_could_have_written_is_not_loaded(tmp_path: Path, library: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(blas._Unavailable, match="not yours alone"):
        blas._built(shared)
    (tmp_path / "link").symlink_to(library.parent)
    with pytest.raises(blas._Unavailable, match="not yours alone"):
        blas._built(tmp_path / "link")
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / library.name).symlink_to(library)
    with pytest.raises(blas._Unavailable, match="not yours alone"):
        blas._built(mine)


def test_a_library_that_multiplies_wrongly_is_not_used(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.c"
    wrong.write_text(
        "int mlxbc_blas_start(void *gemm, int threads) { (void)gemm; return threads; }\n"
        "void cblas_sgemm(int o, int ta, int tb, int m, int n, int k, float al, const float *a, int lda,\n"
        "    const float *b, int ldb, float be, float *c, int ldc) { c[0] = 1; }\n"
    )
    real = next(filter(None, map(shutil.which, blas._COMPILERS)))
    subprocess.run([real, "-shared", "-fPIC", "-w", "-o", tmp_path / "wrong.so", wrong], check=True)
    with pytest.raises(blas._Unavailable, match="wrong products"):
        blas._load(tmp_path / "wrong.so", blas._openblas())


@pytest.mark.parametrize(("asked", "threads"), [("1", 1), ("3", 3), ("1000", 64)])
def test_the_number_of_threads_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, asked: str, threads: int) -> None:
    monkeypatch.setenv("MLXBC_BLAS_THREADS", asked)
    assert blas._threads() == threads


@pytest.mark.parametrize("asked", ["", "0", "-1", "many", "²"])
def test_without_a_usable_wish_there_are_no_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("MLXBC_BLAS_THREADS", asked)
    for cores, threads in ((1, 1), (2, 2), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert blas._threads() == threads
