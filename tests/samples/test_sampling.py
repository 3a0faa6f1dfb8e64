"""Weighted sampling: an exact table, the stated draw, its golden vectors, and samples in proportion."""

from __future__ import annotations

import json
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_reference import chi_square_z, drawn, spread_z

from stager.errors import SampleError
from stager.samples.sampling import ALIAS, Draws, WeightedOrder, _high_product, alias_table, check_weights

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "order_weighted.json").read_text())
FULL = 2**53

some_weights = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1e3), st.floats(0, allow_infinity=False), st.integers(0, 5).map(float)),
    min_size=1,
    max_size=60,
).filter(any)


def allowed(n: int) -> Fraction:
    """How far a chance may be from the given one, as the module states it."""
    return Fraction(n, 2**60) + Fraction(6, 2**53)


def chances(table: np.ndarray) -> list[Fraction]:
    """What the table gives each sample, exactly."""
    found = [Fraction(0)] * len(table)
    for column, (threshold, alias) in enumerate(table.tolist()):
        found[column] += Fraction(threshold, FULL * len(table))
        found[alias] += Fraction(FULL - threshold, FULL * len(table))
    return found


@settings(deadline=None, max_examples=300)
@given(weights=some_weights)
def test_the_table_is_the_weights(weights: list[float]) -> None:
    table = alias_table(np.array(weights))
    assert table.dtype == np.uint64
    assert (table[:, 0] <= FULL).all()
    found, total = chances(table), sum(map(Fraction, weights))
    assert sum(found) == 1
    for weight, chance in zip(weights, found, strict=True):
        assert abs(chance - Fraction(weight) / total) <= allowed(len(weights))
        assert (chance > 0) == (weight > 0)


@pytest.mark.parametrize("rare", [1.0, 1e-6, 1e-12])
def test_few_positive_weights_of_many_keep_their_chances(rare: float) -> None:
    weights = np.zeros(200_000)
    weights[[3, 150_000]] = rare, 1.0
    found = chances(alias_table(weights))
    for sample in (3, 150_000):
        assert abs(found[sample] - Fraction(weights[sample]) / sum(map(Fraction, (rare, 1.0)))) <= allowed(len(weights))


def test_equal_weights_are_never_passed_on() -> None:
    for n in (1, 2, 7, 1000):
        assert (alias_table(np.full(n, 0.3))[:, 0] == FULL).all()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{len(c['weights'])}-{c['seed']}")
def test_golden_vectors(case: dict[str, Any]) -> None:
    draws = Draws(np.array(case["weights"]))
    assert draws.table.tolist() == case["table"]
    order = WeightedOrder(draws, case["seed"], case["epoch"])
    assert order.algorithm == GOLDEN["algorithm"] == ALIAS
    assert order.sample_ids(0, order.n).tolist() == case["ids"]
    assert order.at(np.array(case["positions"])).tolist() == case["ids_at"]


@settings(deadline=None, max_examples=100)
@given(
    weights=some_weights,
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**63 - 1),
    positions=st.lists(st.integers(0, 2**62), min_size=1, max_size=8),
)
def test_equals_the_stated_algorithm(weights: list[float], seed: int, epoch: int, positions: list[int]) -> None:
    draws = Draws(np.array(weights))
    order = WeightedOrder(draws, seed, epoch)
    assert order.at(np.array(positions)).tolist() == [drawn(draws.table, seed, epoch, p) for p in positions]


@settings(deadline=None)
@given(x=st.lists(st.integers(0, 2**64 - 1), min_size=1), n=st.integers(1, 2**62))
def test_high_products(x: list[int], n: int) -> None:
    assert _high_product(np.array(x, np.uint64), n).tolist() == [each * n >> 64 for each in x]


