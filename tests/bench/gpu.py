"""Owns the command `python tests/bench/gpu.py`: decode beside mlx-lm on a GPU, with nothing but mlx, mlx-lm and numpy.

Models have random weights in the shape of an 8B Llama, in bf16 and quantised to 4 bits: only their size costs time.
Both sides hold the same ragged greedy rows over the same arrays and take turns in short blocks; figures are medians
over blocks. The floor is the time that reading all weights and the rows' keys and values once takes at the copy rate
that this device reached in this run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(_ROOT / name) for name in ("daemon", "client", "tests")]

import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from bench.gpu_model import SHAPES, Model, make, make_sure, prefilled  # noqa: E402
from bench.gpu_spec import speculation  # noqa: E402
from bench.table import Row, Target, compare, render, to_json  # noqa: E402
from mlxbcd.engine.calibrate import faster_ahead  # noqa: E402
from mlxbcd.methods.autoregressive import Ahead, DecodeGroup  # noqa: E402
from mlxbcd.methods.autoregressive import Row as DecodeRow  # noqa: E402
from mlxbcd.methods.compiled import CompiledSteps  # noqa: E402
from mlxbcd.methods.events import Drawn, Event  # noqa: E402
from mlxbcd.methods.step import EagerSteps, StepBuilder  # noqa: E402
from mlxbcd.model import cuda, cuda_linear  # noqa: E402
from mlxbcd.model.forward import Group  # noqa: E402
from mlxbcd.plan.request import Request  # noqa: E402
from mlxbcd.sampling.sampler import RowSampler  # noqa: E402
from mlxbcd.state.packing import inspect as inspect_packing  # noqa: E402
from mlxbcd.state.rows import Joiner, Rows, commit  # noqa: E402

Array = NDArray[np.float32]

_BATCHES = (1, 8, 32)
_TARGETS = {("bf16", 1): 1.3, ("bf16", 8): 1.3, ("bf16", 32): 1.3, ("4bit", 8): 2.0, ("4bit", 32): 3.5}
_SHORTEST, _LONGEST = 256, 384
_ENDLESS = 1_000_000
_WARM, _ROUNDS, _STEPS = 64, 7, 10
_MIXED_ROWS, _PIECE, _MIXED_ROUNDS = 8, 256, 12


class Ours:
    """Rows in one of our decode groups, prefilled by our forward."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], ahead: Ahead, steps: StepBuilder) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.steps = steps
        self.taken = self.compiled = 0
        self._group = DecodeGroup(model.forward, Rows(model.composition, widest=1), ahead, steps)
        for key, prompt in enumerate(prompts):
            rows = prefilled(model, key, prompt)
            request = Request(prompt=tuple(prompt), max_tokens=_ENDLESS, eos=frozenset())
            sampler = RowSampler(request.sampling, request.prompt, model.vocab_size)
            row = DecodeRow(key, request, sampler, pending=prompt[-1])
            self._group.join(row, Joiner(key, rows.read(key), len(prompt)))

    def step(self) -> None:
        """One more token of every row is known to the host."""
        self._group.step(self._take)
        self.taken += 1
        self.compiled += self.steps.off is None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that a step reads about now."""
        return self._group.nbytes

    def settle(self) -> None:
        """Wait for what is being computed."""
        mx.synchronize()

    def close(self) -> None:
        """Let the rows go."""
        self._group.discard()

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            assert isinstance(event, Drawn), event
            self.tokens[int(str(event.key))].append(event.sample.token)


class Peer:
    """mlx-lm's BatchGenerator, with its defaults."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        size = len(prompts)
        self._generator = BatchGenerator(
            model, max_tokens=_ENDLESS, completion_batch_size=size, prefill_batch_size=size
        )
        self._rows = {uid: row for row, uid in enumerate(self._generator.insert([list(prompt) for prompt in prompts]))}
        while not all(self.tokens):
            self.step()

    def step(self) -> None:
        """One more token of every row is known to the host."""
        for response in self._generator.next_generated():
            self.tokens[self._rows[response.uid]].append(response.token)

    def settle(self) -> None:
        """Wait for what is being computed."""
        mx.synchronize(self._generator.stream)

    def close(self) -> None:
        """Let the rows go."""
        self._generator.remove(list(self._rows))
        self._generator.close()


