"""``stager pack``."""

from __future__ import annotations

import click

from stager.bars.options import ReadOptions
from stager.cli.info import show
from stager.cli.output import Reporter
from stager.cli.reading import read_options
from stager.packs.appending import append as append_to
from stager.packs.packing import pack as write_pack
from stager.samples.summary import summarise


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option("-o", "--out", type=click.Path(), help="The pack's directory [bars.csv -> bars.pack].")
@click.option("--force", is_flag=True, help="Replace an existing pack.")
@click.option("--append", type=click.Path(), metavar="PACK", help="Add the bars to this pack instead.")
@read_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def pack(
    files: tuple[str, ...],
    out: str | None,
    force: bool,
    append: str | None,
    read: ReadOptions,
    as_json: bool,
) -> None:
    """Read bar FILES and write one pack, or add them to one.

    FILES are CSV, JSON, Feather or Parquet with open, high, low, close and volume, plain or compressed (gzip, zstd,
    zip): paths, globs, a directory, or URIs such as s3://bucket/bars.parquet.
    """
    if append is not None and (out is not None or force):
        raise click.UsageError("--append adds to the pack it names; leave out --out and --force")
    source = files[0] if len(files) == 1 else list(files)
    with Reporter() as progress:
        if append is not None:
            packed = append_to(append, source, read=read, progress=progress)
        else:
            packed = write_pack(source, out, read=read, overwrite=force, progress=progress)
    show(summarise(packed), as_json)
