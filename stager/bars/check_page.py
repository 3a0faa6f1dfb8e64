"""What checks found as one HTML page: pictures of coverage, gaps and jumps, nothing from the network, no script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from stager.bars.check_charts import coverage_chart, gaps_chart, jumps_chart, presence_chart, spark
from stager.bars.coverage import cover
from stager.bars.facts import Facts
from stager.bars.findings import Finding, Report, SymbolFacts, counted, spoken
from stager.bars.gaps import Gaps
from stager.bars.inspection import Inspection
from stager.bars.read import Bars
from stager.config import format_nbytes
from stager.page import document

# What a page shows of many.
_LINES, _SPARKS, _DOTS, _ROWS, _FILES = 60, 12, 500, 50, 20
_AROUND = 20

_STYLE = """
.finding { display: grid; grid-template-columns: 84px 96px 1fr; gap: 2px 12px; padding: 9px 14px;
  border-bottom: 1px solid var(--line) }
.finding:last-child { border-bottom: 0 }
.finding p { margin: 0; overflow-wrap: anywhere; min-width: 0 }
.finding .do { color: var(--mute); grid-column: 3 }
.finding b { font-weight: 600 }
.pill { font-size: 12px; font-weight: 600; border: 1px solid; border-radius: 99px; padding: 0 9px; height: 20px;
  line-height: 20px; text-align: center }
.fine { color: var(--green) } .note { color: var(--blue) } .warning { color: var(--amber) } .error { color: var(--red) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px }
.back { fill: var(--band) }
.c1 { fill: var(--blue); fill-opacity: .3 } .c2 { fill: var(--blue); fill-opacity: .6 } .c3 { fill: var(--blue) }
.legend .l0 { background: var(--band); border: 1px solid var(--line) }
.legend .l1, .legend .l2, .legend .l3 { background: var(--blue) }
.legend .l1 { opacity: .3 } .legend .l2 { opacity: .6 }
.legend .lm { background: var(--red) } .legend .ls { background: var(--mute) }
.area { fill: var(--blue); fill-opacity: .45; stroke: var(--blue); stroke-width: .8 }
.miss { fill: var(--red) } .shut { fill: var(--mute) }
.jump { fill: var(--amber); fill-opacity: .75; stroke: var(--card); stroke-width: .8 }
.sparks { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 12px; margin: 12px 0 }
.sparks div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px;
  font-size: 13px; overflow-wrap: anywhere }
