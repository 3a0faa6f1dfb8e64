"""shuffle="block": the stated algorithm, its golden vectors, a bijection, and blocks that stay together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_reference import Blocks, spread_z

from stager.samples.order import ALGORITHM, BLOCKS, DEFAULT_BLOCK, MAX_SAMPLES, UNSHUFFLED, Order

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "order_blocks.json").read_text())


def order_of(n: int, block: int, seed: int = 0, epoch: int = 0) -> Order:
    return Order(n, seed, epoch, "block", block)


def ids_at(order: Order, positions: list[int]) -> list[int]:
    return order.at(np.array(positions, np.int64)).tolist()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['n']}-{c['block']}-{c['seed']}")
def test_golden_vectors(case: dict[str, Any]) -> None:
    order = order_of(case["n"], case["block"], case["seed"], case["epoch"])
    assert order.algorithm == GOLDEN["algorithm"] == BLOCKS
    assert ids_at(order, case["positions"]) == case["ids"]


def test_each_shuffle_has_its_algorithm() -> None:
    assert [Order(9, shuffle=how).algorithm for how in ("full", "block", False)] == [ALGORITHM, BLOCKS, UNSHUFFLED]
    assert Order(9).block == DEFAULT_BLOCK


@settings(deadline=None, max_examples=150)
@given(
    n=st.one_of(st.integers(1, 5000), st.integers(1, MAX_SAMPLES)),
    block=st.one_of(st.integers(1, 100), st.integers(1, 1 << 63)),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_equals_the_stated_algorithm(n: int, block: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    stated = Blocks(n, block, seed, epoch)
    # Those of the shorter block too.
    positions += [p for p in (stated.place * stated.size + k for k in (-1, 0, stated.n_rest)) if 0 <= p < n]
    found = ids_at(order_of(n, block, seed, epoch), positions)
    assert found == [stated.sample(p) for p in positions]
    assert [stated.position(sample) for sample in found] == positions


def test_every_sample_comes_once() -> None:
    for n in (*range(1, 70), 4095, 4096, 4097, 12_345):
        for block in {*range(1, 12), n // 3 + 1, n - 1, n, n + 1, 4096, 5000} - {0}:
            ids = order_of(n, block, 5, n + block).sample_ids(0, n)
            assert ids.dtype == np.int64
            assert np.array_equal(np.sort(ids), np.arange(n)), (n, block)


@pytest.mark.parametrize("n", [2**31 + 11, 2**40 - 87, 2**40, MAX_SAMPLES])
@pytest.mark.parametrize("block", [1, 1000, 4096, 2**33 + 1])
def test_every_sample_has_a_position_in_huge_epochs(n: int, block: int) -> None:
    stated, order = Blocks(n, block, 3, 4), order_of(n, block, 3, 4)
    for sample in (*np.random.default_rng(1).integers(0, n, 50).tolist(), 0, n - 1):
        assert ids_at(order, [stated.position(sample)]) == [sample]


@pytest.mark.parametrize(("n", "block"), [(1000, 64), (1000, 7), (4096, 512), (30_000, 4096)])
def test_blocks_stay_together_and_are_shuffled_inside(n: int, block: int) -> None:
    for epoch in range(5):
        ids, stated = order_of(n, block, 1, epoch).sample_ids(0, n), Blocks(n, block, 1, epoch)
        sizes = [block] * (n // block)
        sizes.insert(stated.place, n % block)
        served = np.split((ids - stated.rotation) % n, np.cumsum(sizes)[:-1])
        assert [set(part) for part in served] == [
            set(range(part.min(), part.min() + len(part))) if len(part) else set() for part in served
        ]
        shuffled = [part for part in served if len(part) > 5]
        assert not any(np.array_equal(part, np.sort(part)) for part in shuffled)


def test_no_block_begins_where_it_did() -> None:
    n, block = 10_000, 100
    begins = {Blocks(n, block, 1, epoch).rotation % block for epoch in range(300)}
    assert len(begins) > 80
    # Neighbours among samples are in one block in some epochs and not in others: anywhere alike.
    together = np.zeros(n)
    for epoch in range(200):
        positions = np.empty(n, np.int64)
        positions[order_of(n, block, 1, epoch).sample_ids(0, n)] = np.arange(n)
        together += np.abs(positions - np.roll(positions, 1)) < block
    assert together.min() > 160


def test_rows_are_local() -> None:
    """A batch reads few stretches of samples, where a full shuffle reads one for nearly each sample."""
    n, block, batch = 1_000_000, 4096, 256

    def stretches(ids: np.ndarray) -> float:
        return float(np.mean([(np.diff(np.sort(part)) > 64).sum() + 1 for part in ids.reshape(-1, batch)[:200]]))

    whole = n // batch * batch
    # A batch of 256 of a block of 4,096 takes every 16th.
    assert stretches(order_of(n, block).sample_ids(0, whole)) < 12
    assert stretches(Order(n).sample_ids(0, whole)) > 250


SIZES = [(1000, 10), (4096, 64), (30_011, 1000), (200_000, 4096), (200_000, 30_000)]


@pytest.mark.parametrize(("n", "block"), SIZES)
def test_one_position_is_spread_evenly_over_epochs(n: int, block: int) -> None:
    for position in (0, n // 3, n - 1):
        ids = np.array([order_of(n, block, 2, epoch).sample_ids(position, 1)[0] for epoch in range(800)])
        assert abs(spread_z(ids, 20, n)) < 6


@pytest.mark.parametrize(("n", "block"), SIZES)
@pytest.mark.parametrize("what", ["epoch", "seed"])
def test_consecutive_epochs_and_seeds_are_unrelated(n: int, block: int, what: str) -> None:
    differences, fixed = [], 0
    for number in range(60):
        pair = [order_of(n, block, 4, k) if what == "epoch" else order_of(n, block, k, 4) for k in (number, number + 1)]
        here, there = (order.sample_ids(0, n) for order in pair)
        # Samples of one block move together, so a few positions of each pair of epochs are looked at.
        differences.append(((there - here) % n)[:: max(1, n // 10)])
        fixed += int((here == there).sum())
    assert abs(spread_z(np.concatenate(differences), 20, n)) < 6
    # Of mean 60; whole blocks come and go together, so its spread is wider than that of a full shuffle.
    assert fixed < 400


@pytest.mark.parametrize(("n", "block"), SIZES)
def test_places_inside_blocks_are_unrelated(n: int, block: int) -> None:
    """Two blocks of an epoch are not shuffled alike, and neither are the places of a block in order."""
    size = min(block, n)
    inside = []
    for epoch in range(40):
        stated = Blocks(n, block, 3, epoch)
        ids = (order_of(n, block, 3, epoch).sample_ids(0, n) - stated.rotation) % n
        ids = np.delete(ids, np.arange(stated.n_rest) + stated.place * stated.size)
        inside.append(ids.reshape(-1, size) % size)
    first, second = (np.concatenate([part[k].reshape(-1) for part in inside]) for k in (0, 1))
    assert abs(spread_z((second - first) % size, min(10, size), size)) < 6
    neighbours = np.concatenate([((part[:, 1:] - part[:, :-1]) % size).reshape(-1)[:20_000] for part in inside])
    assert abs(spread_z(neighbours - 1, min(9, size - 1), size - 1)) < 6
