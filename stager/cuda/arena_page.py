"""Draws a timeline as one HTML page: inline SVG and a few lines of script, nothing from the network."""

from __future__ import annotations

import html
import json
from itertools import pairwise

from stager.config import format_nbytes
from stager.cuda.arena_style import OUTSIDE, RATE, SCRIPT, SLAB, STYLE
from stager.cuda.timeline import SiteRow, Stretch, Timeline
from stager.page import document, nice_step

_WIDTH, _HEIGHT = 1080, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 16, 14, 46
_PLOT_W, _PLOT_H = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_POINTS = 900
_STEP_MARKS = 200


def render(timeline: Timeline, title: str) -> str:
    """A self-contained page.

    Parameters
    ----------
    timeline : Timeline
        As :func:`stager.cuda.timeline.read_timeline` gives it.
    title : str
        Heading, such as the file's name.
    """
    points = _thin(timeline.stretches)
    seconds = max([timeline.end.t if timeline.end else 0.0, *(point.t for point in points[-1:])], default=0.0) or 1e-3
    capacity = timeline.header.capacity_nbytes
    top = _nice_bytes(max([capacity, *(point.most + point.overflow for point in points)]))
    data = [[round(p.t, 6), p.most, p.used, p.overflow, p.allocations] for p in points]
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">Arena of {format_nbytes(capacity)}, recorded {html.escape(timeline.header.began)}'
        f"{'' if timeline.end else ' (the recording was cut short)'}</p>",
        _cards(timeline, points, seconds),
        "<h2>Bytes over time</h2>",
        _legend(),
        _bytes_chart(timeline, points, seconds, top),
        "<h2>Allocations per second</h2>",
        _rate_chart(points, seconds),
        _sites_table(timeline.sites),
    ]
    if timeline.overflows:
        body.append(_overflow_table(timeline))
    script = SCRIPT % {"data": json.dumps(data), "seconds": seconds, "left": _LEFT, "width": _PLOT_W}
    return document(title, "\n".join([*body, '<div id="tip" hidden></div>']), style=STYLE, script=script)


def _thin(stretches: list[Stretch]) -> list[Stretch]:
    """At most ``_POINTS`` stretches, of which none hides a peak."""
    if len(stretches) <= _POINTS:
        return stretches
    size = -(-len(stretches) // _POINTS)
    groups = [stretches[at : at + size] for at in range(0, len(stretches), size)]
    return [
        Stretch(
            group[-1].t,
            group[-1].used,
            max(part.most for part in group),
            max(part.overflow for part in group),
            group[-1].allocations,
        )
        for group in groups
    ]


def _nice_bytes(nbytes: int) -> int:
    """A round number of bytes at or above ``nbytes`` that divides well into four."""
    unit = 1024
    while unit * 1024 <= nbytes:
        unit *= 1024
    for factor in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024):
        if factor * unit >= nbytes:
            return factor * unit
    return 2048 * unit


def _time_axis(seconds: float) -> str:
    step = nice_step(seconds)
    unit, scale = ("s", 1.0) if seconds >= 2 else ("ms", 1e3) if seconds >= 2e-3 else ("µs", 1e6)
    parts = []
    for index in range(int(seconds / step + 1e-9) + 1):
        x = _LEFT + _PLOT_W * index * step / seconds
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _PLOT_H}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP + _PLOT_H + 18}" text-anchor="middle">{index * step * scale:g}</text>'
        )
    x, y = _LEFT + _PLOT_W / 2, _HEIGHT - 8
    parts.append(f'<text class="axis" x="{x:.0f}" y="{y}" text-anchor="middle">time since the start [{unit}]</text>')
    return "".join(parts)


def _value_axis(top: float, label: str, texts: list[str]) -> str:
    parts = []
    for index, text in enumerate(texts):
        y = _TOP + _PLOT_H * (1 - index / (len(texts) - 1))
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _PLOT_W}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    middle = _TOP + _PLOT_H / 2
    parts.append(
        f'<text class="axis" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{label}</text>'
    )
    return "".join(parts)


def _path(values: list[tuple[float, float]], seconds: float, top: float, *, base: list[float] | None = None) -> str:
    """An area under steps: each value holds since the one before."""
    if not values:
        return ""
    x = [_LEFT + _PLOT_W * t / seconds for t, _ in values]
    y = [_TOP + _PLOT_H * (1 - value / top) for _, value in values]
    low = [_TOP + _PLOT_H * (1 - value / top) for value in base] if base else [_TOP + _PLOT_H] * len(values)
    parts = [f"M{_LEFT:.1f},{low[0]:.1f}V{y[0]:.1f}H{x[0]:.1f}"]
    parts += [f"V{y[i]:.1f}H{x[i]:.1f}" for i in range(1, len(x))]
    parts += [f"V{low[i]:.1f}H{x[i - 1] if i else _LEFT:.1f}" for i in range(len(x) - 1, -1, -1)]
    return "".join(parts) + "Z"


