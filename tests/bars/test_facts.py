"""Facts of parts, joined, are those of all bars at once, wherever the bars are cut."""

from __future__ import annotations

import itertools

import numpy as np
from bars_fixtures import DAY, MINUTE, START
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.cuts import Share, Whole, whole_of
from stager.bars.facts import Facts, facts_of, join
from stager.bars.interval import Interval
from stager.bars.jumps import usual_move
from stager.bars.series_findings import series_found

Columns = dict[str, np.ndarray]


@st.composite
def bars(draw: st.DrawFn) -> tuple[list[int], Columns]:
    """Symbols of quiet prices with jumps, wrong bars, prices that are not positive, and stretches without volume."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = draw(st.lists(st.integers(1, 45), min_size=1, max_size=4))
    n = sum(counts)
    close = 100 * (1 + rng.uniform(-0.01, 0.01, n))
    start = 0
    for count in counts:
        # No more than three large moves, so that the usual move of every part is that of all bars: a quiet one.
        n_spikes = draw(st.integers(0, 1))
        for at in draw(st.sets(st.integers(0, count - 1), max_size=3 - 2 * n_spikes)):
            close[start + at : start + count] *= draw(st.sampled_from([2, 0.5, 100, 1.02]))
        for at in draw(st.sets(st.integers(0, count - 1), max_size=n_spikes)):
            close[start + at] *= draw(st.sampled_from([10, 0.3]))
        start += count
    low = close * 0.99
    low[draw(st.lists(st.integers(0, n - 1), max_size=3))] = -1.0
    # Sessions with holidays, of which some are everybody's.
    steps = rng.choice([1, 1, 1, 1, 3, 9, 20], n)
    times = np.concatenate([START + np.cumsum(steps[:count]) for count in counts])
    volume = rng.choice([0.0, 0.0, 0.0, 1.0, -1.0], n, p=[0.3, 0.3, 0.2, 0.15, 0.05])
    return counts, {"times": times, "open": close, "high": close, "low": low, "close": close, "volume": volume}


def facts(counts: list[int], columns: Columns, unit: int, first: int, stop: int) -> Facts:
    """The facts of rows first to stop, as one part, whose times count bars."""
    in_time = columns | {"times": START + (columns["times"] - START) * unit}
    return facts_at(counts, in_time, Interval.fixed(unit), first, stop, None)


def facts_at(
    counts: list[int], columns: Columns, interval: Interval, first: int, stop: int, of_all: dict[int, Whole] | None
) -> Facts:
    """The facts of rows first to stop, as one part; of a symbol that is cut by what all of its bars tell."""
    starts = np.cumsum([0, *counts])
    inside = np.clip(np.minimum(starts[1:], stop) - np.maximum(starts[:-1], first), 0, None)
    symbols = [f"S{number}" for number in np.flatnonzero(inside)]
    numbers = inside[inside > 0].astype(np.int64)
    some = {name: values[first:stop] for name, values in columns.items()}
    times = some["times"]
    prices = [some[name] for name in ("open", "high", "low", "close")]
    is_cut = first not in starts or stop not in starts
    whole = None if of_all is None or not is_cut else of_all[int(np.flatnonzero(inside)[0])]
    begins = np.cumsum(numbers) - numbers
    return facts_of(symbols, times, prices, some["volume"], begins, numbers, interval, is_cut=is_cut, whole=whole)


def plain(one: Facts) -> dict[str, object]:
    jumps, volume = one.jumps, one.volume
    assert volume is not None
    return {
        "symbols": one.symbols,
        "counts": one.counts.tolist(),
        "last": (one.last_times.tolist(), one.last_is_off.tolist()),
        "signs": (one.not_positive.of_symbols.tolist(), one.not_positive.first, one.lowest),
        "negative": (one.negative_volume.of_symbols.tolist(), one.negative_volume.first),
        "zero": (volume.zero.of_symbols.tolist(), volume.zero.first, volume.flat),
        "stretches": (volume.rows.tolist(), volume.times.tolist(), volume.lengths.tolist()),
        "jumps": (jumps.rows.tolist(), jumps.times.tolist(), jumps.near, jumps.kinds.tolist()),
        "breaks": [values.tolist() for values in one.long_breaks()],
    }


@settings(deadline=None, max_examples=200)
@given(bars(), st.sampled_from([MINUTE, DAY]), st.data())
def test_joined_parts_are_the_whole(some: tuple[list[int], Columns], unit: int, data: st.DataObject) -> None:
    counts, columns = some
    n = sum(counts)
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=5))})
    whole = facts(counts, columns, unit, 0, n)
    parts = [facts(counts, columns, unit, first, stop) for first, stop in itertools.pairwise(cuts)]
    joined = join(parts)
    assert plain(joined) == plain(whole)
    timestamps = "session" if unit == DAY else "utc"
    assert series_found(joined, timestamps) == series_found(whole, timestamps)


@st.composite
def rough_bars(draw: st.DrawFn) -> tuple[list[int], Columns]:
    """Symbols of prices that move by anything, at times off the grid."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = draw(st.lists(st.integers(1, 45), min_size=1, max_size=4))
    n = sum(counts)
    close = np.exp(np.cumsum(rng.choice([0.01, -0.02, 0.7, -0.7, 2.3, -2.3], n, p=[0.4, 0.4, 0.05, 0.05, 0.05, 0.05])))
    close[draw(st.lists(st.integers(0, n - 1), max_size=3))] = -1.0
    steps = rng.choice([1, 3, 20], n)
    times = np.concatenate([START + np.cumsum(steps[:count]) for count in counts]).astype(np.int64)
    volume = rng.choice([0.0, 1.0], n)
    odd = rng.choice([0, 0, 0, 1, 2], n) * draw(st.booleans())
    return counts, {
        "times": times,
        "odd": odd,
        "open": close * 1.001,
        "high": close,
        "low": close,
        "close": close,
        "volume": volume,
    }


