"""Owns speculative decoding of a group of rows: rounds that verify what is proposed, and plain steps in between.

A *round* is draft, verify, sample, deliver, commit: each row's window is its pending token and what is proposed behind
it, one forward reads all windows, and each row takes its own samples up to the first that was not proposed. So tokens
are those of plain decoding whatever is proposed, and only how many forwards they take differs. Windows are padded to
the widest with the row's own pending token; padding is never sampled, and taken back with whatever was wrong.

What is proposed is `methods.proposing`'s: spans that are known, else *drafts* of the group's drafter.
Where neither promises anything a step is plain and built ahead as ever. What is in flight then has to be read before
a round, which costs the host's head start: that is done where the sample in flight is likely to confirm a span. A
drafter is probed beside a step in flight where that is cheaper than a round (`spec.depth`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from mlxbcd.methods.autoregressive import Ahead, DecodeGroup, Flight, Row
from mlxbcd.methods.events import Drawn, Emit, Event, Round, Speculated
from mlxbcd.methods.proposing import Proposer, Speculation, Window
from mlxbcd.methods.step import EagerSteps, HiddenSteps, RoundBuilder, StepBuilder
from mlxbcd.model.forward import Forward
from mlxbcd.model.taps import Taps
from mlxbcd.sampling.sampler import Sample, sample
from mlxbcd.spec.accept import Accepted, accept
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import Depth
from mlxbcd.spec.drafter import Companion, Covered, Drafter
from mlxbcd.spec.echo import Origin
from mlxbcd.spec.statistics import Counts, Statistics
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import Joiner, Rows, commit

WIDEST: Final = 32
"""Tokens of the widest window: wider ones are hardly faster per token, and a sliding window's ring has to hold them."""


