"""``stager verify``."""

from __future__ import annotations

import json

import click

from stager.cli.output import Reporter, fail, plain
from stager.cli.serve import socket_option
from stager.packs.verify import verify as check
from stager.service.checking import verify_resident


@click.command(short_help="Check every checksum and invariant of a pack.")
@click.argument("pack", type=click.Path())
@click.option("--resident", is_flag=True, help="PACK is a name: compare what a service holds with its files.")
@socket_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def verify(pack: str, resident: bool, socket: str | None, as_json: bool) -> None:
    """Check every checksum and invariant of PACK; exit 1 if something is damaged."""
    if socket is not None and not resident:
        raise click.UsageError("--socket belongs to --resident")
    with Reporter() as progress:
        if resident:
            findings = verify_resident(pack, socket, progress=progress)
        else:
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