@settings(deadline=None, max_examples=200)
@given(rough_bars(), st.sampled_from([MINUTE, DAY]), st.data())
def test_parts_judged_by_what_all_bars_of_their_symbol_tell_are_the_whole_too(
    some: tuple[list[int], Columns], unit: int, data: st.DataObject
) -> None:
    counts, columns = some
    # Opens are some seconds late.
    columns = columns | {"times": START + (columns["times"] - START) * unit + columns["odd"] * 10**9}
    n, starts = sum(counts), np.cumsum([0, *counts])
    cuts: list[int] = []
    for first, stop in itertools.pairwise(starts.tolist()):
        # A symbol is whole in a part with others, or its parts are its own.
        inner = data.draw(st.sets(st.integers(first + 1, max(first + 1, stop - 1)), max_size=4)) - {stop}
        cuts += [first, *sorted(inner), stop] if inner else []
    cuts = sorted({0, n, *cuts})
    interval = Interval.fixed(unit)
    of_all: dict[int, Whole] = {}
    for symbol, (first, stop) in enumerate(itertools.pairwise(starts.tolist())):
        edges = [first, *(cut for cut in cuts if first < cut < stop), stop]
        of_all[symbol] = whole_of(
            [Share.of(columns["times"][a:b], columns["close"][a:b], interval) for a, b in itertools.pairwise(edges)]
        )
        usual = usual_move(columns["close"][first:stop])
        np.testing.assert_allclose(of_all[symbol].usual, usual, rtol=1e-12)
    whole = facts_at(counts, columns, interval, 0, n, None)
    joined = join([facts_at(counts, columns, interval, a, b, of_all) for a, b in itertools.pairwise(cuts)])
    assert plain(joined) == plain(whole)
    assert joined.off_grid.of_symbols.tolist() == whole.off_grid.of_symbols.tolist()
    timestamps = "session" if unit == DAY else "utc"
    assert series_found(joined, timestamps) == series_found(whole, timestamps)
