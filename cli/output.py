"""Tables and progress, on a terminal and in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from stager.config import format_nbytes

_LINE_SECONDS = 3.0


def plain(text: str) -> str:
    """Text on one line, without what a terminal would obey: file names and cells are data from strangers."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def fail(message: str) -> None:
    """One line on standard error."""
    click.echo(f"Error: {plain(message)}", err=True)


def print_table(
    rows: Iterable[tuple[str, ...]], title: str | None = None, styles: Mapping[str, str] | None = None
) -> None:
    """Print rows of as many cells each; in a pipe a row stays on its line, whatever its length.

    `styles` says how a terminal shows cells of some texts, such as ``{"error": "red"}``.
    """
    console = Console(soft_wrap=True) if not sys.stdout.isatty() else Console()
    if title:
        console.print(Text(plain(title), style="bold"))
    cells = [[plain(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
        for *row, last in cells:
            padded = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
            console.print(Text("  ".join([*padded, last])), soft_wrap=True)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for number in range(len(cells[0]) - 1 if cells else 0):
        table.add_column(style="" if number else "cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    console.print(table)


class Reporter:
    """Progress on standard error: a bar on a terminal, a plain line every few seconds otherwise.

    Called with (phase, done_nbytes, total_nbytes).
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, object] = {}
        self._line = time.monotonic()
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description:<10}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, phase: str, done_nbytes: int, total_nbytes: int) -> None:
        if self._bar:
            if phase not in self._tasks:
                self._tasks[phase] = self._bar.add_task(phase, total=total_nbytes or None)
            self._bar.update(self._tasks[phase], completed=done_nbytes, total=total_nbytes or None)  # type: ignore[arg-type]
        elif (now := time.monotonic()) - self._line >= _LINE_SECONDS:
            self._line = now
            share = f" of {format_nbytes(total_nbytes)} ({done_nbytes / total_nbytes:.0%})" if total_nbytes else ""
            print(f"{phase}: {format_nbytes(done_nbytes)}{share}", file=sys.stderr)
