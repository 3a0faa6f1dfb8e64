"""``stager compact``."""

from __future__ import annotations

import click

from stager.cli.info import show
from stager.cli.output import Reporter
from stager.packs.compacting import compact as rewrite
from stager.samples.summary import summarise


@click.command(short_help="Merge the segments of a pack into one.")
@click.argument("pack", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def compact(pack: str, as_json: bool) -> None:
    """Merge the segments that `stager pack --append` added to PACK into one.

    The pack is rewritten beside the old one, which stays whole until then; the bars are the same.
    """
    with Reporter() as progress:
        packed = rewrite(pack, progress=progress)
    show(summarise(packed), as_json)
