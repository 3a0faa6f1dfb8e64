"""Pictures of coverage, gaps and jumps as SVG; their size does not grow with the number of bars."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from stager.bars.coverage import Coverage
from stager.bars.gaps import Gaps
from stager.bars.interval import DAY
from stager.page import nice_step

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

WIDTH, LEFT, RIGHT = 1080, 116, 14
_PLOT = WIDTH - LEFT - RIGHT
_TOP, _FOOT = 10, 40
# Cells of the picture of gaps, at most.
_GAP_COLUMNS, _GAP_ROWS = 120, 24
_LABEL = 15
_SECOND = 10**9
_STEPS: tuple[tuple[int, Literal["s", "m", "D"]], ...] = (
    *((n * _SECOND, "s") for n in (1, 2, 5, 10, 30)),
    *((n * 60 * _SECOND, "m") for n in (1, 2, 5, 10, 15, 30)),
    *((n * 3600 * _SECOND, "m") for n in (1, 2, 3, 6, 12)),
    *((n * DAY, "D") for n in (1, 2, 7, 14)),
)
_MONTHS = (1, 2, 3, 6, 12, 24, 60, 120, 240)


def time_ticks(low: int, high: int, most: int = 9) -> list[tuple[int, str]]:
    """Round instants from low to high (nanoseconds since 1970), at most so many, and what is written below them."""
    span = max(1, high - low)
    for step, unit in _STEPS:
        if span // step < most:
            ticks = np.arange(-(-low // step) * step, high + 1, step, dtype=np.int64)
            texts = np.datetime_as_string(ticks.view("datetime64[ns]"), unit=unit)
            short = [str(text).replace("T", " ") for text in texts]
            # The date again only where it changes.
            shown = [
                text[11:] if unit != "D" and number and text[:10] == short[number - 1][:10] else text
                for number, text in enumerate(short)
            ]
            return list(zip(ticks.tolist(), shown, strict=True))
    bounds = np.array([low, high]).view("datetime64[ns]").astype("datetime64[M]").astype(np.int64)
    months = next((n for n in _MONTHS if (bounds[1] - bounds[0]) // n < most), _MONTHS[-1])
    numbers = np.arange(-(-bounds[0] // months) * months, bounds[1] + 1, months)
    stamps = numbers.astype("datetime64[M]")
    instants = stamps.astype("datetime64[ns]").astype(np.int64).tolist()
    texts = np.datetime_as_string(stamps, unit="Y" if months % 12 == 0 else "M")
    return [(at, str(text)) for at, text in zip(instants, texts, strict=True) if low <= at <= high]


def coverage_chart(coverage: Coverage, symbols: Sequence[str], chosen: Sequence[int]) -> str:
    """A line for each chosen symbol, darker where it has more of its bars."""
    height = 16 if len(chosen) <= 30 else 11
    axis = _Time(coverage.edges[0], coverage.edges[-1], height * len(chosen))
    cell = _PLOT / (len(coverage.edges) - 1)
    parts = [axis.drawn()]
    for line, number in enumerate(chosen):
        top, name = _TOP + line * height, symbols[number]
        counts = coverage.counts[number]
        full = np.maximum(coverage.full[number if len(coverage.full) > 1 else 0], 1)
        levels = np.where(counts == 0, 0, np.minimum(1 + 3 * (counts - 1) // full, 3))
        begins = np.flatnonzero(np.append(True, levels[1:] != levels[:-1]))
        ends = np.append(begins[1:], len(levels))
        # One path for each of the three levels.
        paths: dict[int, list[str]] = {1: [], 2: [], 3: []}
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if levels[begin]:
                x, width = LEFT + begin * cell, (end - begin) * cell
                paths[int(levels[begin])].append(f"M{x:.1f} {top + 1}h{width:.1f}v{height - 2}h-{width:.1f}z")
        parts.append(f"<g><title>{html.escape(name)}: {int(counts.sum()):,} bars</title>")
        parts.append(f'<rect class="back" x="{LEFT}" y="{top + 1}" width="{_PLOT}" height="{height - 2}"/>')
        parts += [f'<path class="c{level}" d="{"".join(path)}"/>' for level, path in paths.items() if path]
        if height > 11 or len(chosen) <= 60:
            size = ' style="font-size:10px"' if height <= 11 else ""
            y = top + height / 2 + (4 if height > 11 else 3.5)
            parts.append(f'<text x="{LEFT - 8}" y="{y:.1f}" text-anchor="end"{size}>{_short(name)}</text>')
        parts.append("</g>")
    return axis.svg("".join(parts), "Bars of symbols over time")


def presence_chart(coverage: Coverage) -> str:
    """How many symbols have a bar in each stretch."""
    axis = _Time(coverage.edges[0], coverage.edges[-1], 130)
    present = np.count_nonzero(coverage.counts, axis=0)
    top = _round_up(int(present.max()))
    cell = _PLOT / len(present)
    path = [f"M{LEFT} {axis.bottom}"]
    for number, n in enumerate(present.tolist()):
        path.append(f"V{axis.bottom - axis.height * n / top:.1f}H{LEFT + (number + 1) * cell:.1f}")
    shape = f'<path class="area" d="{"".join(path)}V{axis.bottom}Z"/>'
    return axis.svg(axis.drawn() + axis.values([(n, f"{n:,}") for n in (0, top // 2, top)], top) + shape, "Symbols")


def gaps_chart(gaps: Gaps, low: int, high: int, name: str) -> str:
    """When gaps begin and how long they are, counted in cells.

    Parameters
    ----------
    gaps : Gaps
        At least one.
    low, high : int
        The time axis.
    name : str
        What is missing, in the plural.
    """
    times, n_missing, n_elsewhere = gaps.times, gaps.n_missing, gaps.n_elsewhere
    axis = _Time(low, high, 240)
    most = int(n_missing.max())
    # Whole powers of ten, so that the axis can be read.
    decades = max(1, math.ceil(math.log10(most + 1) - 1e-12))
    span = max(1, high - low)
    column = np.minimum((times - low) // max(1, -(-span // _GAP_COLUMNS)), _GAP_COLUMNS - 1)
    row = np.minimum((np.log10(n_missing) / decades * _GAP_ROWS).astype(np.int64), _GAP_ROWS - 1)
    cells, numbers = np.unique(column * _GAP_ROWS + row, return_counts=True)
    where = np.searchsorted(cells, column * _GAP_ROWS + row)
    longest = np.zeros(len(cells), np.int64)
    np.maximum.at(longest, where, n_missing)
    elsewhere = np.bincount(where, weights=n_elsewhere > 0, minlength=len(cells)).astype(np.int64)
    width, height = _PLOT / _GAP_COLUMNS, axis.height / _GAP_ROWS
    shades = np.minimum(np.log10(numbers), 3) / 3 * 0.6 + 0.4
    parts = [axis.drawn(), axis.values([(n, f"{10**n:,}") for n in range(decades + 1)], decades)]
    for cell, n, shade, length, others in zip(
        cells.tolist(), numbers.tolist(), shades.tolist(), longest.tolist(), elsewhere.tolist(), strict=True
    ):
        x, y = LEFT + cell // _GAP_ROWS * width, axis.bottom - (cell % _GAP_ROWS + 1) * height
        day = np.datetime_as_string(np.datetime64(low + cell // _GAP_ROWS * -(-span // _GAP_COLUMNS), "ns"), unit="D")
        told = f"{n:,} gap{'' if n == 1 else 's'} from {day}, the longest {length:,} {name}"
        if others:
            told += f"; others traded in {others:,}"
        parts.append(
            f'<rect class="{"miss" if others else "shut"}" x="{x:.1f}" y="{y:.1f}" width="{width - 0.6:.1f}" '
            f'height="{height - 0.6:.1f}" fill-opacity="{shade:.2f}"><title>{told}</title></rect>'
        )
    return axis.svg("".join(parts), "Gaps over time", f"{name} missing")


def jumps_chart(times: Sequence[int], ratios: Sequence[float], names: Sequence[str], low: int, high: int) -> str:
    """When prices jump, and by how much."""
    axis = _Time(low, high, 200)
    logs = [math.log10(ratio) for ratio in ratios]
    reach = max(1, math.ceil(max(abs(log) for log in logs) - 0.05))
    texts = [(n, f"{10**n:,}" if n >= 0 else f"1/{10**-n:,}") for n in range(-reach, reach + 1)]
    ticks = [(n + reach, text) for n, text in texts if reach <= 3 or n % 2 == 0]
    parts = [axis.drawn(), axis.values(ticks, 2 * reach)]
    for at, log, name in zip(times, logs, names, strict=True):
        y = axis.bottom - axis.height * (log + reach) / (2 * reach)
        parts.append(
            f'<circle class="jump" cx="{axis.x(at):.1f}" cy="{y:.1f}" r="4"><title>{html.escape(name)}</title></circle>'
        )
    return axis.svg("".join(parts), "Jumps over time", "new price over old")


def spark(close: Float64, mark: int) -> str:
    """Closes around a jump, with a line before the bar ``mark``."""
    width, height, pad = 240, 84, 6
    low, high = float(close.min()), float(close.max())
    scale = (height - 2 * pad) / ((high - low) or 1.0)
    step = (width - 2 * pad) / max(1, len(close) - 1)
    points = " ".join(
        f"{pad + i * step:.1f},{height - pad - (value - low) * scale:.1f}" for i, value in enumerate(close.tolist())
    )
    x = pad + (mark - 0.5) * step
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" role="img" aria-label="Closes around the jump">'
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/><polyline points="{points}"/></svg>'
    )


class _Time:
    """A plot over time: its axis, grid and frame."""

    def __init__(self, low: int, high: int, height: int) -> None:
        self.low, self.high, self.height, self.bottom = low, max(high, low + 1), height, _TOP + height

    def x(self, at: int) -> float:
        return LEFT + _PLOT * (at - self.low) / (self.high - self.low)

    def drawn(self) -> str:
        # The end of the last stretch may lie beyond what int64 holds.
        ticks = time_ticks(self.low, min(self.high, np.iinfo(np.int64).max - DAY))
        return "".join(
            f'<line class="grid" x1="{self.x(at):.1f}" y1="{_TOP}" x2="{self.x(at):.1f}" y2="{self.bottom + 4}"/>'
            f'<text x="{min(self.x(at), WIDTH - RIGHT - 30):.1f}" y="{self.bottom + 18}" text-anchor="middle">'
            f"{text}</text>"
            for at, text in ticks
        )

    def values(self, ticks: Sequence[tuple[float, str]], top: float) -> str:
        return "".join(
            f'<line class="grid" x1="{LEFT}" y1="{(y := self.bottom - self.height * at / top):.1f}" '
            f'x2="{LEFT + _PLOT}" y2="{y:.1f}"/><text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
            for at, text in ticks
        )

    def svg(self, inside: str, label: str, axis: str = "") -> str:
        middle = _TOP + self.height / 2
        text = (
            f'<text class="axis" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{axis}</text>'
        )
        return (
            f'<div class="scroll"><svg class="chart" viewBox="0 0 {WIDTH} {self.bottom + _FOOT - 14}" role="img" '
            f'aria-label="{label}">{inside}{text if axis else ""}'
            f'<rect class="frame" x="{LEFT}" y="{_TOP}" width="{_PLOT}" height="{self.height}"/></svg></div>'
        )


def _short(name: str) -> str:
    return html.escape(name if len(name) <= _LABEL else name[: _LABEL - 1] + "…")


def _round_up(n: int) -> int:
    """A round even number at or above n."""
    step = max(2, int(nice_step(n, 4)))
    return -(-n // step) * step
