"""Owns building a model on the device thread: weights, seams, composition and executor of one directory."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlxbcd.cache.identity import Signatures, signatures
from mlxbcd.cache.portable import trimmable
from mlxbcd.engine.calibrate import faster_ahead, verify_curve
from mlxbcd.engine.executor import Executor
from mlxbcd.errors import ServeError
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.compiled import CompiledSteps
from mlxbcd.model import heads, zoo
from mlxbcd.model.forward import Forward
from mlxbcd.model.load import Cancelled, Loaded, context_length, load
from mlxbcd.plan.resolve import Capabilities, Feature
from mlxbcd.residency import learned
from mlxbcd.residency.learned import AtLoad
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.draft_model import ModelDrafter
from mlxbcd.spec.drafter import LOOKUP, Drafter
from mlxbcd.spec.heads import HeadDrafter
from mlxbcd.state import packing
from mlxbcd.state.composition import Composition, inspect

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Companions:
    """What decides the meaning of what a drafter keeps of a row, and whether every prefix of that is one.

    Attributes:
        directory: of the model that drafts.
        files: as they were before they were read.
        traits: as `Built.traits`.
    """

    directory: Path
    files: Signatures
    traits: dict[str, object]
    trimmable: bool


@dataclass(slots=True)
class Built:
    """One model on the device. Touch the executor on the device thread only; the rest are plain values.

    Attributes:
        device: what computes, with its library's version.
        dtype: of its activations.
        costs_at: where what is learnt of it on this machine is kept.
        measured: what this load or an earlier one found out by trying; None where nothing is tried.
        bytes: of the weights, a draft model's among them.
        context: tokens a row may hold.
        vocab_size: width of the logits.
        reason: why rows run alone; empty where they share a batch.
        capabilities: what a request's plan may count on.
        features: what is enabled because of the device that computes.
        drafters: names of those that it has.
        verify: what its rounds cost; None where there are none. The device thread's while anything runs.
        apart: why a decode step and a prompt's piece are never one forward; empty where they may be.
        trimmable: every prefix of a row's state is a row's state.
        files: the directory's files as they were before they were read.
        traits: what decides, beside the files, what a row's state means.
        companions: the same of what its drafter keeps; None where it has none with a state of its own.
    """

    executor: Executor
    device: str
    dtype: str
    costs_at: Path
    bytes: int
    context: int
    vocab_size: int
    reason: str
    capabilities: Capabilities
    drafters: tuple[str, ...] = ()
    verify: VerifyCosts | None = None
    apart: str = ""
    trimmable: bool = True
    features: frozenset[Feature] = frozenset()
    files: Signatures = field(default_factory=dict)
    traits: dict[str, object] = field(default_factory=dict)
    companions: Companions | None = None
    measured: AtLoad | None = None

    def __repr__(self) -> str:
        placement = f"alone: {self.reason}" if self.reason else "continuous"
        apart = f", nothing packed: {self.apart}" if self.apart and not self.reason else ""
        return f"Built({self.dtype}, {self.bytes / 1e6:.0f} MB, context {self.context}, {placement}{apart})"

    def close(self) -> None:
        """Let the weights go. On the device thread, once nobody else holds the executor."""
        del self.executor
        # Whatever refers to itself would keep gigabytes until the collector happens to run, on whichever thread.
        gc.collect()
        mx.clear_cache()


def build(
    directory: Path,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    draft: Path | None = None,
) -> Built:
    """Load a model directory and make it ready to run. On the device thread.

    Args:
        progress: told bytes that were read, and all. A draft model's are among them once those of the model are there.
        draft: directory of a model that drafts for it.

    Raises:
        ServeError: load_failed.
    """
    zoo.bind()
    try:
        files = signatures(directory)
        loaded = load(directory, progress=progress, cancelled=cancelled)
        beside = _beside(loaded.bytes, progress)
        draft_files = signatures(draft) if draft is not None else {}
        drafting = load(draft, progress=beside, cancelled=cancelled) if draft is not None else None
    except Cancelled:
        raise given_up(directory.name) from None
    try:
        built = _assemble(loaded, directory, files, drafting)
        built.companions = _companions(built, directory, drafting, draft, draft_files)
    except ServeError:
        raise
    except Exception as error:  # the zoo's own code, at its first forward
        raise ServeError(
            "load_failed", f"{directory.name} was loaded but cannot be run: {type(error).__name__}: {error}"
        ) from error
    return built


def given_up(name: str) -> ServeError:
    """Why a load has ended that nobody waits for."""
    return ServeError("load_failed", f"the load of {name} was given up: nobody waits for it")


def _beside(first: int, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Progress of what is read behind `first` bytes."""
    return lambda done, total: progress(first + done, first + total)


