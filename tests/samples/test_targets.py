"""Several targets, labels that are given, and scales: against plain loops."""

from __future__ import annotations

import csv
import math
import statistics
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.read import ReadOptions
from stager.errors import SampleError
from stager.packs.packing import pack_in_memory
from stager.samples import labelling, scaling
from stager.samples.building import build_index
from stager.samples.index import SampleIndex
from stager.samples.labels import Labels
from stager.samples.plan import describe
from stager.samples.select import Select
from stager.samples.targets import Target

NAN = float("nan")


def served(index: SampleIndex) -> np.ndarray:
    return index.rows(np.arange(index.n_samples))


def stamps(rows: list[int], unit: int = MINUTE) -> pa.Array:
    return pa.array([START + row * unit for row in rows], pa.timestamp("ns", "UTC"))


# -------------------------------------------------------------------------------- several targets


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_each_of_several_targets_is_what_it_is_alone(data: st.DataObject) -> None:
    """A row ends a sample if it does with any of them; what one lacks is NaN, and leaves the others alone."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    steps = {name: np.cumsum(random.choice([1, 1, 1, 1, 3], 25)).tolist() for name in "AB"}
    close = 100 + random.normal(size=50).cumsum()
    close[random.integers(0, 50, 3)] = random.choice([0.0, -1.0, 50.0])
    pack = memory_pack(steps, close=close, volume=random.choice([0.0, 1.0, 2.0, NAN, math.inf], 50))
    targets = [
        Target(
            data.draw(st.sampled_from(["close", "volume", "high"])),
            horizon=data.draw(st.integers(1, 6)),
            delay=data.draw(st.integers(0, 2)),
            kind=data.draw(st.sampled_from(["return", "log_return", "difference", "direction", "value"])),
            across_gaps=data.draw(st.sampled_from(["exclude", "allow"])),
        )
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    # Windows of one row over a complete column only: every row is a candidate.
    pack_rows = [row for row in range(50) if math.isfinite(pack.column("volume")[row])]
    alone: list[dict[int, float]] = []
    ends: list[dict[int, int]] = []
    for target in targets:
        try:
            index = build_index(pack, 1, target, Select())
        except SampleError:
            alone.append({})
            ends.append({})
            continue
        rows = served(index)
        assert index.y is not None
        alone.append(dict(zip(rows.tolist(), index.y[rows].tolist(), strict=True)))
        ends.append(dict(zip(rows.tolist(), index.label_ends(rows).tolist(), strict=True)))
    union = sorted(set().union(*alone))
    if not union:
        with pytest.raises(SampleError, match="no sample"):
            build_index(pack, 1, targets, Select())
        return
    index = build_index(pack, 1, targets, Select())
    rows = served(index)
    assert rows.tolist() == union
    assert set(union) <= set(pack_rows)
    assert index.n_samples + sum(index.reasons.values()) == pack.n_rows
    assert index.y is not None
    assert index.y.shape == (50, len(targets))
    wanted = [[one.get(row, NAN) for one in alone] for row in union]
    np.testing.assert_array_equal(index.y[rows], np.array(wanted, np.float32))
    nat = np.iinfo(np.int64).min
    assert index.label_ends(rows).tolist() == [[one.get(row, nat) for one in ends] for row in union]


def test_one_targets_gap_removes_no_sample_of_another() -> None:
    pack = memory_pack({"A": range(10)})
    index = build_index(pack, 2, [Target(horizon=1), Target(horizon=6)], Select())
    assert served(index).tolist() == list(range(1, 8))
    assert index.y is not None
    assert np.isnan(index.y[3:8, 1]).all()
    assert np.isfinite(index.y[1:8, 0]).all()


def test_a_list_of_one_target_has_a_column() -> None:
    pack = memory_pack({"A": range(10)})
    index, flat = (build_index(pack, 2, target, Select()) for target in ([Target(horizon=1)], Target(horizon=1)))
    assert index.y is not None
    assert flat.y is not None
    assert (index.y.shape, flat.y.shape) == ((10, 1), (10,))
    np.testing.assert_array_equal(index.y[:, 0], flat.y)


@pytest.mark.parametrize("target", [[], (), "close", 5, [Target(horizon=1), None], {"horizon": 1}])
def test_what_is_no_target_is_refused(target: Any) -> None:
    with pytest.raises(SampleError, match="target is"):
        build_index(memory_pack({"A": range(10)}), 2, target, Select())


def test_labels_may_cross_gaps_but_no_symbol() -> None:
    pack = memory_pack({"A": [0, 1, 2, 5, 6, 9], "B": range(4)})
    index = build_index(pack, 1, Target(horizon=1, kind="difference", across_gaps="allow"), Select(symbols=["A", "B"]))
    assert served(index).tolist() == [0, 1, 2, 3, 6, 7]
    assert index.y is not None
    assert set(index.y[served(index)].tolist()) == {1.0}
    within = build_index(pack, 1, Target(horizon=1, kind="difference"), Select())
    assert served(within).tolist() == [0, 6, 7]


# -------------------------------------------------------------------------------- scales


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_trailing_volatility_is_that_of_a_loop(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    steps = {name: np.cumsum(random.choice([1, 1, 1, 1, 1, 3], 30)).tolist() for name in "AB"}
    close = 100 * np.exp(0.01 * random.normal(size=60).cumsum())
    close[random.integers(0, 60, 2)] = random.choice([0.0, 100.0, -3.0])
    close[10:16] = 100.0
    pack = memory_pack(steps, close=close)
    width, horizon = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    kind = data.draw(st.sampled_from(["return", "log_return", "difference"]))
    plain = build_index(pack, 1, Target(horizon=horizon, kind=kind), Select())
    monkey = data.draw(st.sampled_from([7, 1 << 18]))
    wanted: dict[int, float] = {}
    runs = plain.breaks.runs(0)
    assert plain.y is not None
    for row in served(plain).tolist():
        first = int(runs.first_rows[np.searchsorted(runs.first_rows, row, side="right") - 1])
        if row - first < width:
            continue
        levels = close[row - width : row + 1]
        if kind != "difference" and (levels <= 0).any():
            continue
        moves = np.diff(levels) if kind == "difference" else np.diff(np.log(levels))
        sigma = statistics.stdev(moves.tolist())
        if sigma > 0:
            entry, leave = close[row + 1], close[row + 1 + horizon]
            if kind == "difference":
                move = leave - entry
            else:
                move = leave / entry - 1 if kind == "return" else math.log(leave / entry)
            wanted[row] = move / (sigma * math.sqrt(horizon))
    before = labelling._CHUNK_ROWS
    labelling._CHUNK_ROWS = monkey
    try:
        target = Target(horizon=horizon, kind=kind, scale="volatility", scale_window=width)
        if not wanted:
            with pytest.raises(SampleError, match="no scale for the target"):
                build_index(pack, 1, target, Select())
            return
        index = build_index(pack, 1, target, Select())
    finally:
        labelling._CHUNK_ROWS = before
    assert served(index).tolist() == list(wanted)
    assert index.y is not None
    np.testing.assert_allclose(index.y[list(wanted)], list(wanted.values()), rtol=1e-6)
    assert index.reasons["no scale for the target"] == plain.n_samples - len(wanted)
    assert index.n_samples + sum(index.reasons.values()) == 60


def test_a_large_move_long_ago_leaves_the_volatility_as_it_is() -> None:
    random = np.random.default_rng(1)
    calm = 100 + random.normal(size=40).cumsum()
    wild = calm.copy()
    wild[3] = 1e30
    target = Target(horizon=1, kind="difference", scale="volatility", scale_window=5)
    one, other = (
        build_index(memory_pack({"A": range(40)}, close=close), 1, target, Select()) for close in (calm, wild)
    )
    assert one.y is not None
    assert other.y is not None
    np.testing.assert_array_equal(one.y[9:38], other.y[9:38])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_cross_sections_are_those_of_a_loop(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    steps = {name: sorted(random.choice(12, random.integers(1, 12), replace=False).tolist()) for name in "ABCDE"}
    n = sum(map(len, steps.values()))
    pack = memory_pack(steps, close=random.choice([1.0, 2.0, 3.0, 1e6, -1.0], n))
    scale = data.draw(st.sampled_from(["rank", "demean"]))
    select = Select(symbols=data.draw(st.sampled_from([None, ["A", "B", "C"]])), max_gap=20)
    plain_target = Target(horizon=1, delay=0, kind=data.draw(st.sampled_from(["return", "value"])))
    target = Target(horizon=1, delay=0, kind=plain_target.kind, scale=scale)
    try:
        plain = build_index(pack, 1, plain_target, select)
    except SampleError:
        with pytest.raises(SampleError, match="no sample"):
            build_index(pack, 1, target, select)
        return
    index = build_index(pack, 1, target, select)
    rows = served(index)
    assert rows.tolist() == served(plain).tolist()
    close = pack.column("close")
    exact = {
        row: close[row + 1] if target.kind == "value" else close[row + 1] / close[row] - 1 for row in rows.tolist()
    }
    assert index.y is not None
    for row, value in exact.items():
        peers = [exact[other] for other in exact if pack.times[other] == pack.times[row]]
        if scale == "demean":
            wanted = value - math.fsum(peers) / len(peers)
            assert index.y[row] == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        else:
            rank = sum(peer < value for peer in peers) + (sum(peer == value for peer in peers) + 1) / 2
            assert index.y[row] == np.float32((rank - (len(peers) + 1) / 2) / len(peers))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    n_instants=st.integers(2, 300),
    interval=st.sampled_from([("1min", MINUTE), ("1d", DAY), ("1mo", 31 * DAY)]),
    off=st.booleans(),
)
def test_cross_sections_do_not_depend_on_how_they_are_cut(
    seed: int, n_instants: int, interval: tuple[str, int], off: bool
) -> None:
    """Months are stamped differently by symbol, and still are one instant; instants may lie off any grid."""
    random = np.random.default_rng(seed)
    name, unit = interval
    n_instants = min(n_instants, 30) if name == "1mo" else n_instants
    steps = {
        symbol: sorted(random.choice(n_instants, random.integers(1, n_instants), replace=False).tolist())
        for symbol in map(str, range(random.integers(1, 9)))
    }
    table = bar_table(steps, unit=unit, close=random.integers(1, 9, sum(map(len, steps.values()))).astype(float))
    stamps, owners = table["time"].cast(pa.int64()).to_numpy(), table["symbol"].cast(pa.int64()).to_numpy()
    if name == "1mo":
        stamps = stamps + owners * DAY
    elif off and name == "1min":
        stamps = stamps + random.integers(0, 10**9, n_instants)[(stamps - START) // unit]
    table = table.set_column(1, "time", pa.array(stamps).cast(pa.timestamp("ns", "UTC")))
    pack = pack_in_memory(table, ReadOptions(interval=name))
    for how in ("rank", "demean"):
        target = [Target(horizon=1), Target(horizon=1, delay=0, kind="value", scale=how)]
        found = []
        for size, symbols, large in ((1 << 17, 256, 256), (1, 1, 1), (7, 2, 256), (100, 3, 2)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scaling, "_PART", size)
                patch.setattr(scaling, "_LARGE", large)
                patch.setattr(scaling, "_SYMBOLS", symbols)
                try:
                    index = build_index(pack, 1, target, Select(max_gap=400))
                except SampleError:
                    return
            assert index.y is not None
            rows = served(index)
            found.append((index.y[:, 1], index.label_ends(rows)[:, 1]))
        for y, ends in found[1:]:
            np.testing.assert_array_equal(y, found[0][0])
            np.testing.assert_array_equal(ends, found[0][1])
        decisions = pack.available_at(rows)
        for moment in np.unique(decisions):
            peers = rows[(decisions == moment) & ~np.isnan(index.y[rows, 1])]
            assert abs(float(index.y[peers, 1].mean(dtype=np.float64)) if len(peers) else 0.0) < 1e-5


def test_a_label_of_a_cross_section_is_known_when_all_of_it_is() -> None:
    """A and B enter at the same instants; the exit of B is later, because it has a gap."""
    pack = memory_pack({"A": range(8), "B": [0, 1, 2, 3, 7, 8, 9, 10]}, close=np.arange(1.0, 17) ** 2)
    target = Target(horizon=1, delay=0)
    plain = build_index(pack, 1, target, Select(max_gap=5))
    index = build_index(pack, 1, Target(horizon=1, delay=0, scale="demean"), Select(max_gap=5))
    rows = served(index)
    np.testing.assert_array_equal(rows, served(plain))
    ends = dict(zip(rows.tolist(), plain.label_ends(rows).tolist(), strict=True))
    for row, end in zip(rows.tolist(), index.label_ends(rows).tolist(), strict=True):
        assert end == max(ends[other] for other in ends if pack.times[other] == pack.times[row])
    assert (index.label_ends(rows)[3] - plain.label_ends(rows)[3]) // MINUTE == 3
    both = build_index(pack, 1, [target, Target(horizon=2, delay=0)], Select(max_gap=5))
    rows = served(both)
    np.testing.assert_array_equal(both.known_at(rows), both.label_ends(rows).max(axis=1))
    np.testing.assert_array_equal(index.known_at(rows), index.label_ends(rows))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scale": "zscore"}, "scale is 'zscore'"),
        ({"scale": "volatility", "kind": "direction"}, "not for kind='direction'"),
        ({"scale": "volatility", "kind": "value"}, "not for kind='value'"),
        ({"scale_window": 1}, "scale_window is 1"),
        ({"scale_window": True}, "scale_window is True"),
        ({"scale_window": 2.0}, "scale_window is 2.0"),
        ({"across_gaps": "yes"}, "across_gaps is 'yes'"),
    ],
)
def test_scales_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleError, match=words):
        Target(horizon=1, **arguments)


def test_scales_are_told() -> None:
    text = describe([Target(horizon=2, scale="rank"), Target(horizon=1, scale="volatility", across_gaps="allow")])
    assert "bar t+3, rank across symbols; return from" in text
    assert "bar t+2, across gaps, by the volatility of 20 bars" in text
    assert describe(Labels(pa.table({}))) == "given labels 'label' until 'label_end'"


# -------------------------------------------------------------------------------- labels


PACK = memory_pack({"A": range(10), "B": [0, 1, 2, 7, 8]})


def events(symbols: str, rows: list[int], values: list[Any], ends: list[Any], key: str = "time") -> pa.Table:
    shift = 1 if key == "decision" else 0
    return pa.table(
        {
            "symbol": list(symbols),
            key: stamps([row + shift for row in rows]),
            "label": pa.array(values, pa.float64()),
            "label_end": pa.array([None if end is None else START + end * MINUTE for end in ends], pa.timestamp("ns")),
        }
    )


class Frame:
    """What a data frame of pandas or Polars is to Arrow."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return self._table.__arrow_c_stream__(schema)


