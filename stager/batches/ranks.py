"""Which part of each batch a process of several trains on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

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
        """The ranks that torchrun and others tell by RANK, WORLD_SIZE and, where it is set, LOCAL_RANK.

        Never read by itself: under a scheduler that sets them for processes that train each on its own, every one would
        lose most of its data.

        Parameters
        ----------
        environ : mapping, optional
            Default ``os.environ``.

        Raises
        ------
        ConfigError
            If RANK or WORLD_SIZE is not set, one of them is no integer, or they contradict each other.
        """
        environ = os.environ if environ is None else environ
        found: dict[str, int] = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            text = environ.get(name)
            if text is None and name == "LOCAL_RANK":
                continue
            if text is None:
                raise ConfigError(
                    f"{name} is not set; start the processes with torchrun, set RANK and WORLD_SIZE, or leave ranks "
                    f"out to train in one process"
                )
            try:
                found[name] = int(text)
            except ValueError:
                raise ConfigError(f"{name} is {text!r} in the environment; it must be an integer") from None
        try:
            return cls(found["RANK"], found["WORLD_SIZE"], found.get("LOCAL_RANK"))
        except ConfigError as error:
            told = ", ".join(f"{name}={value}" for name, value in found.items())
            raise ConfigError(f"{error}; the environment says {told}") from None
