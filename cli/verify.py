"""``stager verify``."""

from __future__ import annotations

import json

import click

from stager.cli.output import Reporter, fail, plain
from stager.packs.verify import verify as check


@click.command(short_help="Check every checksum and invariant of a pack.")
@click.argument("pack", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def verify(pack: str, as_json: bool) -> None:
    """Check every checksum and invariant of PACK; exit 1 if something is damaged."""
    with Reporter() as progress:
        findings = check(pack, progress=progress)
    if as_json:
        click.echo(json.dumps({"pack": pack, "ok": not findings, "findings": findings}, indent=2))
    elif findings:
        for finding in findings:
            fail(finding)
    else:
        click.echo(f"{plain(pack)}: whole")
    if findings:
        raise SystemExit(1)
