"""Order and ranks at the size that docs/scale.md plans for: 4,096 ranks, 100 TB of rows, 5 million million samples.

Nobody can serve that many here. So it is shown that the order is a bijection, by its inverse, that the batches of all
ranks cover its positions without a gap, and both together by whole epochs of fewer samples on as many ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import order_reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.batches.epochs import EpochOptions, Epochs
from stager.batches.position import begin_of, go_on, state_of
from stager.batches.ranks import Ranks
from stager.samples.schedule import Schedule

RANKS, BATCH = 4096, 256
# 20 bytes a row; every row that ends a window of 64 and has a label, of symbols of 50 million bars.
N_SAMPLES = 100 * 10**12 // 20 // 50_000_000 * (50_000_000 - 63 - 6)
SHUFFLES: list[Any] = ["full", "block", False]


def epochs(n_samples: int, rank: int = 0, world_size: int = RANKS, **options: Any) -> Epochs:
    """Those of samples that are only counted."""
    options = {"batch_size": BATCH * RANKS // world_size, "last": "pad", "seed": 7} | options
    index = cast(Any, SimpleNamespace(n_samples=n_samples, digest="d"))
    return Epochs(EpochOptions(ranks=Ranks(rank, world_size), **options), cast(Any, None), index, cast(Any, None))


def together(n_samples: int, batch: int, epoch: int, world_size: int = RANKS, **options: Any) -> tuple[Any, Any]:
    """The samples of one batch of all ranks, and which of them count."""
    schedules: list[Schedule] = [
        epochs(n_samples, rank, world_size, **options).schedule(epoch) for rank in range(world_size)
    ]
    ids = [schedule.sample_ids(batch, batch + 1) for schedule in schedules]
    assert {len(some) for some in ids} == {options.get("batch_size", BATCH * RANKS // world_size)}
    return np.concatenate(ids), np.concatenate([schedule.valid(batch) for schedule in schedules])


def position_of(shuffle: Any, sample: int, epoch: int) -> int:
    """The inverse of the order, in Python's integers."""
    if shuffle == "full":
        return order_reference.full(N_SAMPLES, 7, epoch, sample, backwards=True)
    return order_reference.Blocks(N_SAMPLES, 4096, 7, epoch).position(sample) if shuffle == "block" else sample


@pytest.mark.parametrize(("shuffle", "batch"), [("full", 2_345_678), ("full", -1), ("block", -1), (False, -1)])
def test_a_batch_of_all_ranks_is_the_next_positions_of_one_order(shuffle: Any, batch: int) -> None:
    n_batches = len(epochs(N_SAMPLES, shuffle=shuffle))
    assert n_batches == -(-N_SAMPLES // (RANKS * BATCH))
    batch %= n_batches
    first = batch * RANKS * BATCH
    ids, valid = together(N_SAMPLES, batch, 3, shuffle=shuffle)
    positions = np.arange(first, first + RANKS * BATCH)
    np.testing.assert_array_equal(valid, positions < N_SAMPLES)
    assert len(np.unique(ids)) == len(ids)
    assert ids.min() >= 0
    assert ids.max() < N_SAMPLES
    alone = epochs(N_SAMPLES, 0, 1, shuffle=shuffle).schedule(3)
    np.testing.assert_array_equal(alone.sample_ids(batch, batch + 1), ids)
    for at in np.random.default_rng(batch).integers(0, len(ids), 50).tolist():
        assert position_of(shuffle, int(ids[at]), 3) == (first + at) % N_SAMPLES


@pytest.mark.parametrize("shuffle", SHUFFLES)
@settings(deadline=None)
@given(sample=st.integers(0, N_SAMPLES - 1), epoch=st.integers(0, 1000))
def test_every_sample_is_served_once_by_the_rank_that_its_position_tells(shuffle: Any, sample: int, epoch: int):
    position = position_of(shuffle, sample, epoch)
    batch, rest = divmod(position, RANKS * BATCH)
    rank, at = divmod(rest, BATCH)
    mine = epochs(N_SAMPLES, rank, shuffle=shuffle)
    assert batch < len(mine)
    assert mine.schedule(epoch).sample_ids(batch, batch + 1)[at] == sample
    assert mine.schedule(epoch).sample_id(batch, at) == sample
    assert mine.schedule(epoch).valid(batch)[at]


@pytest.mark.parametrize(
    ("shuffle", "n_samples", "batch_size"),
    [("full", RANKS * 3 + 1234, 3), ("block", RANKS * 3 + 1234, 3), ("full", 999, 1)],
)
def test_whole_epochs_on_as_many_ranks(shuffle: Any, n_samples: int, batch_size: int) -> None:
    served = []
    n_batches = len(epochs(n_samples, shuffle=shuffle, batch_size=batch_size))
    for batch in range(n_batches):
        ids, valid = together(n_samples, batch, 5, shuffle=shuffle, batch_size=batch_size)
        served.append(ids[valid])
    np.testing.assert_array_equal(np.sort(np.concatenate(served)), np.arange(n_samples))


@settings(deadline=None)
@given(
    place=st.floats(0, 1), before=st.sampled_from([4096, 2048, 1024, 1]), after=st.sampled_from([4096, 512, 3 * 4096]),
    at=st.integers(0, RANKS * BATCH * 3 - 1),
)  # fmt: skip
def test_a_training_goes_on_with_other_ranks(place: float, before: int, after: int, at: int) -> None:
    """The batch of all ranks is one that all numbers of ranks share."""
    shared = RANKS * BATCH * 3
    first = epochs(N_SAMPLES, before - 1, before, batch_size=shared // before)
    n_batches = len(first)
    batch = min(n_batches - 1, round(place * n_batches))
    state = state_of(begin_of(first, "data"), len(first), 11, batch)
    rank, inside = divmod(at, shared // after)
    second = epochs(N_SAMPLES, rank, after, batch_size=shared // after)
    assert go_on(begin_of(second, "data"), len(second), state) == (11, batch)
    old_rank, old_inside = divmod(at, shared // before)
    old = epochs(N_SAMPLES, old_rank, before, batch_size=shared // before)
    assert second.schedule(11).sample_id(batch, inside) == old.schedule(11).sample_id(batch, old_inside)


def test_nothing_is_kept_for_each_sample() -> None:
    import tracemalloc

    tracemalloc.start()
    schedule = epochs(N_SAMPLES, 4095).schedule(1)
    schedule.sample_ids(4_000_000, 4_000_001)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