def interleave(sides: Sequence[Any], steps: int = _STEPS, rounds: int = _ROUNDS, warm: int = _WARM) -> list[float]:
    """Median seconds per step of each side."""
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        _seconds_per_step(side, warm)
    for turn in range(rounds):
        for i in range(len(sides)):
            at = (i + turn) % len(sides)
            times[at].append(_seconds_per_step(sides[at], steps))
    return [median(each) for each in times]


def _seconds_per_step(side: Any, steps: int) -> float:
    began = perf_counter()
    for _ in range(steps):
        side.step()
    side.settle()
    return (perf_counter() - began) / steps


def attention_error() -> float:
    """The largest relative error of our CUDA attention, over types and shapes, to numpy's in float32: the
    back end's own products round their inputs.

    Raises:
        AssertionError: it is more than rounding.
    """
    worst = 0.0
    for dtype, rows, width, heads, kv_heads, dim, reach in (
        (mx.bfloat16, 1, 1, 32, 8, 128, 448),
        (mx.bfloat16, 32, 1, 32, 8, 128, 448),
        (mx.bfloat16, 1, 1, 32, 8, 128, 4096),
        (mx.float16, 3, 1, 9, 3, 64, 300),
        (mx.bfloat16, 4, 1, 16, 4, 256, 512),
        (mx.float32, 2, 1, 28, 4, 128, 1500),
        (mx.bfloat16, 1, 5, 32, 8, 128, 448),
        (mx.bfloat16, 8, 5, 32, 8, 128, 448),
        (mx.float32, 1, 2, 32, 8, 128, 4097),
        (mx.float16, 3, 32, 9, 3, 64, 300),
    ):
        keys = [mx.random.key(i) for i in range(4)]
        queries = mx.random.normal((rows, width, heads, dim), key=keys[0]).astype(dtype).transpose(0, 2, 1, 3)
        shape = (rows + 1, kv_heads, reach + 32, dim)
        held = [mx.random.normal(shape, key=key).astype(dtype)[:rows, :, :reach] for key in keys[1:3]]
        lengths = mx.random.randint(1, reach - width + 2, (rows,), key=keys[3])
        ragged = mx.arange(reach)[None, None] < (lengths[:, None] + mx.arange(width)[None])[:, :, None]
        rising = mx.arange(reach)[None] <= mx.arange(reach - width, reach)[:, None]
        for mask, seen in [(ragged[:, None], ragged), *([("causal", rising[None])] if width > 1 else [])]:
            ours = cuda.attention(queries, *held, 0.7 * dim**-0.5, mask, None)
            assert ours is not None
            wanted = _attention(*map(_on_host, (queries, *held)), 0.7 * dim**-0.5, np.array(seen))
            error = float(np.linalg.norm(_on_host(ours) - wanted) / np.linalg.norm(wanted))
            assert error < (1e-5 if dtype == mx.float32 else 1e-2), (dtype, rows, width, heads, dim, reach, error)
            worst = max(worst, error)
    return worst


def product_error() -> float:
    """The largest relative error of our product of a few rows, over types and shapes, to numpy's in float32.

    Raises:
        AssertionError: it is more than rounding.
    """
    worst = 0.0
    for dtype, rows, depth, outputs in (
        (mx.bfloat16, 5, 4096, 14336),
        (mx.bfloat16, 8, 14336, 4096),
        (mx.float16, 2, 96, 100),
        (mx.float16, 7, 4128, 1001),
    ):
        x = mx.random.normal((rows, 1, depth), key=mx.random.key(1)).astype(dtype)
        weight = mx.random.normal((outputs, depth), key=mx.random.key(2)).astype(dtype)
        assert cuda_linear.fits(x, weight)
        wanted = _on_host(x) @ _on_host(weight).T
        error = float(np.linalg.norm(_on_host(cuda_linear.product(x, weight)) - wanted) / np.linalg.norm(wanted))
        assert error < 1e-2, (dtype, rows, depth, outputs, error)
        worst = max(worst, error)
    return worst


