"""``stager check``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from stager.bars.check_page import render
from stager.bars.findings import Report, counted, named, spoken
from stager.bars.inspection import check as inspect
from stager.bars.options import ReadOptions
from stager.cli.output import Reporter, print_table
from stager.cli.reading import read_options

_STYLES = {"fine": "green", "note": "blue", "warning": "yellow", "error": "bold red"}
_SHOWN = 5


@click.command(short_help="Tell what is wrong with bar files; nothing is packed.")
@click.argument("files", nargs=-1, required=True)
@read_options
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with pictures, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def check(files: tuple[str, ...], read: ReadOptions, html: Path | None, as_json: bool) -> None:
    """Read bar FILES as `stager pack` does, and tell what is wrong with them: duplicates, order, prices that contradict
    each other, times off the grid, prices of zero or below, bars without volume, jumps, gaps, an unfinished last bar.

    No pack is written. Exits with 1 if `stager pack` would refuse the files.
    """
    if html is not None and any(html.resolve() == Path(file).resolve() for file in files):
        raise click.UsageError(f"the page would replace the bars {html}; give another name with --html")
    title = named(files)
    with Reporter() as progress:
        found = inspect(files[0] if len(files) == 1 else list(files), read, progress=progress)
    report = found.report()
    if html is not None:
        try:
            html.write_text(render(found, title), encoding="utf-8")
        except OSError as error:
            raise click.FileError(str(html), error.strerror) from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        print_table(_lines(report), title, _STYLES)
        if html is not None:
            click.echo(f"page: {html}")
    if report.is_refused:
        raise SystemExit(1)


def _lines(report: Report) -> Iterator[tuple[str, str, str]]:
    kind = "session dates" if report.timestamps == "session" else "UTC, bar opens"
    span = "" if report.span is None else f", {spoken(report.span[0])} to {spoken(report.span[1])} ({kind})"
    interval = "" if report.interval is None else f", interval {report.interval}"
    yield "read", "", f"{counted(report.n_bars, 'bar')} of {counted(report.n_symbols, 'symbol')}{span}{interval}"
    for one in report.findings:
        yield one.check, one.severity, one.sentence
    for jump in report.jumps[:_SHOWN]:
        near = f"near {jump.near}" if jump.near else "and back"
        yield "jump", "", f"{jump.symbol} at {spoken(jump.time)}: price times {jump.ratio:.4g}, {near} ({jump.kind})"
    if report.n_jumps > _SHOWN:
        yield "jump", "", f"and {report.n_jumps - _SHOWN:,} more: --json lists up to a thousand"
    for gap in report.worst_gaps[:_SHOWN]:
        others = f" (another symbol has {gap.n_elsewhere:,} of them)" if gap.n_elsewhere else ""
        span = f"{spoken(gap.after)} to {spoken(gap.until)}"
        yield "gap", "", f"{gap.symbol}: {gap.n_missing:,} bars missing{others}, {span}"
    if report.n_gaps > _SHOWN:
        yield "gap", "", f"and {report.n_gaps - _SHOWN:,} more: --json lists the worst hundred"
    for decision in report.decisions:
        yield "decided", "", f"{decision.what}: {decision.value} ({decision.source})"
    for warning in report.warnings:
        yield "reading", "warning", warning
