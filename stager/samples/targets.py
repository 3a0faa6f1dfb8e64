"""Targets: what is predicted, computed in float64 from the pack's columns and kept as float32."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.runs import Runs

# Why a decision row has no target; the values of the state array.
VALID, BEYOND_RUN, MISSING, NOT_POSITIVE, LEFT_OUT = range(5)

_CHUNK_ROWS = 1 << 18

FloatArray = npt.NDArray[np.float64]


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

    @property
    def exit_column(self) -> str:
        """Column of the exit."""
        return self.price if self.exit is None else self.exit

    @property
    def reach(self) -> int:
        """Bars from the decision to the exit."""
        return self.delay + self.horizon


def compute(pack: Pack, runs: Runs, target: Target) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """The target of every decision row.

    Parameters
    ----------
    pack : Pack
    runs : Runs
        Labels across the end of a run are excluded.
    target : Target

    Returns
    -------
    y : (n_rows,) float32
        NaN where there is no target.
    state : (n_rows,) uint8
        VALID, or why not: BEYOND_RUN, MISSING, NOT_POSITIVE, LEFT_OUT.

    Raises
    ------
    SampleError
        If the pack has no such column.
    """
    for name in (target.price, target.exit_column):
        if name not in pack.columns:
            raise SampleError(f"the target needs column {name!r}; the pack has: {', '.join(pack.columns)}")
    entries, exits = pack.column(target.price), pack.column(target.exit_column)
    y = np.full(pack.n_rows, np.nan, np.float32)
    state = np.full(pack.n_rows, BEYOND_RUN, np.uint8)

    def fill(first: int) -> None:
        stop = min(first + _CHUNK_ROWS, pack.n_rows - target.reach)
        if stop <= first:
            return
        entry = entries[first + target.delay : stop + target.delay]
        leave = exits[first + target.reach : stop + target.reach]
        values, why = _evaluate(target, entry, leave)
        why[np.arange(first, stop) + target.reach >= runs.ends_of(first, stop)] = BEYOND_RUN
        # Cast before the mask: a target beyond float32 is infinite, which is no number to train on.
        with np.errstate(over="ignore"):
            short = values.astype(np.float32)
        why[(why == VALID) & ~np.isfinite(short)] = MISSING
        short[why != VALID] = np.nan
        y[first:stop], state[first:stop] = short, why

    parallel(fill, range(0, pack.n_rows, _CHUNK_ROWS))
    return y, state


def _evaluate(target: Target, entry: FloatArray, leave: FloatArray) -> tuple[FloatArray, npt.NDArray[np.uint8]]:
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
        why[entry <= 0] = NOT_POSITIVE
    elif target.kind == "log_return":
        why[(entry <= 0) | (leave <= 0)] = NOT_POSITIVE
    # An infinite value is no number to compute with: a finite one divided by it would give a return of -1.
    missing = ~np.isfinite(leave) if target.kind == "value" else ~(np.isfinite(entry) & np.isfinite(leave))
    why[missing] = MISSING
    return values, why
