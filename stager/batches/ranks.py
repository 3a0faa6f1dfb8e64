"""Which part of each batch a process of several trains on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stager.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together, each on its own part of every batch.

    Batch b of all ranks together is ``world_size * batch_size`` consecutive positions of the epoch's order, of which
    rank r serves the r-th `batch_size`. So all ranks have equally many batches, and what they serve together at a time
    is the same for any number of ranks with the same global batch, ``world_size * batch_size``.

    Parameters
    ----------
    rank : int
        0 to world_size - 1.
    world_size : int
        Number of processes.
    local_rank : int, optional
        The process among those of its machine, 0 and up.

    Raises
    ------
    ConfigError
        If they are not such numbers.

    Examples
    --------
    >>> Ranks(rank=1, world_size=4)
    Ranks(rank=1, world_size=4, local_rank=None)
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("world_size", self.world_size), ("local_rank", self.local_rank)):
            if name == "local_rank" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ConfigError(f"{name} is {value!r}; it must be an integer")
            object.__setattr__(self, name, int(value))
        if self.world_size < 1:
            raise ConfigError(f"world_size is {self.world_size}; there is at least 1 rank")
        for name, value in (("rank", self.rank), ("local_rank", self.local_rank)):
            if value is not None and not 0 <= value < self.world_size:
                raise ConfigError(
                    f"{name} is {value} and world_size {self.world_size}; it must be from 0 to world_size - 1, here "
                    f"{self.world_size - 1}"
                )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Ranks:
        """The ranks that the launcher tells in the environment.

        Read are, in this order, the variables of the first launcher that has set any of its own: torchrun (RANK,
        WORLD_SIZE, LOCAL_RANK), Open MPI (OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK), other MPIs (PMI_RANK, PMI_SIZE,
        MPI_LOCALRANKID or PMI_LOCAL_RANK), Slurm (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID). A launcher that was
        started by another one, as torchrun by srun, comes before it.

        Never read by itself: under a scheduler that sets them for processes that train each on its own, every one would
        lose most of its data.

        Parameters
        ----------
        environ : mapping, optional
            Default ``os.environ``.

        Raises
        ------
        ConfigError
            If none of them is set, a launcher has set only one of rank and size, one is no integer, or they contradict
            each other.
        """
        environ = os.environ if environ is None else environ
        launcher = next((one for one in _LAUNCHERS if one.told(environ)), None)
        if launcher is None:
            raise ConfigError(
                "RANK is not set; start the processes with torchrun, mpirun or srun, set RANK and WORLD_SIZE, or leave "
                "ranks out to train in one process"
            )
        found = launcher.read(environ)
        told = ", ".join(f"{name}={value}" for name, value in found.items())
        rank, size, *local = found.values()
        try:
            ranks = cls(rank, size, local[0] if local else None)
        except ConfigError as error:
            raise ConfigError(f"{error}; the environment says {told}") from None
        if launcher is _TORCH and _ELASTIC not in environ:
            _refuse_contradiction(ranks, environ)
        return ranks


@dataclass(frozen=True)
class _Launcher:
    """The variables of one: rank, number of ranks, and those that may tell the rank on the machine."""

    rank: str
    size: str
    local: tuple[str, ...]
    start: str

    def told(self, environ: Mapping[str, str]) -> bool:
        return any(name in environ for name in (self.rank, self.size, *self.local))

    def read(self, environ: Mapping[str, str]) -> dict[str, int]:
        """Rank, number of ranks and, where it is told, the rank on the machine, by variable."""
        for name in (self.rank, self.size):
            if name not in environ:
                others = [other for other in (self.rank, self.size, *self.local) if other in environ]
                raise ConfigError(
                    f"{name} is not set, and {', '.join(others)} {'is' if len(others) == 1 else 'are'}; {self.start}, "
                    f"or leave ranks out to train in one process"
                )
        names = [self.rank, self.size, *[name for name in self.local if name in environ][:1]]
        return {name: _integer(name, environ[name]) for name in names}


_TORCH = _Launcher("RANK", "WORLD_SIZE", ("LOCAL_RANK",), "start the processes with torchrun, set RANK and WORLD_SIZE")
_SLURM = _Launcher(
    "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), "start the processes with srun, set RANK and WORLD_SIZE"
)
_OPEN_MPI = _Launcher(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    "start the processes with mpirun, set RANK and WORLD_SIZE",
)
_PMI = _Launcher(
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    "start the processes with mpiexec, set RANK and WORLD_SIZE",
)
_LAUNCHERS = (_TORCH, _OPEN_MPI, _PMI, _SLURM)
# torchrun numbers its processes by itself, on each node as it comes.
_ELASTIC = "TORCHELASTIC_RUN_ID"


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r} in the environment; it must be an integer") from None


def _refuse_contradiction(ranks: Ranks, environ: Mapping[str, str]) -> None:
    """Refuse RANK and WORLD_SIZE, set by hand, where another launcher says otherwise.

    It may have started a launcher on every node, so there may be more ranks than it knows of; but if there are fewer,
    several of its processes would train on the same part.
    """
    for other in (_OPEN_MPI, _PMI, _SLURM):
        if other.rank not in environ or other.size not in environ:
            continue
        rank, size, *_ = other.read(environ).values()
        if size > ranks.world_size or (size == ranks.world_size and rank != ranks.rank):
            raise ConfigError(
                f"RANK={ranks.rank} and WORLD_SIZE={ranks.world_size}, but {other.rank}={rank} and "
                f"{other.size}={size}; unset those that are not of this training, or give Ranks(rank, world_size)"
            )


def check_ranks(ranks: Any) -> None:
    """Refuse what is no rank.

    Raises
    ------
    ConfigError
    """
    if not isinstance(ranks, Ranks):
        raise ConfigError(f"ranks is {ranks!r:.80}; give Ranks(rank, world_size) or Ranks.from_env()")