@pytest.mark.parametrize("n", [2, 50, 1000, 30_011])
@pytest.mark.parametrize("kind", ["even", "gamma", "heavy", "zeros"])
def test_samples_are_drawn_in_proportion(n: int, kind: str) -> None:
    rng = np.random.default_rng(n)
    weights = {
        "even": np.ones(n),
        "gamma": rng.gamma(0.5, size=n) + 1e-3,
        "heavy": np.where(np.arange(n) == n // 2, 10.0 * n, 1.0),
        "zeros": np.where(np.arange(n) % 2 == 1, rng.random(n) + 0.1, 0.0),
    }[kind]
    draws, counts, n_epochs = Draws(weights), np.zeros(n, np.int64), max(20, 200_000 // n)
    for epoch in range(n_epochs):
        counts += np.bincount(WeightedOrder(draws, 1, epoch).sample_ids(0, n), minlength=n)
    assert (counts[weights == 0] == 0).all()
    # Samples in the order of their weights, in groups of which each is expected often enough.
    chosen = np.argsort(weights)[np.count_nonzero(weights == 0) :]
    expected = weights[chosen] / weights.sum() * n * n_epochs
    groups = (np.cumsum(expected) // 50).astype(int)
    edges = np.flatnonzero(np.diff(groups, prepend=-1))
    found, wanted = np.add.reduceat(counts[chosen], edges), np.add.reduceat(expected, edges)
    if len(edges) > 1:
        assert abs(chi_square_z(found, wanted)) < 6


def test_positions_seeds_and_epochs_are_unrelated() -> None:
    n = 5000
    draws = Draws(np.ones(n))
    here = WeightedOrder(draws, 1, 1).sample_ids(0, n)
    others = [WeightedOrder(draws, *pair).sample_ids(0, n) for pair in ((1, 2), (2, 1), (11, 1), (1, 11))]
    for there in (*others, np.roll(here, 1)):
        assert abs(spread_z((there - here) % n, 50, n)) < 6
        assert (there == here).sum() < 12
    # With replacement: of n draws a share of 1/e never comes.
    assert abs(len(np.unique(here)) / n - (1 - np.exp(-1))) < 0.03
    first = np.array([WeightedOrder(draws, 2, epoch).sample_ids(0, 1)[0] for epoch in range(800)])
    assert abs(spread_z(first, 20, n)) < 6


def test_slices_are_parts_of_the_whole() -> None:
    draws = Draws(np.random.default_rng(1).random(100_000))
    order = WeightedOrder(draws, 3, 4)
    whole = order.sample_ids(0, order.n)
    for first, count in ((0, 0), (5, 1), (32_000, 40_000), (99_999, 1)):
        assert np.array_equal(order.sample_ids(first, count), whole[first : first + count])
    for first, count in ((-1, 2), (0, order.n + 1), (3, -1)):
        with pytest.raises(SampleError, match="100,000 samples"):
            order.sample_ids(first, count)


def test_a_table_takes_16_bytes_a_sample_and_no_loop() -> None:
    weights = np.random.default_rng(1).random(1_000_000)
    tracemalloc.start()
    draws = Draws(weights)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert draws.table.nbytes == 16 * len(weights)
    assert peak < 100 * len(weights)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([1.0, 2.0], r"shape \(2,\); give \(3,\)"),
        ([[1.0, 2.0, 3.0]], r"shape \(1, 3\)"),
        (2.0, r"shape \(\)"),
        ([1.0, -2.0, 3.0], "the weight of sample 1 is -2.0; weights must be 0 or more"),
        ([1.0, 2.0, np.nan], "the weight of sample 2 is nan; weights must be finite"),
        ([np.inf, 2.0, 1.0], "the weight of sample 0 is inf; weights must be finite"),
        ([0, 0, 0], "all 3 weights are 0"),
        (["a", "b", "c"], "weights are of <U1"),
        ([1, None, 2], "weights are of object"),
        ([[1], [2, 3]], "can't be read as a NumPy array"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, text: str) -> None:
    with pytest.raises(SampleError, match=text):
        check_weights(weights, 3)


@pytest.mark.parametrize("weights", [[1, 0, 2], np.array([1, 0, 2], np.float32), [True, False, True], (0.5, 0.0, 1.0)])
def test_numbers_of_any_kind_are_weights(weights: Any) -> None:
    assert check_weights(weights, 3).dtype == np.float64
