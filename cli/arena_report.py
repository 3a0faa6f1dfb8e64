"""``stager arena-report``."""

from __future__ import annotations

from pathlib import Path

import click

from stager.cuda.arena_page import render
from stager.cuda.timeline import read_timeline


@click.command("arena-report")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page to write [FILE with .html].")
def arena_report(file: Path, output: Path | None) -> None:
    """Turn a timeline of `arena.record()` into one HTML page."""
    page = render(read_timeline(file), file.name)
    output = file.with_suffix(".html") if output is None else output
    if output.resolve() == file.resolve():
        raise click.UsageError(f"the page would replace the timeline {file}; give another name with -o")
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(output), error.strerror) from error
    click.echo(output)
