"""``stager leaktest``."""

from __future__ import annotations

import click
import msgspec

from stager.batches.leaktest import leaktest_of
from stager.cli.output import print_table


@click.command(short_help="Look for inputs and labels that depend on the future.")
@click.argument("pack", type=click.Path())
@click.option("--config", required=True, type=click.Path(), help="A TOML file, see configs/default.toml.")
@click.option(
    "--decisions", type=click.IntRange(min=1), default=8, show_default=True,
    help="At how many decisions; each costs four rebuilds of everything.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random choices.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def leaktest(pack: str, config: str, decisions: int, seed: int, as_json: bool) -> None:
    """Alter, delete and delay the bars after some decisions of PACK, rebuild everything that the configuration makes of
    them, and check that nothing decided before has changed. Exits with 1 if a leak is found.

    PACK is of the bars that the configuration's tables [derive] and [panel] begin with. Nothing is staged, and no GPU
    is needed.
    """
    report = leaktest_of(pack, config, decisions=decisions, seed=seed)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report.as_dict()), indent=2))
    else:
        print_table(report.lines(), title=f"leaktest of {pack}")
    if report.leaks:
        raise SystemExit(1)
