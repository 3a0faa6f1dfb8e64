"""``stager plan``."""

from __future__ import annotations

import click
import msgspec

from stager.batches.drawing import draw_folds
from stager.batches.planning import plan_of
from stager.cli.output import plain, print_table


@click.command(short_help="Tell what would be served, and why the rest would not.")
@click.argument("pack", type=click.Path())
@click.option(
    "--config", required=True, type=click.Path(), help="A TOML file, see configs/default.toml; [split] makes folds."
)
@click.option("--plot", type=click.Path(), help="Draw the folds over time into this file: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def plan(pack: str, config: str, plot: str | None, as_json: bool) -> None:
    """Tell what a configuration would serve from PACK, which rows end no sample and why, and what each fold holds.

    Nothing is staged, and no GPU is needed.
    """
    planned = plan_of(pack, config)
    if plot is not None:
        draw_folds(planned.folds, plot)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(planned.as_dict()), indent=2))
        return
    print_table(planned.lines(), title=f"plan of {pack}")
    if plot is not None:
        click.echo(f"drawn: {plain(plot)}")
