"""``stager info``."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from stager.cli.output import print_table
from stager.config import format_nbytes
from stager.packs.layout import open_pack
from stager.packs.manifest import MANY_SEGMENTS
from stager.packs.usage import Usage
from stager.samples.summary import Summary, summarise


@click.command(short_help="Tell what a pack holds, and what was decided.")
@click.argument("pack", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def info(pack: str, as_json: bool) -> None:
    """Tell what PACK holds, what was decided about its input, and from what."""
    show(summarise(open_pack(pack)), as_json)


def show(summary: Summary, as_json: bool, usage: Usage | None = None) -> None:
    """Print a summary, and what packing took, as a table or as JSON."""
    if as_json:
        more = {} if usage is None else {"usage": usage}
        click.echo(msgspec.json.format(msgspec.json.encode(summary.as_dict() | more), indent=2))
    else:
        print_table([*_lines(summary), *([] if usage is None else _taken(usage))], title=summary.path)


def _taken(usage: Usage) -> Iterator[tuple[str, str]]:
    took = f"{format_nbytes(usage.anonymous_nbytes)} of memory at most, of {format_nbytes(usage.memory_nbytes)}"
    took += f" in each of {usage.n_processes} processes" if usage.n_processes else ""
    took += f", {format_nbytes(usage.scratch_nbytes)} of scratch" if usage.scratch_nbytes else ", no scratch"
    if usage.group_nbytes is not None:
        took += f"; its container has taken {format_nbytes(usage.group_nbytes)} at most, page cache too"
    yield "took", took
    if usage.n_kept or usage.read_again:
        yield "resumed", f"{usage.n_kept:,} file{'s' * (usage.n_kept != 1)} had been read before"
    for name in usage.read_again:
        yield "read again", f"{name}: was changed since"


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    m = summary.manifest
    first, last = (stamp[:10] if m.timestamps == "session" else _minutes(stamp) for stamp in m.span)
    n_symbols, columns = m.shape
    yield "symbols", f"{n_symbols:,}" + (" side by side in each row, a panel" if m.panel is not None else "")
    yield "rows", f"{m.n_rows:,} of " + ", ".join(column.name for column in columns)
    yield "span", f"{first} to {last}" + (" (session dates)" if m.timestamps == "session" else " (UTC, bar opens)")
    yield "interval", m.interval + (f", closing at {m.session_close}" if m.session_close is not None else "")
    gaps = f"{summary.n_gaps:,}, {summary.n_missing:,} bars missing, at most {summary.largest_gap:,} at a place"
    yield "gaps", gaps if summary.n_gaps else "none"
    yield "adjustment", m.adjustment
    yield "bytes", f"{format_nbytes(summary.rows_nbytes)} rows, {format_nbytes(summary.disk_nbytes)} on disk"
    if (n := len(m.segments)) > 1:
        yield "segments", f"{n}" + ("; merge them with `stager compact`" if n > MANY_SEGMENTS else "")
    for column in columns:
        if column.n_missing:
            yield "missing", f"{column.n_missing:,} values of {column.name}"
    for reason, n in m.dropped.items():
        if n:
            yield "dropped", f"{n:,} rows: {reason}"
    for decision in m.decisions:
        yield "decided", f"{decision.what}: {decision.value} ({decision.source})"
    for warning in m.warnings:
        yield "warning", warning
    for file in m.inputs[:5]:
        yield "input", f"{file.name}: {file.n_rows:,} rows, {format_nbytes(file.size_nbytes)}"
    if len(m.inputs) > 5:
        yield "input", f"and {len(m.inputs) - 5:,} more files"
    yield "fingerprint", m.fingerprint


def _minutes(stamp: str) -> str:
    """An ISO stamp without the zeros that say nothing."""
    text = stamp.removesuffix("Z").rstrip("0").removesuffix(".")
    return f"{text.replace('T', ' '):0<19}Z"
