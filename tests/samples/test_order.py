"""The order of an epoch: the stated algorithm, its golden vectors, a bijection, and nothing to see in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_reference import full, spread_z

from stager.errors import SampleError
from stager.samples.order import ALGORITHM, MAX_SAMPLES, Order

GOLDEN = Path(__file__).parents[1] / "data" / "order.json"


def ids_at(order: Order, positions: list[int]) -> list[int]:
    return [int(order.sample_ids(position, 1)[0]) for position in positions]


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text())["cases"], ids=lambda c: f"{c['n']}-{c['seed']}")
def test_golden_vectors(case: dict[str, Any]) -> None:
    assert json.loads(GOLDEN.read_text())["algorithm"] == ALGORITHM
    order = Order(case["n"], case["seed"], case["epoch"])
    assert ids_at(order, case["positions"]) == case["ids"]


@settings(deadline=None, max_examples=150)
@given(
    n=st.one_of(st.integers(1, 5000), st.integers(1, MAX_SAMPLES)),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_equals_the_stated_algorithm(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    assert ids_at(Order(n, seed, epoch), positions) == [full(n, seed, epoch, p) for p in positions]


def test_equals_the_stated_algorithm_throughout_small_epochs() -> None:
    for n in (*range(1, 40), 1000):
        assert Order(n, 3, n).sample_ids(0, n).tolist() == [full(n, 3, n, p) for p in range(n)]


def test_every_sample_comes_once() -> None:
    for n in range(1, 301):
        for epoch in range(3):
            ids = Order(n, 5, epoch).sample_ids(0, n)
            assert ids.dtype == np.int64
            assert np.array_equal(np.sort(ids), np.arange(n)), (n, epoch)


@pytest.mark.parametrize("n", [4095, 4096, 4097, 65_536, 100_003, 1 << 20])
def test_every_sample_comes_once_in_large_epochs(n: int) -> None:
    seen = np.zeros(n, np.uint8)
    seen[Order(n, 11, 4).sample_ids(0, n)] += 1
    assert seen.all()


@pytest.mark.parametrize("n", [2**31 + 11, 2**40, 2**52 + 1, MAX_SAMPLES])
def test_no_sample_comes_twice_in_huge_epochs(n: int) -> None:
    order = Order(n, 1, 2)
    ids = np.concatenate([order.sample_ids(first, 20_000) for first in (0, n // 2 - 777, n - 20_000)])
    assert len(np.unique(ids)) == len(ids)
    assert ids.min() >= 0
    assert ids.max() < n


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 100_000), data=st.data())
def test_slices_are_parts_of_the_whole(n: int, data: st.DataObject) -> None:
    shuffle = data.draw(st.sampled_from(["full", "block"]))
    first = data.draw(st.integers(0, n))
    count = data.draw(st.integers(0, n - first))
    order = Order(n, 9, 1, shuffle, data.draw(st.integers(1, 5000)))
    assert np.array_equal(order.sample_ids(first, count), order.sample_ids(0, n)[first : first + count])


@pytest.mark.parametrize("n", [5000, 2**31 + 11, 2**40 - 87, 2**40, MAX_SAMPLES])
def test_every_sample_has_a_position_in_huge_epochs(n: int) -> None:
    """The inverse of the stated algorithm finds it."""
    for sample in (*np.random.default_rng(1).integers(0, n, 200).tolist(), 0, n - 1):
        position = full(n, 3, 4, sample, backwards=True)
        assert 0 <= position < n
        assert ids_at(Order(n, 3, 4), [position]) == [sample]


def test_without_shuffle_samples_come_in_their_own_order() -> None:
    assert Order(10, 3, 4, False).sample_ids(2, 5).tolist() == [2, 3, 4, 5, 6]


SIZES = [1000, 4095, 4096, 30_011, 200_000]


@pytest.mark.parametrize("n", SIZES)
def test_first_samples_are_spread_evenly(n: int) -> None:
    some = max(100, n // 50)
    ids = np.concatenate([Order(n, 1, epoch).sample_ids(0, some) for epoch in range(40)])
    assert abs(spread_z(ids, 50, n)) < 6


@pytest.mark.parametrize("n", SIZES)
def test_one_position_is_spread_evenly_over_epochs(n: int) -> None:
    for position in (0, n // 3, n - 1):
        ids = np.array([Order(n, 2, epoch).sample_ids(position, 1)[0] for epoch in range(2000)])
        assert abs(spread_z(ids, 20, n)) < 6


@pytest.mark.parametrize("n", SIZES)
def test_neighbours_are_unrelated(n: int) -> None:
    for epoch in range(3):
        ids = Order(n, 3, epoch).sample_ids(0, n)
        # The difference of a random permutation's neighbours is never 0 and else even.
        assert abs(spread_z((ids[1:] - ids[:-1]) % n - 1, 50, n - 1)) < 6


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("what", ["epoch", "seed"])
def test_consecutive_epochs_and_seeds_are_unrelated(n: int, what: str) -> None:
    for number in range(3):
        pair = [Order(n, 4, k) if what == "epoch" else Order(n, k, 4) for k in (number, number + 1)]
        here, there = (order.sample_ids(0, n) for order in pair)
        assert abs(spread_z((there - here) % n, 50, n)) < 6
        fixed = int((here == there).sum())  # Poisson of mean 1
        assert fixed < 12


def test_pairs_of_seed_and_epoch_do_not_alias() -> None:
    pairs = [(seed, epoch) for seed in range(12) for epoch in range(12)]
    pairs += [(1, 11), (11, 1), (111, 0), (2**64 - 1, 0), (0, 2**63 - 1), (2**32, 0), (0, 2**32)]
    orders = {Order(1000, seed, epoch).sample_ids(0, 20).tobytes() for seed, epoch in set(pairs)}
    assert len(orders) == len(set(pairs))


def test_numpy_integers_are_the_same_seeds() -> None:
    mine = Order(100, np.uint64(2**63 + 5), np.int64(7))  # type: ignore[arg-type]
    assert np.array_equal(mine.sample_ids(0, 100), Order(100, 2**63 + 5, 7).sample_ids(0, 100))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"n": 0}, "0"),
        ({"n": -1}, "-1"),
        ({"n": MAX_SAMPLES + 1}, "samples"),
        ({"n": 2.5}, "2.5"),
        ({"n": True}, "True"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"seed": None}, "seed"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 2**63}, "epoch"),
        ({"epoch": 0.5}, "epoch"),
        ({"epoch": False}, "epoch"),
        ({"shuffle": "time"}, "shuffle"),
        ({"shuffle": "block", "block": 0}, "block is 0"),
        ({"shuffle": "block", "block": -4}, "block is -4"),
        ({"shuffle": "block", "block": 2.0}, "block is 2.0"),
        ({"shuffle": "block", "block": True}, "block is True"),
        ({"shuffle": "block", "block": None}, "block is None"),
        ({"shuffle": True}, "shuffle"),
        ({"shuffle": None}, "shuffle"),
        ({"shuffle": 0}, "shuffle"),
    ],
)
def test_refuses(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SampleError, match=named):
        Order(**{"n": 10, **arguments})


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 11), (10, 1), (3, -1)])
def test_refuses_positions_outside_the_epoch(first: int, count: int) -> None:
    with pytest.raises(SampleError, match="10 samples"):
        Order(10).sample_ids(first, count)
