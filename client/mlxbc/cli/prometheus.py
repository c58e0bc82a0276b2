"""Owns the daemon's status as Prometheus reads it: the text exposition format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlxbc import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_PREFIX: Final = "mlxbc_"


def exposition(report: wire.StatusReport) -> str:
    """Every figure with its help and type; times in seconds, sizes in bytes."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: wire.StatusReport) -> Iterator[str]:
    yield from _one("up", "gauge", "1 while the device can be trusted.", int(report.state != "degraded"))
    yield from _one("draining", "gauge", "1 while no new requests are taken.", int(report.state == "draining"))
    info = {"version": report.version, "device": report.device}
    yield from _many("info", "gauge", "Version and device.", [(info, 1)])
    yield from _one("uptime_seconds", "gauge", "Seconds since the start.", report.uptime_s)
    yield from _one("connections", "gauge", "Open connections.", report.connections)
    yield from _one("requests_running", "gauge", "Generations that have a place.", report.running)
    yield from _one("requests_queued", "gauge", "Generations that wait for one.", report.queued)
    yield from _one("memory_active_bytes", "gauge", "Live arrays at the last step.", report.memory_active)
    yield from _one("memory_cache_bytes", "gauge", "Buffers that are kept for reuse.", report.memory_cache)
    yield from _one("memory_used_bytes", "gauge", "Weights, row states and prefix caches.", report.memory_used)
    yield from _one("memory_limit_bytes", "gauge", "What these may take.", report.memory_limit)
    measure = {"measure": report.footprint_measure}
    yield from _many("footprint_bytes", "gauge", "The whole process.", [(measure, report.footprint)])
    models = [({"model": model.model}, model) for model in report.models]
    for name, about, field in (
        ("model_bytes", "Weights of a resident model.", "bytes"),
        ("model_kv_bytes", "States of its running requests.", "kv_bytes"),
        ("model_requests_running", "Its requests that have a place.", "running"),
        ("model_requests_queued", "Its requests that wait for one.", "queued"),
        ("model_idle_seconds", "Time since its last request.", "idle_s"),
    ):
        yield from _many(name, "gauge", about, [(labels, getattr(model, field)) for labels, model in models])
    if report.metrics is not None:
        yield from _metrics(report.metrics)


def _metrics(metrics: wire.Metrics) -> Iterator[str]:
    outcomes = [({"outcome": outcome}, count) for outcome, count in sorted(metrics.outcomes.items())]
    yield from _many("generations_total", "counter", "Generations that have ended, by how.", outcomes)
    yield from _one("prompt_tokens_total", "counter", "Their prompts' tokens.", metrics.prompt_tokens)
    yield from _one("cached_tokens_total", "counter", "Of these, found in a cache.", metrics.cached_tokens)
    yield from _one("generated_tokens_total", "counter", "Tokens drawn for them.", metrics.generated_tokens)
    yield from _histogram("queue_seconds", "Time until a place was free.", metrics.queue_ms)
    yield from _histogram("first_token_seconds", "Time from arrival to the first token.", metrics.first_token_ms)
    about = "Of each generation, the mean time between two tokens."
    yield from _histogram("decode_token_seconds", about, metrics.decode_token_ms)


def _one(name: str, kind: str, about: str, value: float) -> Iterator[str]:
    yield from _many(name, kind, about, [({}, value)])


def _many(name: str, kind: str, about: str, values: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {about}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
    for labels, value in values:
        yield f"{_PREFIX}{name}{_labels(labels)} {_number(value)}"


def _histogram(name: str, about: str, found: wire.Histogram) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {about}"
    yield f"# TYPE {_PREFIX}{name} histogram"
    below = 0
    for bound, count in zip((*(_number(bound / 1e3) for bound in found.bounds), "+Inf"), found.counts, strict=True):
        below += count
        yield f"{_PREFIX}{name}_bucket{_labels({'le': bound})} {below}"
    yield f"{_PREFIX}{name}_sum {_number(found.sum / 1e3)}"
    yield f"{_PREFIX}{name}_count {below}"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escaped = {
        name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, text in labels.items()
    }
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped.items()) + "}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 9))