def _attention(queries: Array, keys: Array, values: Array, scale: float, seen: NDArray[np.bool_]) -> Array:
    """Attention as it is written down, [B, heads, N, dim]; `seen` is [B or 1, N, S]."""
    rows, heads, width, dim = queries.shape
    grouped = queries.reshape(rows, keys.shape[1], -1, width, dim)
    scores = grouped @ keys[:, :, None].swapaxes(-1, -2) * scale
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: Array = weights @ values[:, :, None] / weights.sum(axis=-1, keepdims=True)
    return out.reshape(rows, heads, width, dim)


def _on_host(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32))


def bandwidth() -> float:
    """Bytes per second that a large copy reads and writes here."""
    source = mx.random.normal((1 << (28 if mx.default_device().type == mx.DeviceType.gpu else 20),))
    mx.eval(source)
    times = []
    for _ in range(8):
        began = perf_counter()
        mx.eval([source + i for i in range(8)])
        times.append(perf_counter() - began)
    return 8 * 2 * source.nbytes / median(times[2:])


def prompts_of(model: Model, batch: int) -> list[list[int]]:
    """Random prompts of different lengths."""
    spread = (_LONGEST - _SHORTEST) // batch
    ids = mx.random.randint(0, model.vocab_size, (batch, _LONGEST), key=mx.random.key(batch))
    texts: list[list[int]] = ids.tolist()  # type: ignore[assignment]
    return [text[: _SHORTEST + row * spread] for row, text in enumerate(texts)]


def decode(model: Model, batch: int, rate: float, variants: bool) -> list[Row]:
    """Rows of one batch size: ours as the daemon would run it; with `variants`, every way to run it too."""
    prompts = prompts_of(model, batch)
    ahead = faster_ahead(model.forward, model.composition, model.vocab_size)
    made: dict[str, Callable[[], Ours]] = {
        "": lambda: Ours(model, prompts, ahead, CompiledSteps(model.forward)),
    }
    if variants:
        for mode in Ahead:
            made[f"/eager/{mode.value}"] = lambda mode=mode: Ours(model, prompts, mode, EagerSteps(model.forward))
            made[f"/compiled/{mode.value}"] = lambda mode=mode: Ours(
                model, prompts, mode, CompiledSteps(model.forward, always=True)
            )
    ours = {name: make_side() for name, make_side in made.items()}
    peer = Peer(model.twin, prompts)
    *times, theirs = interleave([*ours.values(), peer])
    floor = (model.weights + ours[""].nbytes) / rate
    rows = []
    for (name, side), seconds in zip(ours.items(), times, strict=True):
        limit = None if name else _TARGETS.get((model.name, batch))
        chosen = f"{ahead.value} ahead, {side.compiled} of {side.taken} steps compiled; "
        rows.append(
            compare(
                f"gpu/{model.name}/B={batch}{name}",
                1e3 * seconds,
                1e3 * theirs,
                "ms/step",
                "lower",
                peer_version=f"mlx-lm {mlx_lm.__version__}",
                target=None if limit is None else Target("ratio", ">=", limit),
                note=f"{'' if name else chosen}{seconds / floor:.2f}× the floor of {1e3 * floor:.2f} ms, "
                f"peer {theirs / floor:.2f}×; {_agreement(side.tokens, peer.tokens)}",
            )
        )
        side.close()
    peer.close()
    mx.clear_cache()
    return rows


