"""What the command line asks of a service that runs."""

from __future__ import annotations

import time
from pathlib import Path

from stager.service import protocol
from stager.service.client import Connection
from stager.service.holdings import Progress
from stager.service.protocol import Answer, PackInfo, Released, StatsInfo
from stager.service.running import name_packs

_PENDING_SECONDS = 0.05


def stats(socket: str | Path | None = None) -> StatsInfo:
    """Everything about the service.

    Raises
    ------
    NoServiceError, ServiceError
    """
    with Connection(socket) as connection:
        return connection.ask(protocol.Stats(), StatsInfo)


def stage(pack: str, socket: str | Path | None = None, progress: Progress | None = None) -> PackInfo:
    """Have the service hold a pack, ``PATH`` or ``NAME=PATH``; waits until it does.

    Raises
    ------
    NoServiceError, ServiceError, PackError, StagingError
    """
    ((name, path),) = name_packs([pack]).items()
    with Connection(socket) as connection:
        while True:
            answer = connection.ask(protocol.Stage(name, str(path.absolute())), Answer)
            if answer.pack is not None:
                return answer.pack
            if progress and answer.pending is not None:
                progress(answer.pending.phase, answer.pending.done_nbytes, answer.pending.total_nbytes)
            time.sleep(_PENDING_SECONDS)


def release(name: str, socket: str | Path | None = None, *, force: bool = False, sure: bool = False) -> Released:
    """Have the service offer a pack no longer.

    Parameters
    ----------
    name : str
    socket : str or Path, optional
    force : bool
        Free it under its clients; without `sure` it is only told whom that would break.
    sure : bool

    Raises
    ------
    NoServiceError, ServiceError
    """
    with Connection(socket) as connection:
        return connection.ask(protocol.Release(name, force, sure), Released)
