"""``stager pack``."""

from __future__ import annotations

from functools import partial

import click
import msgspec

from stager.bars.memory import total_nbytes
from stager.bars.options import ReadOptions
from stager.cli.info import show
from stager.cli.output import Reporter, plain
from stager.cli.reading import read_options
from stager.config import parse_nbytes
from stager.packs.appending import append as append_to
from stager.packs.manifest import readable
from stager.packs.packing import discard as discard_unfinished
from stager.packs.packing import pack as write_pack
from stager.packs.usage import Usage
from stager.samples.summary import summarise


def _nbytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_nbytes(value, total=total_nbytes(), name="memory")


@click.command()
@click.argument("files", nargs=-1)
@click.option("-o", "--out", type=click.Path(), help="The pack's directory [bars.csv -> bars.pack].")
@click.option("--force", is_flag=True, help="Replace an existing pack.")
@click.option("--append", type=click.Path(), metavar="PACK", help="Add the bars to this pack instead.")
@read_options
@click.option("--memory", metavar="SIZE", callback=_nbytes,
              help="Memory that it may take, such as 2GiB; rows beyond go to a scratch file beside the pack, and files "
              "larger than its share are read in parts [a quarter of the machine or container].")  # fmt: skip
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Files, then parts of the rows, worked on here at once [as many as cores, 128 MiB each].",
)
@click.option("--cluster", metavar="ADDRESS",
              help="Pack on the workers of a Dask cluster, by the address of its scheduler: tcp://scheduler:8786; or "
              "'local', on as many processes of this machine as --workers says. All of them must see FILES and DIR "
              "under the same path; --memory is that of each.")  # fmt: skip
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
    read: ReadOptions,
    memory: int | None,
    workers: int | None,
    cluster: str | None,
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
    if append is not None and (memory is not None or workers is not None or cluster is not None or resume or discard):
        raise click.UsageError(
            "--append reads its files into memory; leave out --memory, --workers, --cluster, --resume, --discard"
        )
    if cluster is not None and resume:
        raise click.UsageError(
            "on a cluster, what was lost is done again while the pack is made, and nothing is kept for --resume; leave "
            "out one of them"
        )
    if workers is not None and cluster not in (None, "local"):
        raise click.UsageError("--workers is for this machine; the cluster has its workers already. Leave it out")
    if resume and discard:
        raise click.UsageError("--resume goes on with what --discard removes; leave one out")
    source = files[0] if len(files) == 1 else list(files)
    if discard:
        removed = readable(discard_unfinished(source, out))
        click.echo(msgspec.json.encode({"removed": removed}) if as_json else f"removed {plain(removed)}")
        return
    usage = Usage()
    with Reporter() as progress:
        if append is not None:
            packed = append_to(append, source, read=read, progress=progress)
        else:
            if cluster is None:
                packing = partial(write_pack, resume=resume)
            else:
                from stager.cluster.packing import pack_on

                packing = partial(pack_on, cluster)
            packed = packing(
                source,
                out,
                read=read,
                overwrite=force,
                progress=progress,
                memory_nbytes=memory,
                workers=workers,
                usage=usage,
            )
    show(summarise(packed), as_json, None if append is not None else usage)
