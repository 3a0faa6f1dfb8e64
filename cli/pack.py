"""``stager pack``."""

from __future__ import annotations

import click
import msgspec

from stager.bars.memory import total_nbytes
from stager.bars.options import ROLES, ReadOptions
from stager.cli.info import show
from stager.cli.output import Reporter, plain
from stager.config import parse_nbytes
from stager.packs.appending import append as append_to
from stager.packs.manifest import readable
from stager.packs.packing import discard as discard_unfinished
from stager.packs.packing import pack as write_pack
from stager.packs.usage import Usage
from stager.samples.summary import summarise


def _columns(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for value in values:
        role, _, name = value.partition("=")
        if not name or role not in ROLES:
            raise click.BadParameter(f"{value!r} is not ROLE=NAME with a role of {', '.join(ROLES)}")
        if role in columns:
            raise click.BadParameter(f"the role {role} is given twice: {columns[role]!r} and {name!r}")
        columns[role] = name
    return columns


def _nbytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_nbytes(value, total=total_nbytes(), name="memory")


@click.command()
@click.argument("files", nargs=-1)
@click.option("-o", "--out", type=click.Path(), help="The pack's directory [bars.csv -> bars.pack].")
@click.option("--force", is_flag=True, help="Replace an existing pack.")
@click.option("--append", type=click.Path(), metavar="PACK", help="Add the bars to this pack instead.")
@click.option("--column", "columns", multiple=True, callback=_columns, metavar="ROLE=NAME",
              help="The column of a role (time, symbol, open, high, low, close, volume); repeat it.")  # fmt: skip
@click.option("--zone", help="Zone of time stamps that carry none: America/New_York, UTC, -05:00.")
@click.option("--symbol", help="The symbol, if no column holds it.")
@click.option("--label", type=click.Choice(["open", "close"]),
              help="Whether a stamp marks the start or the end of its bar [from the format, else open].")  # fmt: skip
@click.option("--interval", help="Spacing of the bars: 1min, 5min, 1h, 1d, 1w, 1mo [inferred].")
@click.option("--adjustment", type=click.Choice(["raw", "split", "total", "unknown"]), default="unknown",
              show_default=True, help="What prices and volume were adjusted for.")  # fmt: skip
@click.option("--allow-years", nargs=2, type=int, metavar="FIRST LAST", help="Plausible years [1980 to next year].")
@click.option("--nan", type=click.Choice(["error", "null"]), default="error", show_default=True,
              help="What a literal NaN or infinity in a price is: an error, or no bar.")  # fmt: skip
@click.option("--duplicates", type=click.Choice(["error", "first", "last"]), default="error", show_default=True,
              help="Which row of a symbol and time is kept where they differ, in the order of files.")  # fmt: skip
@click.option("--delimiter", help="Character between the fields [from the header].")
@click.option(
    "--format",
    "described",
    metavar="NAME|FILE.toml",
    help="The files' format, see `stager formats` [from names, headers and first rows].",
)
@click.option("--time-pattern", help="How times are written, such as '%d.%m.%Y %H:%M'.")
@click.option("--date-order", type=click.Choice(["dmy", "mdy"]), help="Whether the day or the month stands first.")
@click.option("--encoding", help="Encoding of text that is no UTF-8: latin-1, gbk, utf-16-le.")
@click.option("--decimal", type=click.Choice([".", ","]), help="The mark before a fraction [from the cells].")
@click.option("--thousands", help="The marks between thousands [from the cells].")
@click.option("--field", type=click.Choice(["open", "high", "low", "close", "volume"]),
              help="What the cells hold where every column is a symbol.")  # fmt: skip
@click.option("--memory", metavar="SIZE", callback=_nbytes,
              help="Memory that it may take, such as 2GiB; rows beyond go to a scratch file beside the pack, and files "
              "larger than its share are read in parts [a quarter of the machine or container].")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), metavar="N",
              help="Files, then parts of the rows, worked on at once [as many as cores, 128 MiB each].")  # fmt: skip
@click.option("--resume", is_flag=True,
              help="Go on with what a killed `stager pack` left in DIR.partial; give the same FILES and options. Files "
              "that were changed since are read again.")  # fmt: skip
@click.option("--discard", is_flag=True, help="Remove what a killed `stager pack` left in DIR.partial, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def pack(
    files: tuple[str, ...],
    out: str | None,
    force: bool,
    append: str | None,
    columns: dict[str, str],
    zone: str | None,
    symbol: str | None,
    label: str | None,
    interval: str | None,
    adjustment: str,
    allow_years: tuple[int, int] | None,
    nan: str,
    duplicates: str,
    delimiter: str | None,
    described: str | None,
    time_pattern: str | None,
    date_order: str | None,
    encoding: str | None,
    decimal: str | None,
    thousands: str | None,
    field: str | None,
    memory: int | None,
    workers: int | None,
    resume: bool,
    discard: bool,
    as_json: bool,
) -> None:
    """Read bar FILES and write one pack, or add them to one.

    FILES are CSV, JSON, Feather or Parquet with open, high, low, close and volume, plain or compressed (gzip, zstd,
    zip): paths, globs, a directory, or URIs such as s3://bucket/bars.parquet. They may be larger than memory.

    The pack is written as DIR.partial and renamed. A failure or Ctrl-C removes that; after a kill it stays, for
    --resume or --discard.
    """
    if not files and not (discard and out is not None):
        raise click.UsageError("Missing argument 'FILES...'.")
    if append is not None and (out is not None or force):
        raise click.UsageError("--append adds to the pack it names; leave out --out and --force")
    if append is not None and (memory is not None or workers is not None or resume or discard):
        raise click.UsageError(
            "--append reads its files into memory; leave out --memory, --workers, --resume, --discard"
        )
    if resume and discard:
        raise click.UsageError("--resume goes on with what --discard removes; leave one out")
    options = ReadOptions(
        columns=columns,
        zone=zone,
        symbol=symbol,
        label=label,  # type: ignore[arg-type]
        interval=interval,
        adjustment=adjustment,  # type: ignore[arg-type]
        allow_years=allow_years,
        nan=nan,  # type: ignore[arg-type]
        duplicates=duplicates,  # type: ignore[arg-type]
        delimiter=delimiter,
        format=described,
        time_pattern=time_pattern,
        date_order=date_order,  # type: ignore[arg-type]
        encoding=encoding,
        decimal=decimal,  # type: ignore[arg-type]
        thousands=thousands,
        field=field,  # type: ignore[arg-type]
    )
    source = files[0] if len(files) == 1 else list(files)
    if discard:
        removed = readable(discard_unfinished(source, out))
        click.echo(msgspec.json.encode({"removed": removed}) if as_json else f"removed {plain(removed)}")
        return
    usage = Usage()
    with Reporter() as progress:
        if append is not None:
            packed = append_to(append, source, read=options, progress=progress)
        else:
            packed = write_pack(
                source,
                out,
                read=options,
                overwrite=force,
                progress=progress,
                memory_nbytes=memory,
                workers=workers,
                resume=resume,
                usage=usage,
            )
    show(summarise(packed), as_json, None if append is not None else usage)