class SpeculativeGroup(DecodeGroup):
    """Rows that decode together, by rounds and by plain steps.

    Args:
        state: an empty collection whose `widest` allows windows.
        rounds: builds the forwards of rounds; eagerly by default.
        costs: of verifying; shared by all groups of the model, and refined by each.
        drafter: None leaves it at echoed spans.
        depth: how deep the drafter drafts; needed with one.

    Raises:
        Untappable: the drafter reads what this model doesn't show.
    """

    def __init__(
        self,
        forward: Forward,
        state: Rows,
        ahead: Ahead,
        steps: StepBuilder | None = None,
        ended: Callable[[Row, Rows], None] = lambda row, state: None,
        *,
        costs: VerifyCosts,
        rounds: RoundBuilder | None = None,
        drafter: Drafter | None = None,
        depth: Depth | None = None,
    ) -> None:
        self._taps = Taps(forward, drafter.taps) if drafter is not None and drafter.reads_hidden else None
        self._hidden_steps = HiddenSteps(forward, self._taps) if self._taps is not None else None
        super().__init__(forward, state, ahead, self._hidden_steps or steps, ended)
        self._forward = forward
        # What layers answer can't be had from a traced function.
        tapped = self._hidden_steps if self._taps is not None and self._taps.layers else None
        self._round_steps: RoundBuilder = tapped or rounds or EagerSteps(forward)
        self._costs = costs
        self._drafter = drafter
        self._depth = depth
        self._speculations: dict[Key, Speculation] = {}
        self._proposer = Proposer(self._speculations, costs, drafter, depth)

    def __repr__(self) -> str:
        drafter = "no drafter" if self._drafter is None else self._drafter.name
        return f"SpeculativeGroup({list(self._rows)}, {drafter}, {'in flight' if self._flight else 'settled'})"

    @property
    def taps(self) -> Taps | None:
        return self._taps

    @property
    def nbytes(self) -> int:
        return super().nbytes + (self._drafter.nbytes if self._drafter is not None else 0)

    def join(
        self,
        row: Row,
        joiner: Joiner,
        speculation: Speculation | None = None,
        *,
        companion: Companion | None = None,
    ) -> None:
        """Take in a row, as `DecodeGroup.join` does.

        Args:
            speculation: its own, which knows the row's text up to its pending token; None is what its request allows.
        """
        state = self._state
        assert isinstance(state, Rows)
        assert self._flight is None
        change = state.prepare(join=[joiner])
        if self._drafter is None:
            commit(change)
        else:
            known = companion or Companion.cold(row.sequence[:-1])
            follows = self._drafter.prepare(keep=self._rows.keys(), join={row.key: known})
            commit(change, *follows.prepared)
            follows.commit()
        self._rows[row.key] = row
        self._speculations[row.key] = speculation or self._proposer.speculation(row)
        self._proposer.joined()
        if self._depth is not None:
            self._depth.renew()

    def step(self, emit: Emit, shared: StepBuilder | None = None, *, within: float = math.inf) -> None:
        """One round, or one plain step. A round's forward is its own: see `DecodeGroup.step` for `shared`."""
        self._proposer.ease()
        proposer, most = self._proposer, self._widest(within) if self._rows else 0
        depth, shadow = proposer.due(self._rows, most, flying=self._flight is not None)
        if shadow:
            self._shadow(emit)
            return
        if self._flight is not None and (depth > 0 or proposer.waits(self._rows, most)):
            self.settle(emit)
        if self._flight is None:
            if any(row.ended for row in self._rows.values()):
                self.settle(emit)
            if self._rows and (windows := proposer.windows(self._rows, self._widest(within), depth)):
                self._round(windows, emit)
                return
        super().step(emit, shared if self._hidden_steps is None else None)

    def _shadow(self, emit: Emit) -> None:
        """One plain step, beside which the drafter guesses what it draws."""
        samplers = self._proposer.foreseen(self._rows)
        super().step(emit)
        if self._flight is not None:
            # Else each of the two would be timed with the other.
            self.wait()
            alive = [row for row in self._flight.rows if not row.ended]
            self._flight.guesses = self._proposer.guesses(alive, samplers)

    def discard(self) -> list[Key]:
        self._speculations.clear()
        if self._drafter is not None:
            self._drafter.discard()
        return super().discard()

    def statistics(self, key: Key) -> Statistics:
        """What speculation has done for a row."""
        return self._speculations[key].statistics.copy()

    def _widest(self, within: float) -> int:
        """Proposals that any window may have now, in a round that takes no longer than `within` seconds."""
        state = self._state
        assert isinstance(state, Rows)
        return self._proposer.widest(len(self._rows), min(WIDEST, state.widest, state.unconverted()) - 1, within)

    # -- a round

    def _round(self, windows: Sequence[Window], emit: Emit) -> None:
        """Verify windows: one forward, and each row's samples up to the first that was not proposed."""
        state = self._state
        assert isinstance(state, Rows)
        began = time.perf_counter()
        width = 1 + max(len(window.proposals) for window in windows)
        turn = state.begin(width, reversible=True)
        of = {window.row.key: window for window in windows}
        ordered = [of[key] for key in state.order]
        ids = [_padded(window, width) for window in ordered]
        hidden = self._round_steps.hidden(turn, mx.array(ids, dtype=mx.int32))
        draw = sample(self._logits(hidden, ordered, width), [one for window in ordered for one in window.samplers])
        samples = draw.read()
        seconds = time.perf_counter() - began
        self._free_at = time.perf_counter()
        verdicts: list[Accepted] = []
        covered: list[Covered] = []
        events: list[Event] = []
        for window, tokens in zip(ordered, ids, strict=True):
            own, samples = samples[: len(window.samplers)], samples[len(window.samplers) :]
            verdicts.append(self._take(window, own, seconds, events))
            covered.append(Covered(window.row.key, tokens[: verdicts[-1].emitted]))
        emit(events)
        turn.resolve([verdict.emitted for verdict in verdicts])
        self._proposer.took(len(ordered), width, seconds)
        self._costs.saw_round(len(ordered), width, seconds)
        drafted, accepted = sum(len(one.proposals) for one in ordered), sum(one.accepted for one in verdicts)
        self._rounds.append(Round(len(ordered), seconds, width, drafted, accepted))
        if self._drafter is not None:
            read = hidden if self._taps is not None else None
            if self._hidden_steps is self._round_steps:
                read = self._hidden_steps.take()
            self._drafter.commit(covered, read)
        self._drop([window.row.key for window in ordered if window.row.ended])

    def _logits(self, hidden: mx.array, windows: Sequence[Window], width: int) -> mx.array:
        """Logits [N, V] of all windows' positions, those of padding left out."""
        flat = hidden.reshape(-1, 1, hidden.shape[-1])
        lengths = [len(window.samplers) for window in windows]
        if any(length < width for length in lengths):
            index = [row * width + i for row, length in enumerate(lengths) for i in range(length)]
            flat = flat[mx.array(index, dtype=mx.int32)]
        return self._forward.head(flat)[:, 0]

    def _take(self, window: Window, samples: Sequence[Sample], seconds: float, events: list[Event]) -> Accepted:
        """Let a row take its samples; which of them it took."""
        row, speculation = window.row, self._speculations[window.row.key]

        def ends(i: int) -> bool:
            row.sampler.advance(mx.array([samples[i].token], dtype=mx.uint32))
            event = row.take(samples[i])
            self._saw(speculation, event)
            events.append(event)
            return row.ended

        first = len(events)
        verdict = accept(window.proposals, [one.token for one in samples], ends)
        drafted = len(window.proposals)
        speculation.statistics.forwards += 1
        speculation.statistics.verify_s += seconds
        _counts(speculation.statistics, window.origin).saw(drafted, verdict.accepted)
        if window.forced and drafted and speculation.forcing is not None:
            speculation.forcing.verified(min(drafted, verdict.emitted) if row.ended else drafted, verdict.accepted)
        elif window.origin is None and self._depth is not None and drafted:
            # Behind the row's end nothing was wrong: it was not looked at.
            seen = verdict.emitted if row.ended else drafted
            self._depth.saw(row.key, min(drafted, seen), verdict.accepted)
        events.insert(first, Speculated(row.key, speculation.statistics.copy()))
        return verdict

    # -- plain steps

    def _build(self, last: Flight | None, emit: Emit, steps: StepBuilder) -> Flight:
        flight = super()._build(last, emit, steps)
        if self._hidden_steps is not None:
            flight.hidden = self._hidden_steps.take()
        return flight

    def _deliver(self, flight: Flight, emit: Emit) -> None:
        if flight.read:
            return
        pending = {row.key: row.pending for row in flight.rows if not row.ended}
        alive = [i for i, row in enumerate(flight.rows) if not row.ended]

        def told(events: Sequence[Event]) -> None:
            out: list[Event] = []
            for event in events:
                speculation = self._speculations[event.key]
                speculation.statistics.forwards += 1
                self._saw(speculation, event)
                if self._depth is not None and isinstance(event, Drawn) and event.key in flight.guesses:
                    self._depth.saw(event.key, 1, int(flight.guesses[event.key] == event.sample.token))
                if not isinstance(event, Drawn) or event.ended:
                    out.append(Speculated(event.key, speculation.statistics.copy()))
                out.append(event)
            emit(out)

        super()._deliver(flight, told)
        if self._drafter is not None and pending:
            hidden = flight.hidden[mx.array(alive, dtype=mx.int32)] if flight.hidden is not None else None
            self._drafter.commit([Covered(key, [token]) for key, token in pending.items()], hidden)

    def _time(self, flight: Flight) -> None:
        timed = flight.timed
        super()._time(flight)
        if not timed and not flight.shared:
            self._costs.saw_plain(*self._timings[-1])

    def _drop(self, keys: list[Key]) -> None:
        for key in keys:
            self._speculations.pop(key, None)
            if self._depth is not None:
                self._depth.forget(key)
        super()._drop(keys)

    def _keep(self, state: Rows) -> None:
        if self._drafter is None:
            super()._keep(state)
            return
        follows = self._drafter.prepare(keep=self._rows.keys(), join={})
        commit(state.prepare(keep=self._rows), *follows.prepared)
        follows.commit()

    def _saw(self, speculation: Speculation, event: Event) -> None:
        """A row has drawn a token, by whatever kind of forward."""
        if isinstance(event, Drawn):
            speculation.statistics.generated += 1
            if speculation.echo is not None:
                speculation.echo.observe(event.sample.token)


def _padded(window: Window, width: int) -> list[int]:
    pending = window.row.pending
    return [pending, *window.proposals, *[pending] * (width - 1 - len(window.proposals))]


def _counts(statistics: Statistics, origin: Origin | None) -> Counts:
    return statistics.echo if origin is Origin.SOURCE else statistics.drafts