.sparks small { color: var(--mute) }
svg.spark { display: block; width: 100%; height: auto }
svg.spark polyline { fill: none; stroke: var(--blue); stroke-width: 1.5 }
svg.spark .mark { stroke: var(--red); stroke-dasharray: 4 3 }
.left { color: var(--mute); font-size: 13px; margin: 6px 0 }
td.text { overflow-wrap: anywhere; min-width: 110px }
td.time { white-space: nowrap }
@media (max-width: 640px) {
  main { padding: 18px 12px 40px }
  .finding { grid-template-columns: 84px 1fr } .finding p, .finding .do { grid-column: 1 / -1 }
}
"""


def render(found: Inspection, title: str) -> str:
    """A self-contained page, whose size is bounded whatever the number of symbols and bars.

    Parameters
    ----------
    found : Inspection
    title : str
        Heading, such as the files' names.
    """
    report = found.report()
    body = [f"<h1>{html.escape(title)}</h1>", f'<p class="sub">{html.escape(_about(report))}</p>', _cards(report)]
    body += ["<h2>Findings</h2>", f'<div class="card">{"".join(map(_finding, report.findings))}</div>']
    if found.facts is not None and found.gaps is not None:
        body += [*_coverage(found, report), *_gaps(found, found.gaps, report)]
        body += [*_jumps(found.bars, found.facts, report), *_symbols(report)]
    body += _reading(report)
    return document(title, "\n".join(body), style=_STYLE)


def _about(report: Report) -> str:
    if report.span is None:
        return "no bars"
    kind = "session dates" if report.timestamps == "session" else "UTC, opens of bars"
    return f"{spoken(report.span[0])} to {spoken(report.span[1])} ({kind}), interval {report.interval}"


def _cards(report: Report) -> str:
    n_missing = sum(one.n_missing for one in report.symbols)
    n_bad = sum(one.severity in ("warning", "error") for one in report.findings) + len(report.warnings)
    cards = [
        ("bars", f"{report.n_bars:,}", f"in {counted(len(report.inputs), 'file')}"),
        ("symbols", f"{report.n_symbols:,}", f"{sum(one.n_gaps > 0 for one in report.symbols):,} with gaps"),
        ("gaps", f"{report.n_gaps:,}", f"{counted(n_missing, 'bar')} missing"),
        ("jumps", f"{report.n_jumps:,}", "splits, units, spikes"),
        ("warnings", f"{n_bad:,}", "pack refuses" if report.is_refused else "pack goes on"),
    ]
    return (
        '<div class="cards">'
        + "".join(f"<div><span>{name}</span><b>{value}</b><small>{note}</small></div>" for name, value, note in cards)
        + "</div>"
    )


def _finding(one: Finding) -> str:
    remedy = f'<p class="do">{html.escape(one.remedy)}</p>' if one.remedy else ""
    return (
        f'<div class="finding"><span class="pill {one.severity}">{one.severity}</span><b>{one.check}</b>'
        f"<p>{html.escape(one.text)}</p>{remedy}</div>"
    )


def _coverage(found: Inspection, report: Report) -> Iterable[str]:
    bars = found.bars
    assert bars.interval is not None
    coverage = cover(bars.arranged.times, bars.first_rows, bars.counts, bars.interval)
    chosen = list(range(report.n_symbols))
    if report.n_symbols > _LINES:
        worst = sorted(chosen, key=lambda i: (report.symbols[i].n_elsewhere, report.symbols[i].n_missing), reverse=True)
        chosen = worst[:_LINES]
    yield "<h2>Coverage</h2>"
    if report.n_symbols > 1:
        yield '<p class="legend">Symbols that have a bar, over time</p>'
        yield presence_chart(coverage)
    most = (
        "the sessions of all symbols" if bars.interval.is_session else "the most that a symbol has in a stretch of time"
    )
    yield (
        '<p class="legend" style="margin-top:12px"><i class="l0"></i>no bar<i class="l1"></i>up to a third'
        f'<i class="l2"></i>up to two thirds<i class="l3"></i>more, of {most}</p>'
    )
    yield coverage_chart(coverage, bars.symbols, chosen)
    if report.n_symbols > _LINES:
        yield _left(
            f"The {_LINES} symbols with the most missing bars; {report.n_symbols - _LINES:,} more are not drawn."
        )


def _gaps(found: Inspection, gaps: Gaps, report: Report) -> Iterable[str]:
    if not report.n_gaps:
        return
    yield "<h2>Gaps</h2>"
    yield (
        '<p class="legend"><i class="lm"></i>another symbol has bars meanwhile<i class="ls"></i>no symbol has; darker '
        "where there are more gaps</p>"
    )
    interval, times = found.bars.interval, found.bars.arranged.times
    assert interval is not None
    name = "sessions" if interval.is_session else f"bars of {interval.text}"
    yield gaps_chart(gaps, int(times.min()), int(times.max()), name)
    yield "<h2>Worst gaps</h2>"
    yield _table(
        ["symbol", "after", "until", "bars missing", "others have"],
        [
            (one.symbol, spoken(one.after), spoken(one.until), f"{one.n_missing:,}", f"{one.n_elsewhere:,}")
            for one in report.worst_gaps[:_FILES]
        ],
        times=(1, 2),
    )
    if report.n_gaps > _FILES:
        yield _left(f"Of all {report.n_gaps:,}, those in which other symbols have most bars, then the longest.")
    lengths = ", ".join(f"{one.n_missing:,} ({one.n_gaps:,} times)" for one in report.gap_lengths[:12])
    yield _left(f"Most frequent lengths in bars: {lengths}.")


def _jumps(bars: Bars, facts: Facts, report: Report) -> Iterable[str]:
    if not report.n_jumps:
        return
    rows, times, close = facts.jumps.rows, bars.arranged.times, bars.arranged.columns[3]
    words = [
        f"{one.symbol}, {spoken(one.time)}: price times {one.ratio:.4g}, "
        + (f"near {one.near}" if one.near else "and back")
        for one in report.jumps[:_DOTS]
    ]
    dots = facts.jumps.where(np.arange(len(rows)) < _DOTS)
    yield "<h2>Jumps</h2>"
    yield jumps_chart(dots.times.tolist(), dots.ratios.tolist(), words, int(times.min()), int(times.max()))
    if report.n_jumps > _DOTS:
        yield _left(f"The first {_DOTS} of {report.n_jumps:,} jumps, symbol by symbol.")
    sparks = []
    for number in _first_of_each(facts.symbols_of(dots.rows))[:_SPARKS]:
        row, one = int(rows[number]), report.jumps[number]
        symbol = int(facts.symbols_of(rows[number : number + 1])[0])
        first = max(int(bars.first_rows[symbol]), row - _AROUND)
        stop = min(int(bars.first_rows[symbol] + bars.counts[symbol]), row + _AROUND)
        near = f"near {one.near}" if one.near else "and back"
        sparks.append(
            f"<div><b>{html.escape(one.symbol)}</b> times {one.ratio:.4g}, {near}<br><small>{spoken(one.time)}</small>"
            f"{spark(close[first:stop], row - first)}</div>"
        )
    yield f'<p class="legend" style="margin-top:12px">Closes before and after, {_AROUND} bars each</p>'
    yield f'<div class="sparks">{"".join(sparks)}</div>'
    yield _table(
        ["symbol", "first bar of the new price", "new over old", "near", "kind"],
        [(one.symbol, spoken(one.time), f"{one.ratio:.6g}", one.near or "-", one.kind) for one in report.jumps[:_ROWS]],
        times=(1,),
    )
    if report.n_jumps > _ROWS:
        yield _left(f"{report.n_jumps - _ROWS:,} more: --json lists up to a thousand.")


def _first_of_each(symbols: npt.NDArray[np.int64]) -> list[int]:
    """Numbers of jumps of some symbols: the first of each symbol, then the rest."""
    _, first = np.unique(symbols, return_index=True)
    return [*first.tolist(), *np.setdiff1d(np.arange(len(symbols)), first).tolist()]


def _symbols(report: Report) -> Iterable[str]:
    def trouble(one: SymbolFacts) -> tuple[int, int, int]:
        return one.n_jumps + one.n_off_grid + one.n_not_positive, one.n_elsewhere, one.n_missing

    shown = sorted(report.symbols, key=trouble, reverse=True)[:_ROWS] if report.n_symbols > _ROWS else report.symbols
    yield "<h2>Symbols</h2>"
    yield _table(
        [
            "symbol", "bars", "first", "last", "gaps", "missing", "others have", "longest gap", "off grid",
            "not positive", "without volume", "jumps",
        ],
        [
            (
                one.symbol, f"{one.n_bars:,}", spoken(one.first), spoken(one.last), f"{one.n_gaps:,}",
                f"{one.n_missing:,}", f"{one.n_elsewhere:,}", f"{one.longest_gap:,}", f"{one.n_off_grid:,}",
                f"{one.n_not_positive:,}", f"{one.n_zero_volume:,}", f"{one.n_jumps:,}",
            )
            for one in shown
        ],
        times=(2, 3),
    )  # fmt: skip
    if report.n_symbols > _ROWS:
        yield _left(f"The {_ROWS} with the most to look at; {report.n_symbols - _ROWS:,} more are in --json.")


def _reading(report: Report) -> Iterable[str]:
    yield "<h2>How the files were read</h2>"
    rows = [(one.what, f"{one.value} ({one.source})") for one in report.decisions]
    rows += [("warning", text) for text in report.warnings]
    rows += [
        ("file", f"{one.name}: {counted(one.n_rows, 'row')}, {format_nbytes(one.size_nbytes)}")
        for one in report.inputs[:_FILES]
    ]
    yield _table(["", ""], rows, text=(0, 1))
    if len(report.inputs) > _FILES:
        yield _left(f"and {len(report.inputs) - _FILES:,} more files.")


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, text: tuple[int, ...] = (0,), times: tuple[int, ...] = ()
) -> str:
    kinds = {**dict.fromkeys(text, ' class="text"'), **dict.fromkeys(times, ' class="time"')}

    def line(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(f"<{tag}{kinds.get(i, '')}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(cells))
            + "</tr>"
        )

    head = f"<thead>{line(heads, 'th')}</thead>" if any(heads) else ""
    return f'<div class="scroll"><table>{head}<tbody>{"".join(line(row, "td") for row in rows)}</tbody></table></div>'


def _left(text: str) -> str:
    return f'<p class="left">{html.escape(text)}</p>'