def _assemble(loaded: Loaded, directory: Path, files: Signatures, drafting: Loaded | None) -> Built:
    forward = Forward(loaded.model)
    composition = inspect(loaded.model, str(loaded.config["model_type"]))
    vocab_size = _vocab_size(forward)
    reversible = composition.batches and not composition.rollback_reason
    device = f"{mx.default_device()} mlx {version('mlx')}"
    costs_at = learned.place(directory, device, loaded.dtype)
    measured = learned.at_load(costs_at)
    if measured is None or bool(measured.curve) != reversible:
        curve = verify_curve(forward, composition, vocab_size) if reversible else {}
        measured = AtLoad(time.time(), _ahead(forward, composition, vocab_size), curve)
    verify = VerifyCosts(measured.curve) if reversible else None
    packs = packing.inspect(forward, composition)
    if drafting is not None:
        if not reversible:
            raise _no_drafting(composition.reason or composition.rollback_reason)
        drafter: Drafter | None = _draft_model(drafting, vocab_size)
    else:
        drafter = _drafter(loaded, forward, vocab_size) if reversible else None
    steps = _steps(forward)
    executor = Executor(
        forward,
        composition,
        vocab_size,
        measured.ahead,
        steps,
        verify=verify,
        rounds=_steps(forward) if reversible else None,
        packer=packs.packer,
        drafter=drafter,
    )
    drafters = ((LOOKUP,) if reversible else ()) + ((drafter.name,) if drafter is not None else ())
    return Built(
        executor,
        device=device,
        dtype=loaded.dtype,
        costs_at=costs_at,
        measured=measured,
        bytes=loaded.bytes + (drafting.bytes if drafting is not None else 0),
        context=context_length(loaded.config),
        vocab_size=vocab_size,
        reason=composition.reason,
        capabilities=Capabilities(
            batches=composition.batches,
            restorable=composition.batches,
            reversible=reversible,
            fixed_shapes=steps is None or steps.refusal(composition) is None,
            drafts=bool(drafters),
        ),
        features=frozenset({Feature.COMPILED_DECODE} if steps is not None else ()),
        drafters=drafters,
        verify=verify,
        apart=str(packs),
        trimmable=composition.batches and trimmable(composition.layouts(1)),
        files=files,
        traits=_traits(loaded, composition),
    )


def _traits(loaded: Loaded, composition: Composition) -> dict[str, object]:
    return {
        "activations": loaded.dtype,
        "device": str(mx.default_device().type),
        "kv": composition.kv,
        "layers": composition.kinds,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
    }


def _companions(
    built: Built, directory: Path, drafting: Loaded | None, draft: Path | None, files: Signatures
) -> Companions | None:
    drafter = built.executor.drafter
    if drafter is None:
        return None
    whole = trimmable(drafter.kept)
    if isinstance(drafter, ModelDrafter) and drafting is not None and draft is not None:
        traits = _traits(drafting, drafter.composition)
        return Companions(draft, files, traits | {"drafter": drafter.name}, trimmable=whole)
    return Companions(directory, built.files, built.traits | {"drafter": drafter.name}, trimmable=whole)


def _drafter(loaded: Loaded, forward: Forward, vocab_size: int) -> Drafter | None:
    """A drafter of the model's own, if its checkpoint brings one that fits."""
    if not loaded.head:
        return None
    try:
        head = heads.make(str(loaded.config["model_type"]), loaded.model, loaded.head)
    except ValueError as error:
        log.warning("the checkpoint's multi-token-prediction head does not fit and is left out: %s", error)
        return None
    return HeadDrafter(forward, head, vocab_size)


def _draft_model(drafting: Loaded, vocab_size: int) -> Drafter:
    """A drafter that is a model of its own.

    Raises:
        ServeError: load_failed, its state can't follow another model's.
    """
    composition = inspect(drafting.model, str(drafting.config["model_type"]))
    try:
        return ModelDrafter(Forward(drafting.model), composition, vocab_size)
    except ValueError as error:
        raise _no_drafting(str(error)) from None


def _no_drafting(why: str) -> ServeError:
    return ServeError("load_failed", f"nothing can draft as the setting drafts says: {why}; take the entry out of it")


def _vocab_size(forward: Forward) -> int:
    """Width of the logits, read off a graph that is built and never evaluated."""
    from mlx_lm.models.cache import make_prompt_cache

    hidden = forward.hidden(mx.zeros((1, 1), dtype=mx.int32), make_prompt_cache(forward.model))
    return forward.head(hidden).shape[-1]


def _steps(forward: Forward) -> CompiledSteps | None:
    """Where the CPU computes, every traced function would keep rows waiting for a C++ compiler."""
    return None if mx.default_device().type == mx.DeviceType.cpu else CompiledSteps(forward)


def _ahead(forward: Forward, composition: Composition, vocab_size: int) -> Ahead:
    """Where the CPU computes, a step submitted early takes a core from the host: there is nothing to measure."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return Ahead.BUILD
    return faster_ahead(forward, composition, vocab_size)