def _bytes_chart(timeline: Timeline, points: list[Stretch], seconds: float, top: int) -> str:
    scale = _PLOT_W / seconds
    bands = []
    if len(timeline.steps) <= _STEP_MARKS:
        bands = [
            f'<rect class="step{index % 2}" x="{_LEFT + step.begin * scale:.1f}" y="{_TOP}" '
            f'width="{max((step.end - step.begin) * scale, 0.4):.1f}" height="{_PLOT_H}"/>'
            for index, step in enumerate(timeline.steps)
        ]
    slab = _path([(p.t, p.most) for p in points], seconds, top)
    outside = ""
    if any(p.overflow for p in points):
        shape = _path([(p.t, p.most + p.overflow) for p in points], seconds, top, base=[float(p.most) for p in points])
        outside = f'<path d="{shape}" fill="{OUTSIDE}" fill-opacity=".75"/>'
    marks = "".join(
        f'<line class="over" x1="{_LEFT + event.t * scale:.1f}" y1="{_TOP + _PLOT_H}" '
        f'x2="{_LEFT + event.t * scale:.1f}" y2="{_TOP + _PLOT_H + 6}"/>'
        for event in timeline.overflows[:400]
    )
    y = _TOP + _PLOT_H * (1 - timeline.header.capacity_nbytes / top)
    limit = f'<line class="limit" x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _PLOT_W}" y2="{y:.1f}"/>'
    ticks = [format_nbytes(top * index // 4) for index in range(5)]
    return _svg(
        "".join(bands)
        + _value_axis(top, "bytes", ticks)
        + _time_axis(seconds)
        + f'<path d="{slab}" fill="{SLAB}" fill-opacity=".55" stroke="{SLAB}" stroke-width=".8"/>'
        + outside
        + marks
        + limit,
        "Bytes of the arena over time",
    )


def _rate_chart(points: list[Stretch], seconds: float) -> str:
    rates: list[tuple[float, float]] = []
    for before, point in pairwise([Stretch(0.0, 0, 0, 0, 0), *points]):
        rates.append((point.t, (point.allocations - before.allocations) / max(point.t - before.t, 1e-9)))
    step = nice_step(max([1.0, *(rate for _, rate in rates)]), most=4)
    top = 4 * step
    shape = _path(rates, seconds, top)
    ticks = [_count(step * index) for index in range(5)]
    return _svg(
        _value_axis(top, "allocations / s", ticks)
        + _time_axis(seconds)
        + f'<path d="{shape}" fill="{RATE}" fill-opacity=".55" stroke="{RATE}" stroke-width=".8"/>',
        "Allocations per second",
    )


def _svg(inside: str, label: str) -> str:
    frame = f'<line class="cross" y1="{_TOP}" y2="{_TOP + _PLOT_H}" style="display:none"/>'
    return (
        f'<div class="scroll"><svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{inside}"
        f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_PLOT_W}" height="{_PLOT_H}"/>{frame}</svg></div>'
    )


def _count(number: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:g}{unit}"
    return f"{number:g}"


def _cards(timeline: Timeline, points: list[Stretch], seconds: float) -> str:
    most = max((p.most for p in points), default=timeline.header.used)
    outside = max((p.overflow for p in points), default=0)
    end = timeline.end
    cards = [
        ("peak in the slab", format_nbytes(most), f"{most / timeline.header.capacity_nbytes:.0%} of its capacity"),
        ("most overflow", format_nbytes(outside), f"{end.overflows if end else len(timeline.overflows):,} requests"),
        ("allocations", f"{points[-1].allocations if points else 0:,}", f"in {seconds:,.3f} s"),
        ("steps", f"{end.steps if end else len(timeline.steps):,}", "ended while recording"),
    ]
    if end is not None:
        cards.append(
            ("merges", f"{end.stats.get('merges', 0):,}", f"{end.stats.get('misses', 0):,} requests not in a bin")
        )
        if end.missed:
            cards.append(("not recorded", f"{end.missed:,}", "events of concurrent threads"))
    return (
        '<div class="cards">'
        + "".join(f"<div><span>{name}</span><b>{value}</b><small>{note}</small></div>" for name, value, note in cards)
        + "</div>"
    )


def _legend() -> str:
    return (
        f'<p class="legend"><i style="background:{SLAB}"></i>live in the slab (most in each stretch of time)'
        f'<i style="background:{OUTSIDE}"></i>overflow, outside the slab'
        '<i class="dash"></i>capacity<i class="band"></i>steps</p>'
    )


def _sites_table(sites: list[SiteRow]) -> str:
    if not sites:
        return ""
    widest = max(site.most_nbytes for site in sites) or 1
    rows = "".join(
        f"<tr><td class='site'>{html.escape(site.site)}</td><td>{site.allocations:,}</td>"
        f"<td>{format_nbytes(site.nbytes)}</td><td>{format_nbytes(max(site.live_nbytes, 0))}</td>"
        f"<td>{format_nbytes(site.most_nbytes)}</td>"
        f"<td class='bar'><i style='width:{100 * site.most_nbytes / widest:.1f}%'></i></td></tr>"
        for site in sites
    )
    return (
        "<h2>Largest call sites</h2><div class='scroll'><table><thead><tr><th class='site'>line</th>"
        "<th>allocations</th><th>bytes in all</th>"
        f"<th>alive at the end</th><th>most alive at once</th><th></th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _overflow_table(timeline: Timeline) -> str:
    rows = "".join(
        f"<tr><td>{event.t:.6f}</td><td>{format_nbytes(event.nbytes)}</td>"
        f"<td class='site'>{html.escape(event.site)}</td></tr>"
        for event in timeline.overflows[:20]
    )
    return (
        "<h2>First overflows</h2><div class='scroll'><table><thead><tr><th>time [s]</th><th>request</th>"
        f"<th class='site'>line</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