@pytest.mark.parametrize("key", ["time", "decision"])
@pytest.mark.parametrize("kind", ["table", "parquet", "csv", "frame"])
def test_events_label_their_bars(key: str, kind: str, tmp_path: Any) -> None:
    """In any order; a bar without one, or with an empty one, ends no sample."""
    table: Any = events("BAAAB", [7, 3, 0, 5, 1], [1.0, -1.0, 0.5, None, 2.5], [9, 4, 30, None, 2], key)
    if kind == "parquet":
        pq.write_table(table, tmp_path / "labels.parquet")
        table = tmp_path / "labels.parquet"
    elif kind == "csv":
        with (tmp_path / "labels.csv").open("w") as file:
            writer = csv.writer(file)
            writer.writerow(table.column_names)
            for row in table.to_pylist():
                writer.writerow(["" if value is None else str(value) for value in row.values()])
        table = str(tmp_path / "labels.csv")
    elif kind == "frame":
        table = Frame(table)
    index = build_index(PACK, 1, Labels(table), Select())
    rows = served(index)
    assert rows.tolist() == [0, 3, 11, 13]
    assert index.y is not None
    assert index.y[rows].tolist() == [0.5, -1.0, 2.5, 1.0]
    assert ((index.label_ends(rows) - START) // MINUTE).tolist() == [30, 4, 2, 9]
    assert index.reasons["missing value in the target"] == 1
    assert index.reasons["no label given"] == 10


def test_labels_go_beside_other_targets() -> None:
    labels = events("AAB", [1, 2, 8], [1.0, 0.0, 3.0], [2, 9, 9])
    index = build_index(PACK, 1, [Target(horizon=7), Labels(labels), Labels(labels, scale="demean")], Select())
    rows = served(index)
    assert rows.tolist() == [0, 1, 2, 14]
    assert index.y is not None
    assert np.isnan(index.y[rows]).tolist() == [
        [False, True, True],
        [False, False, False],
        [True, False, False],
        [True, False, False],
    ]
    assert index.y[rows, 1].tolist()[1:] == [1.0, 0.0, 3.0]
    assert index.y[rows, 2].tolist()[1:] == [0.0, 0.0, 0.0]


def test_daily_bars_are_labelled_by_dates() -> None:
    pack = memory_pack({"A": range(5)}, interval="1d", unit=DAY)
    table = pa.table(
        {
            "symbol": pa.array(["A", "A"]).dictionary_encode(),
            "time": pa.array([START // DAY + 1, START // DAY + 3], pa.int32()).cast(pa.date32()),
            "mine": [True, False],
            "until": pa.array([START // DAY + 2, START // DAY + 9], pa.int32()).cast(pa.date32()),
        }
    )
    index = build_index(pack, 1, Labels(table, value="mine", end="until"), Select())
    rows = served(index)
    assert rows.tolist() == [1, 3]
    assert index.y is not None
    assert index.y[rows].tolist() == [1.0, 0.0]


def test_a_label_beyond_float32_is_missing() -> None:
    index = build_index(PACK, 1, Labels(events("AAA", [1, 2, 3], [1e300, math.inf, 1.0], [9, 9, 9])), Select())
    assert served(index).tolist() == [3]
    assert index.reasons["missing value in the target"] == 2


GOOD = events("AB", [1, 1], [1.0, 2.0], [2, 3])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (5, "labels 'label' is 5; give a pyarrow.Table, a data frame, or the path"),
        ("missing.csv", "missing.csv can't be read"),
        (GOOD.drop(["symbol"]), "no column 'symbol'; it has: time, label, label_end"),
        (GOOD.drop(["label"]), "no column 'label'"),
        (GOOD.drop(["label_end"]), "no column 'label_end'"),
        (GOOD.drop(["time"]), "'time' .* or 'decision' .* one of the two"),
        (GOOD.append_column("decision", GOOD["time"]), "one of the two"),
        (GOOD.set_column(1, "time", pa.array([1, 2])), "'time' is int64; it must hold timestamps"),
        (GOOD.set_column(2, "label", pa.array(["up", "down"])), "'label' is string; it must hold numbers"),
        (GOOD.set_column(0, "symbol", pa.array([1.5, 2.5])), "1 of 2 fit no bar|2 of 2 fit no bar"),
        (GOOD.set_column(0, "symbol", pa.array([None, "A"])), "'symbol' is empty in 1 rows, first row 0"),
        (GOOD.set_column(1, "time", pa.array([None, START], pa.timestamp("ns"))), "'time' is empty in 1 rows"),
        (GOOD.set_column(1, "time", pa.array([0, 2**60], pa.timestamp("s"))), "beyond 1678 to 2261"),
        (events("AC", [1, 1], [1.0, 2.0], [2, 3]), "1 of 2 fit no bar of the pack, first C 2024-01-01"),
        (events("AB", [1, 3], [1.0, 2.0], [2, 9]), "1 of 2 fit no bar of the pack, first B 2024-01-01 00:03"),
        (events("AB", [1, 9], [1.0, 2.0], [2, 99]), "1 of 2 fit no bar"),
        (events("AA", [1, 1], [1.0, 1.0], [2, 2]), "1 bars have two labels, first A 2024-01-01 00:01"),
        (events("AB", [1, 1], [1.0, 2.0], [1, 9]), "1 labels end before the decision.* A 2024-01-01 00:01"),
        (events("AB", [1, 1], [1.0, 2.0], [None, 9]), "1 labels have no end, first A"),
    ],
)
def test_labels_that_are_refused(table: Any, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        build_index(PACK, 1, Labels(table), Select())


def test_a_label_may_end_with_the_decision() -> None:
    assert build_index(PACK, 1, Labels(events("A", [1], [1.0], [2])), Select()).n_samples == 1


@pytest.mark.parametrize("arguments", [{"value": ""}, {"end": 3}, {"scale": "volatility"}])
def test_names_of_labels_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(SampleError, match=r"labels|scale"):
        Labels(GOOD, **arguments)


def test_without_a_label_there_is_no_sample() -> None:
    with pytest.raises(SampleError, match="15 rows: no label given"):
        build_index(PACK, 1, Labels(GOOD.slice(0, 0)), Select())
