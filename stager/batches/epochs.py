"""How epochs are ordered and cut into batches: what is asked for, and what that means for the samples of an index."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stager.batches.batch import About
from stager.batches.ranks import Ranks, check_ranks
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.order import DEFAULT_BLOCK, Order
from stager.samples.sampling import Draws, WeightedOrder, carried, check_weights
from stager.samples.schedule import Schedule, instants_of

Shuffle = Literal["full", "block", "time"] | bool
Last = Literal["keep", "drop", "pad"]
Sampling = Literal["once", "weighted"]

_MOST_POSITIONS = 1 << 62


@dataclass(frozen=True, kw_only=True)
class EpochOptions:
    """What is asked for; see :class:`stager.Stager`.

    Attributes
    ----------
    by_instant : bool
        Batches hold whole decision instants, and samples are numbered by time.
    """

    batch_size: int
    seed: int = 0
    shuffle: Shuffle = "full"
    block: int | None = None
    last: Last = "keep"
    ranks: Ranks = Ranks()  # noqa: RUF009 - frozen
    sampling: Sampling = "once"
    weights: Any = None
    by_instant: bool = False

    def __post_init__(self) -> None:
        size = self.batch_size
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 0 < size < _MOST_POSITIONS:
            raise SampleError(f"batch_size is {size!r}; it must be an integer of at least 1 sample")
        check_ranks(self.ranks)
        if self.global_batch >= _MOST_POSITIONS:
            raise SampleError(
                f"batch_size {size} on {self.ranks.world_size} ranks; a batch of all ranks has less than 2**62 samples"
            )
        if self.last not in ("keep", "drop", "pad"):
            raise SampleError(f"last is {self.last!r}; there are 'keep', 'drop' and 'pad'")
        if self.last == "keep" and self.ranks.world_size > 1:
            raise SampleError(
                f"last is 'keep' on {self.ranks.world_size} ranks, which would not have equally many batches; use "
                f"last='drop', or last='pad', which marks what fills the last batch up in batch.valid"
            )
        if self.shuffle is not False and self.shuffle not in ("full", "block", "time"):
            raise SampleError(f"shuffle is {self.shuffle!r}; there are 'full', 'block', 'time' and False")
        if self.block is not None and self.shuffle != "block":
            raise SampleError(f"block is {self.block!r} and shuffle {self.shuffle!r}; blocks are for shuffle='block'")
        self._check_sampling()
        # Refuses a seed and a block that are none.
        _order(self, 1, 0)
        object.__setattr__(self, "batch_size", int(self.batch_size))
        object.__setattr__(self, "seed", int(self.seed))
        object.__setattr__(self, "by_instant", self.by_instant or self.shuffle == "time")

    def _check_sampling(self) -> None:
        if self.sampling not in ("once", "weighted"):
            raise SampleError(f"sampling is {self.sampling!r}; there are 'once' and 'weighted'")
        if self.sampling == "once":
            if self.weights is not None:
                raise SampleError("weights are given; they decide how often a sample comes with sampling='weighted'")
            return
        if self.shuffle != "full":
            raise SampleError(
                f"sampling is 'weighted' and shuffle {self.shuffle!r}; every position is drawn by itself then, so "
                f"leave shuffle at 'full'"
            )
        if self.weights is None or (isinstance(self.weights, str) and self.weights != "uniqueness"):
            raise SampleError(
                f"sampling is 'weighted' and weights {self.weights!r}; give an array of one weight for each sample, by "
                f"sample id, or 'uniqueness'"
            )

    @property
    def global_batch(self) -> int:
        """Positions of the batches of all ranks together."""
        return int(self.batch_size) * self.ranks.world_size

    @property
    def block_size(self) -> int | None:
        """Samples of a block; None where there are no blocks."""
        return int(self.block or DEFAULT_BLOCK) if self.shuffle == "block" else None

    def in_order(self) -> EpochOptions:
        """For every sample once, in its own order, on whatever rank: as a test is served."""
        return replace(self, shuffle=False, block=None, last="keep", ranks=Ranks(), sampling="once", weights=None)


class Epochs:
    """The epochs of the samples of an index.

    Attributes
    ----------
    options : EpochOptions
    instants : (n_instants + 1,) int64, or None
        The first sample of each decision instant, and the number of samples, where batches hold whole instants.
    draws : Draws or None
        How often each sample is drawn, where they are.
    """

    def __init__(self, options: EpochOptions, pack: Pack, index: SampleIndex, about: About, fold: str = "") -> None:
        self.options, self._index = options, index
        self.instants = instants_of(pack, index) if options.by_instant else None
        self._weights: npt.NDArray[np.float64] | None = None
        self.draws: Draws | None = None
        if options.sampling == "weighted":
            unique = isinstance(options.weights, str)
            weights = about.weights(np.arange(index.n_samples)) if unique else options.weights
            self._weights = check_weights(weights, index.n_samples, f" of fold {fold}" if fold else "")
            self.draws = Draws(self._weights)
        if options.last == "drop" and self.n_positions < options.global_batch:
            what = "samples" if self.instants is None else "decision instants"
            raise SampleError(
                f"{self.n_positions:,} {what} fill no batch of {options.global_batch:,}, and last='drop' serves no "
                f"shorter one; use a smaller batch_size, last='pad'{'' if self.several else ' or last=' + repr('keep')}"
            )

    @property
    def n_samples(self) -> int:
        return self._index.n_samples

    @property
    def several(self) -> bool:
        """Whether several ranks train together."""
        return self.options.ranks.world_size > 1

    @property
    def n_positions(self) -> int:
        """What is shuffled or drawn: samples, or decision instants."""
        return self.n_samples if self.instants is None else len(self.instants) - 1

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        full, rest = divmod(self.n_positions, self.options.global_batch)
        return full + (1 if rest and self.options.last != "drop" else 0)

    def schedule(self, epoch: int) -> Schedule:
        """The batches of this rank.

        Raises
        ------
        SampleError
            If `epoch` is out of range.
        """
        options, order = self.options, self.order(epoch)
        return Schedule(
            order, options.batch_size, self.instants, options.global_batch, options.ranks.rank * options.batch_size,
            options.last == "pad",
        )  # fmt: skip

    def order(self, epoch: int) -> Order | WeightedOrder:
        """The order of an epoch: of all ranks."""
        if self.draws is not None:
            return WeightedOrder(self.draws, self.options.seed, epoch)
        return _order(self.options, self.n_positions, epoch)

    def options_of(self, part: SampleIndex) -> EpochOptions:
        """The same for some of the samples: weights given for each follow their samples."""
        if self._weights is None or isinstance(self.options.weights, str):
            return self.options
        return replace(self.options, weights=carried(self._weights, self._index, part))

    @cached_property
    def digest(self) -> str:
        """Hash of what decides which sample is which, what it holds, and how often it is drawn."""
        return self._index.digest if self.draws is None else f"{self._index.digest} {self.draws.digest}"


def _order(options: EpochOptions, n: int, epoch: int) -> Order:
    shuffle = "full" if options.shuffle == "time" else options.shuffle
    return Order(n, options.seed, epoch, shuffle, DEFAULT_BLOCK if options.block is None else options.block)
