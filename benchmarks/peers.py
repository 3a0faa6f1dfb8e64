"""Who serves shuffled windows with their targets: Stager, and what people use instead, all by the same interface.

A peer is opened from the same bars, and then hands out batches. Rows start on the host; moving them to the GPU, and
whatever else a peer prepares, is part of opening it. Windows' first rows and targets are found beforehand for all but
Stager, Qlib and neuralforecast.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from stager import Select, Target
from stager.packs.layout import Pack
from stager.samples.building import build_index

HORIZON = 5
TARGET = Target("close", horizon=HORIZON)


class LeftOutError(Exception):
    """A peer that is not measured, and why."""


@dataclass(frozen=True)
class Windows:
    """What is to be served.

    Attributes
    ----------
    pack : Pack
    window, batch_size : int
    starts : (n_samples,) int64
        The first row of each window.
    y : (n_samples,) float32
    device : {"cuda", "cpu"}
        Where batches are wanted.
    """

    pack: Pack
    window: int
    batch_size: int
    starts: npt.NDArray[np.int64]
    y: npt.NDArray[np.float32]
    device: str

    @classmethod
    def find(cls, pack: Pack, window: int, device: str) -> Windows:
        """All samples of a pack, in batches of one."""
        index = build_index(pack, window, TARGET, Select())
        decisions = index.rows_between(0, index.n_samples)
        assert index.y is not None
        return cls(pack, window, 1, decisions - (window - 1), index.y[decisions], device)

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        return np.asarray(self.pack.rows)

    @property
    def n_batches(self) -> int:
        return len(self.y) // self.batch_size

    @property
    def window_nbytes(self) -> int:
        return 4 * self.window * self.rows.shape[1]

    def first(self, n_batches: int) -> Windows:
        """Only the first samples."""
        n = min(self.n_batches, n_batches) * self.batch_size
        return replace(self, starts=self.starts[:n], y=self.y[:n])


@dataclass
class Loader:
    """A peer that was opened.

    Attributes
    ----------
    run : callable
        Hands out so many batches in a Python loop, epoch after epoch, and returns x and y of the last one.
    close : callable
    ahead : int
        Batches that others may have made before they are asked for.
    whole : int
        Batches of an epoch, where only whole epochs cost what they cost; else 1.
    """

    run: Callable[[int], tuple[Any, Any]]
    close: Callable[[], None] = lambda: None
    ahead: int = 0
    whole: int = 1


@dataclass(frozen=True)
class Peer:
    """A way to serve windows.

    Attributes
    ----------
    name : str
    open : callable
    needs : tuple of str
        Modules that it imports.
    same_windows : bool
        Its batches hold the windows and targets of `Windows`, and can be compared with them.
    over_bus : bool
        It reads rows of the host.
    """

    name: str
    open: Callable[[Windows], Loader]
    needs: tuple[str, ...] = ()
    same_windows: bool = True
    over_bus: bool = False

    def check_installed(self) -> None:
        """Import what is needed, so that nobody's time holds it."""
        for module in self.needs:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise LeftOutError(f"not installed ({error})") from error


def pairs(epoch: Callable[[int], Iterable[tuple[Any, Any]]]) -> Callable[[int], tuple[Any, Any]]:
    """The loop over a peer whose epochs give x and y."""
    stream = chain.from_iterable(map(epoch, count()))

    def run(n: int) -> tuple[Any, Any]:
        x = y = None
        for x, y in islice(stream, n):  # noqa: B007
            pass
        return x, y

    return run


def served(epoch: Callable[[int], Iterable[Any]]) -> Callable[[int], tuple[Any, Any]]:
    """The loop over a Stager's batches."""
    stream = chain.from_iterable(map(epoch, count()))

    def run(n: int) -> tuple[Any, Any]:
        x = y = None
        for batch in islice(stream, n):
            x, y = batch.x, batch.y
        return x, y

    return run


def as_tensors(w: Windows) -> tuple[Any, Any, Any]:
    """Rows, first rows and targets as torch tensors of the host, without a copy."""
    import torch

    with warnings.catch_warnings():
        # torch has no tensors that refuse to be written to; nobody writes to these.
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return tuple(torch.from_numpy(array) for array in (w.rows, w.starts, w.y))
