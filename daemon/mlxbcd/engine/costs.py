"""Owns what forwards cost on this machine, measured as they run, and the widths that follow from it. Pure.

A forward costs a fixed part, roughly that of the smallest decode step, and a part per token that grows with the context
its attention reads. The second is a straight line fitted to the pieces seen of late, so a figure taken deep in a long
prompt says something about the start of the next one, and one bad measurement is soon forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Prefill widths the scheduler chooses from; a planned end may cut one short."""

START_WIDTH: Final = 32
"""The width of the first piece, before anything is known."""

_SMOOTHING: Final = 0.3
_FADING: Final = 0.9
_GOOD_RATE: Final = 0.75
_FLATTEST: Final = 0.25
_OUTLIER: Final = 4.0
"""A figure this many times what was expected counts as no more: the machine was asleep, or swapped."""
_WORTH_A_FORWARD: Final = 1.5
"""A piece may cost this many times a single token's whatever the budget."""
_ROUNDING_S: Final = 1e-9
_NEAR: Final = 16.0
"""Tokens of context; pieces nearer than this to each other look alike."""


@dataclass(slots=True)
class FadingLine:
    """A straight line through weighted points, of which older ones count less and less. It never falls with x.

    Attributes:
        x, y: means of the points.
        spread, covariance: sums about these means.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    spread: float = 0.0
    covariance: float = 0.0

    def see(self, x: float, y: float, weight: float) -> None:
        """Take in a point."""
        self.weight = self.weight * _FADING + weight
        dx, dy = x - self.x, y - self.y
        self.x += dx * weight / self.weight
        self.y += dy * weight / self.weight
        self.spread = self.spread * _FADING + weight * dx * (x - self.x)
        self.covariance = self.covariance * _FADING + weight * dx * (y - self.y)

    def at(self, x: float) -> float:
        """The line's value, at least a quarter of the mean: an extrapolation is never taken for free."""
        # Points that lie close together say little about the slope, so it starts at zero.
        slope = max(0.0, self.covariance / (self.spread + self.weight * _NEAR**2)) if self.weight else 0.0
        return max(self.y + slope * (x - self.x), _FLATTEST * self.y)


@dataclass(slots=True)
class Costs:
    """Measured seconds of decode steps by their rows, and of prefill pieces.

    Attributes:
        widest: the widest piece that has been tried.
    """

    step_s: dict[int, float] = field(default_factory=dict)
    token_s: FadingLine = field(default_factory=FadingLine)
    widest: int = 0

    def saw_step(self, rows: int, seconds: float) -> None:
        """A decode step of `rows` rows took this long."""
        before = self.step_s.get(rows)
        if before is not None:
            seconds = before + _SMOOTHING * (min(seconds, _OUTLIER * before) - before)
        self.step_s[rows] = seconds

    def saw_piece(self, width: int, context: int, seconds: float) -> None:
        """A prefill forward of `width` tokens that follow `context` others took this long."""
        middle, per_token = context + width / 2, max(seconds - self.fixed, 0.0) / width
        if self.widest:
            per_token = min(per_token, _OUTLIER * self.token_s.at(middle))
        self.token_s.see(middle, per_token, width)
        self.widest = max(self.widest, width)

    def step(self, rows: int) -> float:
        """Expected seconds of a decode step: that of the nearest number of rows seen, 0 before any."""
        if not self.step_s:
            return 0.0
        return self.step_s[min(self.step_s, key=lambda seen: (abs(seen - rows), seen))]

    def piece(self, width: int, context: int) -> float:
        """Expected seconds of a piece; 0 before any has been seen."""
        return self.fixed + width * self.token_s.at(context + width / 2) if self.widest else 0.0

    def width(self, budget_s: float, context: int) -> int:
        """The widest piece expected to end within the budget.

        Where a single token would exceed it, what else costs little more comes along: a forward that is late anyway
        would else be made once per token. Nothing is tried that is more than one doubling away from what has been
        measured.
        """
        if not self.widest:
            return START_WIDTH
        budget_s = max(budget_s, _WORTH_A_FORWARD * self.piece(WIDTHS[0], context))
        fitting = [w for w in WIDTHS if w <= 2 * self.widest and self.piece(w, context) <= budget_s + _ROUNDING_S]
        return fitting[-1] if fitting else WIDTHS[0]

    def gap_s(self, rows: int, context: int, floor_s: float) -> float:
        """The decode gap to hold while a prompt joins `rows` running rows.

        The larger of `floor_s` and one step plus the cheapest piece that keeps 75 % of the best prefill rate: a smaller
        gap would buy smoothness with a first token several times later. It counts widths up to twice the widest tried,
        as `width` does, or a first short prompt would keep every later one at its own width.
        """
        costs = {width: max(self.piece(width, context), 1e-9) for width in WIDTHS if width <= 2 * self.widest}
        if not costs:
            return floor_s
        enough = _GOOD_RATE * max(width / seconds for width, seconds in costs.items())
        cheapest = min(seconds for width, seconds in costs.items() if width / seconds >= enough)
        return max(floor_s, self.step(rows) + cheapest)

    def saved(self) -> dict[str, Any]:
        """Plain values that `restored` takes back."""
        return {"steps": {str(rows): s for rows, s in self.step_s.items()}, "token": asdict(self.token_s)} | {
            "widest": self.widest
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Costs:
        """What `saved` gave.

        Raises:
            ValueError: it is nothing that `saved` gives.
        """
        try:
            steps = {int(rows): float(seconds) for rows, seconds in saved["steps"].items()}
            line = FadingLine(**{name: float(value) for name, value in saved["token"].items()})
            widest = int(saved["widest"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no costs: {error}") from error
        figures = [*steps.values(), *asdict(line).values()]
        sound = all(map(math.isfinite, figures)) and min(*figures[: len(steps)], line.weight, line.y, 0.0) >= 0.0
        if not sound or not 0 <= widest <= WIDTHS[-1] or (widest and not line.weight) or min(steps, default=1) < 1:
            raise ValueError("these costs can't be true")
        return cls(steps, line, widest)

    @property
    def fixed(self) -> float:
        """Seconds of a forward however few its tokens: those of the smallest step seen."""
        return min(self.step_s.values(), default=0.0)