def mixed(model: Model, rate: float) -> list[Row]:
    """One row: the step of eight running rows and a piece of a prompt, packed into one forward beside two forwards.

    A mixed iteration's host work counts on both sides: graphs are built, submitted as the engine does it, and awaited.
    """
    packing = inspect_packing(model.forward, model.composition)
    if packing.packer is None:
        return []
    running = Rows(model.composition, widest=1)
    for key in range(_MIXED_ROWS):
        text = [(7 * i + 13 * key) % model.vocab_size for i in range(_SHORTEST + 16 + 5 * key)]
        state = prefilled(model, key, text)
        commit(running.prepare(join=[Joiner(key, state.read(key), len(text))]))
    prompt = prefilled(model, "prompt", [(11 * i) % model.vocab_size for i in range(_SHORTEST + 1)])
    commit(prompt.prepare(room={"prompt": _SHORTEST + _PIECE}))
    ids = mx.array([[key + 1] for key in range(_MIXED_ROWS)]), mx.arange(_PIECE, dtype=mx.int32)[None]
    mx.eval(*ids)

    def forwards(packed: bool) -> float:
        began = perf_counter()
        turns = running.begin(1), prompt.begin(_PIECE)
        groups = [Group(each, turn.caches) for each, turn in zip(ids, turns, strict=True)]
        if packed:
            assert packing.packer is not None
            hidden, _ = packing.packer.run(groups)
            tokens = mx.argmax(model.forward.head(hidden)[:, -1], axis=-1)
        else:
            (hidden,) = model.forward.run(groups[:1])
            tokens = mx.argmax(model.forward.head(hidden)[:, -1], axis=-1)
            mx.async_eval(tokens)
            model.forward.run(groups[1:])
        written = turns[1].arrays()
        for turn in turns:
            # The next round is at the same positions.
            turn.resolve([0] * len(turn.step.starts))
        mx.eval(tokens, written)
        return perf_counter() - began

    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * _MIXED_ROUNDS):
        for packed in (True, False) if turn % 2 else (False, True):
            times[packed].append(forwards(packed))
    ours, apart = (median(times[packed][4:]) for packed in (True, False))
    floor = (model.weights + running.nbytes + prompt.nbytes) / rate
    return [
        compare(
            f"gpu/{model.name}/packed/B={_MIXED_ROWS}/chunk={_PIECE}",
            1e3 * ours,
            1e3 * apart,
            "ms",
            "lower",
            peer_version="two forwards of ours",
            target=Target("ratio", ">=", 1.3) if model.name == "bf16" else None,
            note=f"{ours / floor:.2f}× the floor of {1e3 * floor:.2f} ms, apart {apart / floor:.2f}×",
        )
    ]


def _agreement(ours: Sequence[Sequence[int]], peer: Sequence[Sequence[int]]) -> str:
    """How far greedy rows agree. Ours begins with the prompt's last token, so both begin with the same one."""
    alike = total = 0
    for mine, other in zip(ours, peer, strict=True):
        both = min(len(mine), len(other))
        total += both
        alike += next((i for i in range(both) if mine[i] != other[i]), both)
    return f"{alike} of {total} tokens before rows part"


def report(rows: Sequence[Row]) -> None:
    """Say at once what was found, so that a run that is cut short has told something."""
    for row in rows:
        print(f"{perf_counter():.0f} s", json.dumps(asdict(row), default=str), flush=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--weights", nargs="+", choices=["bf16", "4bit"], default=["bf16", "4bit"])
    parser.add_argument("--batches", nargs="*", type=int, default=list(_BATCHES), help="none leaves them out")
    parser.add_argument("--speculation", nargs="*", type=int, default=[1, 8], help="rows of speculative rounds")
    parser.add_argument("--variants", action="store_true", help="also: eager and compiled steps, run and build ahead")
    parser.add_argument("--without-packed", action="store_true", help="leave packed forwards out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there")
    args = parser.parse_args()
    rate = bandwidth()
    print(f"device: {json.dumps(mx.device_info(), default=str)}")
    print(f"versions: Python {platform.python_version()}, mlx {mx.__version__}, mlx-lm {mlx_lm.__version__}")
    print(f"copy bandwidth: {rate / 1e12:.2f} TB/s", flush=True)
    if cuda.available():
        print(f"attention of rows of different lengths: off by {attention_error():.1e} at most", flush=True)
        print(f"products of a few rows: off by {product_error():.1e} at most", flush=True)
    rows: list[Row] = []
    for weights in args.weights:
        model = make(args.shape, None if weights == "bf16" else 4)
        for batch in args.batches:
            made = decode(model, batch, rate, args.variants)
            rows += made
            report(made)
        if not args.without_packed:
            made = mixed(model, rate)
            rows += made
            report(made)
        make_sure(model)
        for batch in args.speculation:
            ahead = faster_ahead(model.forward, model.composition, model.vocab_size)
            made = [speculation(model, prompts_of(model, batch), ahead)]
            rows += made
            report(made)
        del model
        mx.clear_cache()
    print("\n" + render(rows))
    if args.json is not None:
        args.json.write_text(to_json(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
