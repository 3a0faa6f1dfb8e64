"""``stager smoke``."""

from __future__ import annotations

import json

import click

from stager.batches.smoke import run_smoke
from stager.cli.output import Reporter, print_table


@click.command(short_help="Check the whole way on this machine.")
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:N, or cpu.")
@click.option(
    "--rows", type=click.IntRange(min=1), default=2_000_000, show_default=True, help="Rows to pack and stage."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def smoke(device: str, rows: int, as_json: bool) -> None:
    """Pack, stage, compare every value on the device with the host, and serve an epoch.

    Needs no input; exit 1 with one line if there is no GPU or something is not right.
    """
    with Reporter() as progress:
        result = run_smoke(device, rows, progress=progress)
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
    else:
        print_table(result.lines(), title=f"smoke on {result.device}: all right")
