"""Which samples are in which batch of which rank, against lists that are cut in Python."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.samples.order import Order
from stager.samples.sampling import Draws, WeightedOrder
from stager.samples.schedule import Schedule


def an_order(how: str, n: int, seed: int) -> Order | WeightedOrder:
    if how == "weighted":
        return WeightedOrder(Draws(np.arange(n) + 0.5), seed, 1)
    return Order(n, seed, 1, False if how == "none" else how, 5)


@settings(deadline=None, max_examples=300)
@given(
    how=st.sampled_from(["full", "block", "none", "weighted"]),
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    last=st.sampled_from(["keep", "drop", "pad"]),
    by_instant=st.booleans(),
    data=st.data(),
)
def test_batches_are_parts_of_the_order(how, n, batch_size, world_size, last, by_instant, data):
    if last == "keep":
        world_size = 1
    order, together = an_order(how, n, data.draw(st.integers(0, 9))), batch_size * world_size
    instants = None
    if by_instant:
        instants = np.append(0, np.cumsum(data.draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))))
    # The order as a list of (sample or instant, whether it fills up).
    served = [(int(k), True) for k in order.sample_ids(0, n)]
    n_batches = n // together if last == "drop" else -(-n // together)
    if last == "pad":
        served = [(served[p % n][0], p < n) for p in range(n_batches * together)]
    for rank in range(world_size):
        schedule = Schedule(order, batch_size, instants, together, rank * batch_size, last == "pad")
        batches = []
        for b in range(n_batches):
            begin = b * together + rank * batch_size
            chosen = served[begin : begin + batch_size]
            if instants is not None:
                chosen = [(s, valid) for k, valid in chosen for s in range(instants[k], instants[k + 1])]
            batches.append(chosen)
            assert schedule.sample_ids(b, b + 1).tolist() == [s for s, _ in chosen]
            assert schedule.valid(b).tolist() == [valid for _, valid in chosen]
            assert [schedule.sample_id(b, place) for place in range(len(chosen))] == [s for s, _ in chosen]
        first = data.draw(st.integers(0, n_batches))
        stop = data.draw(st.integers(first, n_batches))
        ids, offsets = schedule.sample_ids(first, stop), schedule.offsets(first, stop)
        assert ids.tolist() == [s for batch in batches[first:stop] for s, _ in batch]
        assert offsets.tolist() == np.cumsum([0, *map(len, batches[first:stop])]).tolist()
        if instants is not None:
            places, samples = schedule.blocks(first, stop)
            found = [s + i for s, size in zip(samples, np.diff(places, append=len(ids)), strict=True)
                     for i in range(size)]  # fmt: skip
            assert found == ids.tolist()


@pytest.mark.parametrize("how", ["full", "block", "none"])
@pytest.mark.parametrize("n", [10**9, 2**40])
def test_no_sample_costs_anything(how, n):
    tracemalloc.start()
    seen = []
    for epoch in range(3):
        schedule = Schedule(Order(n, 7, epoch, False if how == "none" else how), 256, None, 1024, 512, True)
        for batch in (0, 1, n // 2048, -(-n // 1024) - 1):
            ids = schedule.sample_ids(batch, batch + 1)
            assert len(ids) == 256
            assert 0 <= ids.min() <= ids.max() < n
            seen.append(ids)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    if how != "none":
        assert len(np.unique(seen)) > 0.99 * 256 * len(seen)
