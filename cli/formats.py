"""``stager formats``: what is known about vendors' files, and a draft for an unknown one."""

from __future__ import annotations

import json

import click

from stager.bars.drafts import draft
from stager.bars.formats import built_in, text_of, vocabulary
from stager.bars.options import ReadOptions
from stager.cli.output import print_table


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.pass_context
def formats(ctx: click.Context, as_json: bool) -> None:
    """List the formats of bar files that are known."""
    if ctx.invoked_subcommand is not None:
        return
    if as_json:
        click.echo(json.dumps([{"name": each.name, "title": each.title} for each in built_in().values()], indent=2))
        return
    print_table((each.name, each.title + (" (to be told)" if each.confirm else "")) for each in built_in().values())


@formats.command()
@click.argument("name", required=False)
def show(name: str | None) -> None:
    """Explain the format NAME (or a TOML file); without NAME, everything that a format may say."""
    if name is not None:
        click.echo(text_of(name).rstrip())
        return
    for entry, default in vocabulary():
        click.echo(f"{entry} [{'required' if default is None and entry in ('title', 'symbol.from_file') else default}]")


@formats.command()
@click.argument("file")
@click.option("--encoding", help="Encoding of text that is no UTF-8.")
@click.option("--delimiter", help="Character between the fields [from the header].")
def new(file: str, encoding: str | None, delimiter: str | None) -> None:
    """Draft a format for an unknown FILE; what the file can't tell is marked to be filled in."""
    click.echo(draft(file, ReadOptions(encoding=encoding, delimiter=delimiter)))
