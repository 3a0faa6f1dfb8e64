"""Targets: what is predicted, computed in float64 from the pack's columns."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.runs import Breaks, IntArray, Runs
from stager.samples.scaling import trailing_volatility

# Why a decision row has no target; the values of a state array.
VALID, BEYOND_RUN, MISSING, NOT_POSITIVE, LEFT_OUT, NO_SCALE, NO_LABEL, FILLED = range(8)
N_STATES = 8

FloatArray = npt.NDArray[np.float64]
StateArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Target:
    """What is predicted for a decision at the close of bar t.

    Enter at `price` of bar ``t + delay``, exit at `exit` of bar ``t + delay + horizon``. The entry instant is never
    before the decision: an open counts as the start of its bar, every other column as its close.

    Parameters
    ----------
    price : str
        Column of the entry.
    horizon : int
        Bars from entry to exit, at least 1 (0 is possible from an open to a later price of the same bar).
    delay : int
        Bars from decision to entry, at least 0.
    exit : str, optional
        Column of the exit; default `price`.
    kind : {"return", "log_return", "difference", "direction", "value"}
        ``exit / entry - 1``, ``log(exit / entry)``, ``exit - entry``, the sign of the difference outside the
        threshold (+1, 0, -1), or the exit's value.
    threshold : float
        For "direction": moves of at most this share of ``abs(entry)`` count as 0.
    classes : {3, 2}
        For "direction": 2 leaves the zeros out (and counts them).
    across_gaps : {"exclude", "allow"}
        Whether entry and exit may lie beyond the end of the decision's run. "allow" counts bars on across gaps and
        sessions; it never crosses symbols, contract rolls or splits.
    scale : {None, "volatility", "rank", "demean"}
        What the value is set in relation to. "volatility" divides it by the standard deviation (n - 1 in the
        denominator) of the last `scale_window` one-bar moves of `price` up to the decision's bar, all of its run, times
        the square root of the horizon (at least 1): for "return" and "log_return" the moves are log returns, for
        "difference" differences. "rank" and "demean" look at all samples of one decision instant: ``(rank - (n + 1) /
        2) / n`` with the mean rank for equal values, which lies inside (-0.5, 0.5), or the value less their mean.
    scale_window : int
        For "volatility": moves looked at, at least 2.

    Raises
    ------
    SampleError
        If a value is not allowed, or the entry would lie before the decision.
    """

    price: str = "close"
    _: KW_ONLY
    horizon: int
    delay: int = 1
    exit: str | None = None
    kind: Literal["return", "log_return", "difference", "direction", "value"] = "return"
    threshold: float = 0.0
    classes: int = 3
    across_gaps: Literal["exclude", "allow"] = "exclude"
    scale: Literal["volatility", "rank", "demean"] | None = None
    scale_window: int = 20

    def __post_init__(self) -> None:
        kinds = ("return", "log_return", "difference", "direction", "value")
        if self.kind not in kinds:
            raise SampleError(f"target kind is {self.kind!r}; there are: {', '.join(kinds)}")
        for name, column in (("price", self.price), ("exit", self.exit_column)):
            if not isinstance(column, str) or not column:
                raise SampleError(f"target {name} is {column!r}; it must be the name of a column")
        for name, value in (("horizon", self.horizon), ("delay", self.delay)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise SampleError(f"target {name} is {value!r}; it must be an integer of at least 0 bars")
        # Half bars since the open of the decision's bar: its close, the decision, is 1.
        entry = 2 * self.delay + (self.price != "open")
        leave = 2 * self.reach + (self.exit_column != "open")
        if entry < 1:
            raise SampleError(
                "the target enters at the open of the decision's own bar, before the decision at its close; "
                "use delay=1, or price='close'"
            )
        if leave <= entry:
            raise SampleError(f"target horizon is {self.horizon}; the exit must lie after the entry")
        if self.classes not in (2, 3):
            raise SampleError(f"target classes is {self.classes!r}; there are 2 and 3")
        is_number = isinstance(self.threshold, (int, float, np.number)) and not isinstance(self.threshold, bool)
        if not (is_number and np.isfinite(self.threshold) and self.threshold >= 0):
            raise SampleError(f"target threshold is {self.threshold!r}; it must be a share of at least 0")
        if self.kind != "direction" and (self.threshold or self.classes != 3):
            raise SampleError(f"threshold and classes belong to kind='direction', not to {self.kind!r}")
        if self.across_gaps not in ("exclude", "allow"):
            raise SampleError(f"target across_gaps is {self.across_gaps!r}; there are 'exclude' and 'allow'")
        check_scale(self.scale, (None, "volatility", "rank", "demean"))
        window = self.scale_window
        if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 2:
            raise SampleError(f"target scale_window is {window!r}; it must be an integer of at least 2 bars")
        if self.scale == "volatility" and self.kind in ("direction", "value"):
            raise SampleError(f"scale='volatility' is for moves, not for kind={self.kind!r}")

    @property
    def exit_column(self) -> str:
        """Column of the exit."""
        return self.price if self.exit is None else self.exit

    @property
    def reach(self) -> int:
        """Bars from the decision to the exit."""
        return self.delay + self.horizon


def check_scale(scale: str | None, allowed: tuple[str | None, ...]) -> None:
    """Refuse a scale that does not exist."""
    if scale not in allowed:
        raise SampleError(f"target scale is {scale!r}; there are: {', '.join(map(repr, allowed))}")


class PriceLabels:
    """A target over a pack.

    Parameters
    ----------
    pack : Pack
    breaks : Breaks
    runs : Runs
        Labels across the end of a run are excluded, unless the target allows them.
    target : Target
    filled : (n_rows,) bool, optional
        Bars that can't be entry or exit.

    Raises
    ------
    SampleError
        If the pack has no such column.
    """

    def __init__(
        self, pack: Pack, breaks: Breaks, runs: Runs, target: Target, filled: npt.NDArray[np.bool_] | None = None
    ) -> None:
        for name in (target.price, target.exit_column):
            if name not in pack.columns:
                raise SampleError(f"the target needs column {name!r}; the pack has: {', '.join(pack.columns)}")
        self.target, self._pack, self._runs, self._filled = target, pack, runs, filled
        self._bounds = breaks.whole() if target.across_gaps == "allow" else runs
        self._entries, self._exits = pack.column(target.price), pack.column(target.exit_column)

    @property
    def scale(self) -> str | None:
        return self.target.scale

    def evaluate(self, first: int, stop: int) -> tuple[FloatArray, StateArray]:
        """Values and states of decision rows ``first : stop``."""
        target = self.target
        values, why = np.full(stop - first, np.nan), np.full(stop - first, BEYOND_RUN, np.uint8)
        n = min(stop, self._pack.n_rows - target.reach) - first
        if n <= 0:
            return values, why
        entry = self._entries[first + target.delay : first + target.delay + n]
        leave = self._exits[first + target.reach : first + target.reach + n]
        values[:n], why[:n] = _evaluate(target, entry, leave)
        if self._filled is not None:
            leaves_filled = self._filled[first + target.reach : first + target.reach + n]
            enters_filled = self._filled[first + target.delay : first + target.delay + n]
            why[:n][leaves_filled if target.kind == "value" else leaves_filled | enters_filled] = FILLED
        if target.scale == "volatility":
            sigma = trailing_volatility(
                self._entries, self._runs.firsts_of(first, stop), first, target.scale_window, target.kind
            )
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                values /= sigma * np.sqrt(max(1, target.horizon))
            why[(why == VALID) & ~(np.isfinite(sigma) & (sigma > 0))] = NO_SCALE
        why[self._bounds.last_rows(first, stop, target.reach) - first] = BEYOND_RUN
        return values, why

    def ends(self, rows: IntArray) -> IntArray:
        """When the labels of valid decision rows become known, nanoseconds UTC."""
        exits = rows + self.target.reach
        return self._pack.times[exits] if self.target.exit_column == "open" else self._pack.available_at(exits)


def _evaluate(target: Target, entry: FloatArray, leave: FloatArray) -> tuple[FloatArray, StateArray]:
    why = np.zeros(len(entry), np.uint8)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if target.kind == "return":
            values = leave / entry - 1
        elif target.kind == "log_return":
            values = np.log(leave / entry)
        elif target.kind == "difference":
            values = leave - entry
        elif target.kind == "value":
            values = leave.copy()
        else:
            move = leave - entry
            values = np.where(np.abs(move) > target.threshold * np.abs(entry), np.sign(move), 0.0)
            if target.classes == 2:
                why[values == 0] = LEFT_OUT
    if target.kind == "return":
        np.copyto(why, NOT_POSITIVE, where=entry <= 0)
    elif target.kind == "log_return":
        np.copyto(why, NOT_POSITIVE, where=(entry <= 0) | (leave <= 0))
    # An infinite value is no number to compute with: a finite one divided by it would give a return of -1.
    missing = ~np.isfinite(leave) if target.kind == "value" else ~(np.isfinite(entry) & np.isfinite(leave))
    np.copyto(why, MISSING, where=missing)
    return values, why
