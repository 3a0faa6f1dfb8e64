"""``stager top``."""

from __future__ import annotations

import contextlib
import time

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stager.cli.output import plain
from stager.cli.serve import socket_option
from stager.config import format_nbytes
from stager.service.asking import stats
from stager.service.protocol import StatsInfo

_STYLES = {"late": "yellow", "cut off": "red", "draining": "yellow"}


@click.command(short_help="Show what a service holds, and who uses it.")
@socket_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, once.")
@click.option("--every", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between looks.")
def top(socket: str | None, as_json: bool, every: float) -> None:
    """Show the packs of a service, its clients, bytes and batches per second: live on a terminal until Ctrl-C, once in
    a pipe."""
    told = stats(socket)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(told), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        for heading, rows in _tables(told):
            _print_plain(heading, rows)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(_drawn(told), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(_drawn(stats(socket)), refresh=True)


def _tables(told: StatsInfo) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Headings and rows: the service, its packs, its clients."""
    age = time.time() - told.started_at
    refused = sum(told.n_refused.values())
    rate = sum(client.batches_per_second for client in told.clients)
    return [
        (
            ("service", "state", "up", "bytes", "clients", "batches", "batches/s", "refused", "errors"),
            [(
                f"process {told.pid}", "draining" if told.draining else "serving", _age(age),
                format_nbytes(told.resident_nbytes + told.table_nbytes), f"{len(told.clients):,}",
                f"{told.n_batches:,}", f"{rate:,.0f}", f"{refused:,}", f"{told.n_errors:,}",
            )],
        ),
        (
            ("pack", "version", "rows", "bytes", "where", "clients", "offered"),
            [
                (plain(one.name), str(one.version), f"{one.n_rows:,}", format_nbytes(one.nbytes), one.device,
                 f"{one.n_clients:,}", "yes" if one.offered else "no")
                for one in told.packs
            ],
        ),
        (
            ("client", "pack", "version", "state", "batches", "batches/s", "for", "command"),
            [
                (str(one.pid), plain(one.name), str(one.version), one.state, f"{one.n_batches:,}",
                 f"{one.batches_per_second:,.0f}", _age(time.time() - one.attached_at), plain(one.command))
                for one in told.clients
            ],
        ),
    ]  # fmt: skip


def _drawn(told: StatsInfo) -> Group:
    tables: list[Table | Text] = []
    for heading, rows in _tables(told):
        table = Table(box=None, pad_edge=False, header_style="cyan")
        for name in heading:
            table.add_column(name, no_wrap=name != "command", overflow="ellipsis")
        for row in rows:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        tables += [table, Text()]
    return Group(*tables)


def _print_plain(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    for row in (heading, *rows):
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
