"""``stager serve``, and what is asked of a service that runs: ``stager stage``, ``stager release``."""

from __future__ import annotations

import logging

import click
import msgspec

from stager.cli.output import Reporter, plain
from stager.config import format_nbytes
from stager.service.asking import release as ask_release
from stager.service.asking import stage as ask_stage
from stager.service.holdings import Shareable
from stager.service.listening import read_listen
from stager.service.protocol import ClientInfo
from stager.service.running import leave, name_packs
from stager.service.running import serve as run
from stager.service.service import MAX_CLIENTS, Service

socket_option = click.option(
    "--socket", type=click.Path(), help="The service's socket [STAGER_SERVICE_SOCKET, else the user's own place]."
)


@click.command(short_help="Hold packs for many trainers to attach to.")
@click.argument("packs", nargs=-1, required=True, metavar="PACK...")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--placement", type=click.Choice(["device", "spread"]), default="device", show_default=True,
    help="On one GPU, or in blocks on it and on all whose memory it reads.",
)  # fmt: skip
@socket_option
@click.option("--metrics", metavar="[HOST:]PORT", help="Metrics for Prometheus and /healthz; a port alone is local.")
@click.option(
    "--listen",
    metavar="URL",
    help="Stream batches to other machines: grpc+tls://HOST:PORT; or grpc+tcp://127.0.0.1:PORT.",
)
@click.option("--token-file", type=click.Path(), help="With --listen: holds the token that clients show; mode 0600.")
@click.option("--tls-cert", type=click.Path(), help="With grpc+tls: the server's certificate, PEM.")
@click.option("--tls-key", type=click.Path(), help="With grpc+tls: its key, PEM.")
@click.option(
    "--max-clients", type=click.IntRange(min=1), default=MAX_CLIENTS, show_default=True, help="Clients at a time."
)
def serve(
    packs: tuple[str, ...],
    device: str,
    placement: Shareable,
    socket: str | None,
    metrics: str | None,
    listen: str | None,
    token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    max_clients: int,
) -> None:
    """Stage each PACK once and hold it for other processes of this user: `stager.attach("prices")` in Python uses
    prices.pack without a copy. NAME=PATH gives a pack another name.

    Runs until SIGTERM or Ctrl-C; clients then go on with what they have.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    where = None if listen is None else read_listen(listen, token_file, tls_cert, tls_key)
    with Reporter() as progress:
        clean = run(
            name_packs(packs), device=device, placement=placement, socket=socket, metrics=metrics, listen=where,
            max_clients=max_clients, progress=progress, ready=_say,
        )  # fmt: skip
    leave(clean)


def _say(service: Service) -> None:
    for pack in service.stats().packs:
        where = "mapped" if pack.device == "cpu" else f"on {pack.device}"
        click.echo(f"{plain(pack.name)}: {pack.n_rows:,} rows, {format_nbytes(pack.nbytes)}, {where}")
    click.echo(f"serving on {plain(str(service.place.path))}")


@click.command(short_help="Have a running service hold another pack.")
@click.argument("pack")
@socket_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def stage(pack: str, socket: str | None, as_json: bool) -> None:
    """Stage PACK (or NAME=PATH) in the service that runs. Under a name that it has, it is a new version: clients that
    run keep the old one, and its memory returns with the last of them."""
    with Reporter() as progress:
        told = ask_stage(pack, socket, progress)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(told), indent=2))
    else:
        click.echo(f"{plain(told.name)}, version {told.version}: {told.n_rows:,} rows, {format_nbytes(told.nbytes)}")


@click.command(short_help="Have a running service offer a pack no longer.")
@click.argument("name")
@socket_option
@click.option("--force", is_flag=True, help="Free it under clients that use it; tells first whom that would break.")
@click.option("--yes", is_flag=True, help="With --force: do it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def release(name: str, socket: str | None, force: bool, yes: bool, as_json: bool) -> None:
    """Offer the pack NAME no longer. Its memory returns when its last client lets go or ends."""
    told = ask_release(name, socket, force=force, sure=yes)
    if not told.done and not as_json:
        _tell_clients("what these read would be undefined from then on:", told.clients)
        if not click.confirm("free the memory under them?" if told.clients else "nothing breaks; free it?"):
            raise SystemExit(1)
        told = ask_release(name, socket, force=True, sure=True)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(told), indent=2))
    elif force:
        _tell_clients("freed under these, end them:", told.clients)
        click.echo(f"freed {format_nbytes(told.freed_nbytes)}")
    elif told.clients:
        _tell_clients("offered no longer; the memory returns when these let go:", told.clients)
    else:
        click.echo(f"freed {format_nbytes(told.freed_nbytes)}")
    if not told.done:
        raise SystemExit(1)


def _tell_clients(title: str, clients: list[ClientInfo]) -> None:
    if clients:
        click.echo(title)
    for one in clients:
        click.echo(f"  process {one.pid} ({one.state}, version {one.version}): {plain(one.command)}")
