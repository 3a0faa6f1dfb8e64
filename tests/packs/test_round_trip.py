"""What is packed comes back, in every file and whatever the input's form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bars_fixtures import MINUTE, START, bar_table, csv_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stager.bars.read import ReadOptions
from stager.errors import BarsError, ConfigError, PackError
from stager.packs.layout import Pack, open_pack
from stager.packs.packing import pack, pack_in_memory
from stager.packs.verify import verify

ONE_MINUTE = ReadOptions(interval="1min")

FLOAT32_MAX = float(np.finfo(np.float32).max)
prices = st.floats(-FLOAT32_MAX, FLOAT32_MAX)
names = st.text(st.characters(exclude_categories=["Cc", "Cs", "Z"]), min_size=1, max_size=6)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Any bars, in any row order, with gaps and missing values in further columns."""
    symbols = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    stamps = st.one_of(st.integers(0, 50), st.integers(0, 10**6)).map(lambda n: START + n * MINUTE // 4)
    keys = draw(st.lists(st.tuples(st.sampled_from(symbols), stamps), min_size=1, max_size=40, unique=True))

    def column(values: st.SearchStrategy[float | None]) -> pa.Array:
        return pa.array(draw(st.lists(values, min_size=len(keys), max_size=len(keys))), pa.float64())

    further = st.one_of(prices, st.none(), st.just(float("nan")))
    table = {
        "symbol": pa.array([symbol for symbol, _ in keys]),
        "time": pa.array([time for _, time in keys], pa.timestamp("ns", "UTC")),
        **{name: column(prices) for name in ("open", "high", "low", "close")},
    }
    for name in draw(st.sampled_from([(), ("volume",), ("volume", "VWAP"), ("open interest", "Ω")])):
        values = column(further)
        if not np.isnan(values.to_numpy(zero_copy_only=False)).all():
            table[name] = values
    return pa.table(table)


def assert_holds(found: Pack, table: pa.Table) -> None:
    """The pack has the table's bars, bit for bit, sorted by symbol text and time."""
    keys = list(zip(table["symbol"].to_pylist(), table["time"].cast(pa.int64()).to_pylist(), strict=True))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    expected = table.take(order)
    assert found.columns == tuple(table.column_names[2:])
    assert found.symbols == tuple(sorted(set(table["symbol"].to_pylist())))
    assert found.n_rows == len(order)
    assert found.bars["symbol"].to_pylist() == [keys[i][0] for i in order]
    assert found.times.tolist() == [keys[i][1] for i in order]
    for number, symbol in enumerate(found.symbols):
        first, count = int(found.first_rows[number]), int(found.counts[number])
        assert set(found.bars["symbol"].slice(first, count).to_pylist()) == {symbol}
    for number, name in enumerate(found.columns):
        wanted = expected[name].to_numpy()
        missing = np.isnan(wanted)
        values = found.column(name)
        assert values.dtype == np.float64
        assert np.array_equal(np.isnan(values), missing)
        assert np.array_equal(values[~missing].view(np.int64), wanted[~missing].view(np.int64))
        assert found.manifest.columns[number].n_missing == missing.sum()
        assert np.array_equal(found.rows[:, number], values.astype(np.float32), equal_nan=True)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables())
def test_bars_come_back(tmp_path: Path, table: pa.Table) -> None:
    target = tmp_path / "bars.pack"
    pack(table, target, read=ONE_MINUTE, overwrite=True)
    found = open_pack(target)
    assert_holds(found, table)
    assert verify(target) == []
    in_memory = pack_in_memory(table, ONE_MINUTE)
    assert_holds(in_memory, table)
    assert in_memory.fingerprint == found.fingerprint
    assert [entry.name for entry in tmp_path.iterdir()] == ["bars.pack"]


@pytest.fixture
def fixture_pack(tmp_path: Path) -> Pack:
    return pack(bar_table({"A": range(7), "B": [0, 1, 5], "C": [3]}), tmp_path / "x.pack")


def test_values_tell_their_place(fixture_pack: Pack) -> None:
    closes = fixture_pack.rows[:, fixture_pack.columns.index("close")]
    expected = [1e6 * k + row for k, count in ((1, 7), (2, 3), (3, 1)) for row in range(count)]
    assert closes.tolist() == expected
    assert fixture_pack.first_rows.tolist() == [0, 7, 10]
    assert fixture_pack.counts.tolist() == [7, 3, 1]


def test_rows_are_a_standard_npy_file(fixture_pack: Pack) -> None:
    assert fixture_pack.path is not None
    file = fixture_pack.path / "segment-0" / "rows.npy"
    rows = np.load(file)
    assert rows.dtype == np.float32
    assert rows.flags.c_contiguous
    assert np.array_equal(rows, fixture_pack.rows)
    assert (file.stat().st_size - rows.nbytes) % 64 == 0
    assert np.load(file, mmap_mode="r").offset % 64 == 0
    assert isinstance(fixture_pack.rows, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        fixture_pack.rows[0, 0] = 1


def test_bars_are_a_standard_arrow_file(fixture_pack: Pack) -> None:
    assert fixture_pack.path is not None
    with pa.OSFile(str(fixture_pack.path / "segment-0" / "bars.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.column_names == ["symbol", "time", "open", "high", "low", "close", "volume"]
    assert table["time"].type == pa.timestamp("ns", "UTC")
    assert {table[name].type for name in table.column_names[2:]} == {pa.float64()}
    assert table["symbol"].to_pylist() == ["A"] * 7 + ["B"] * 3 + ["C"]
    with pa.OSFile(str(fixture_pack.path / "segment-0" / "symbols.arrow")) as file:
        symbols = pa.ipc.open_file(file).read_all()
    assert symbols.to_pydict() == {"symbol": ["A", "B", "C"], "first_row": [0, 7, 10], "count": [7, 3, 1]}


def test_pandas_reads_the_bars(fixture_pack: Pack) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_feather(fixture_pack.path / "segment-0" / "bars.arrow")
    assert frame["close"].tolist() == fixture_pack.column("close").tolist()
    assert str(frame["time"].iloc[0]) == "2024-01-01 00:00:00+00:00"
    assert frame["symbol"].iloc[-1] == "C"


def test_the_manifest_says_what_was_packed(fixture_pack: Pack) -> None:
    assert fixture_pack.path is not None
    raw = json.loads((fixture_pack.path / "manifest.json").read_text())
    assert raw["format_version"] == 2
    assert raw["interval"] == "1min"
    assert raw["span"] == ["2024-01-01T00:00:00.000000000Z", "2024-01-01T00:06:00.000000000Z"]
    assert (raw["n_rows"], raw["n_symbols"]) == (11, 3)
    roles = {column["name"]: column["role"] for column in raw["columns"]}
    assert roles == {"open": "price", "high": "price", "low": "price", "close": "price", "volume": "volume"}


def test_bars_become_available_at_their_close(fixture_pack: Pack) -> None:
    rows = np.array([0, 9])
    assert fixture_pack.available_at(rows).tolist() == [START + MINUTE, START + 6 * MINUTE]


class TestFingerprint:
    STEPS = {"A": [0, 1, 2, 5], "B": [0, 1, 2], "C": [7, 8]}  # noqa: RUF012

    def of(self, table: pa.Table) -> str:
        return pack_in_memory(table, ONE_MINUTE).fingerprint

    def test_is_of_the_bars_alone(self, tmp_path: Path) -> None:
        table = bar_table(self.STEPS)
        expected = self.of(table)
        assert self.of(table.take([8, 3, 0, 7, 1, 5, 2, 6, 4])) == expected
        (tmp_path / "one.csv").write_text(csv_text(table))
        (tmp_path / "a.csv").write_text(csv_text(table.slice(0, 2)))
        (tmp_path / "b.csv").write_text(csv_text(table.slice(2, 6)))
        pq.write_table(table.slice(8), tmp_path / "c.parquet")
        one = pack(tmp_path / "one.csv", read=ONE_MINUTE)
        several = pack(
            [tmp_path / "c.parquet", tmp_path / "b.csv", tmp_path / "a.csv"], tmp_path / "several", read=ONE_MINUTE
        )
        assert one.fingerprint == expected
        assert several.fingerprint == expected
        assert open_pack(tmp_path / "several").fingerprint == expected

    def test_missing_values_are_one_value(self) -> None:
        nan = float("nan")
        odd_nan = float(np.array(0xFFF8_0000_0000_0123, np.uint64).view(np.float64))
        extra = {"vwap": [1.0, None, *[3.0] * 7]}
        assert self.of(bar_table(self.STEPS, **extra)) == self.of(
            bar_table(self.STEPS, vwap=np.array([1.0, odd_nan, *[3.0] * 7]))
        )
        assert self.of(bar_table(self.STEPS, **extra)) == self.of(bar_table(self.STEPS, vwap=[1.0, nan, *[3.0] * 7]))

    @pytest.mark.parametrize("column", ["open", "high", "low", "close", "volume"])
    @pytest.mark.parametrize("row", [0, 4, 8])
    def test_tells_one_ulp(self, column: str, row: int) -> None:
        table = bar_table(self.STEPS)
        values = table[column].to_numpy().copy()
        values[row] = np.nextafter(values[row], np.inf)
        assert self.of(bar_table(self.STEPS, **{column: values})) != self.of(table)

    def test_tells_names_and_times(self) -> None:
        expected = self.of(bar_table(self.STEPS))
        renamed = {"A": self.STEPS["A"], "B": self.STEPS["B"], "Cc": self.STEPS["C"]}
        moved = {**self.STEPS, "B": [0, 1, 3]}
        shorter = {**self.STEPS, "B": [0, 1]}
        others = [self.of(bar_table(steps)) for steps in (renamed, moved, shorter)]
        others.append(self.of(bar_table(self.STEPS, start=START + 1)))
        others.append(
            self.of(bar_table(self.STEPS).rename_columns(["symbol", "time", *["open", "high", "low", "close", "vwap"]]))
        )
        assert len({expected, *others}) == 6

    def test_tells_where_a_symbol_ends(self) -> None:
        values = dict.fromkeys(("open", "high", "low", "close", "volume"), np.ones(4))
        assert self.of(bar_table({"A": [0, 1, 2], "B": [3]}, **values)) != self.of(
            bar_table({"A": [0, 1], "B": [2, 3]}, **values)
        )


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bars.csv", "bars.pack"),
        ("bars.csv.gz", "bars.pack"),
        ("BARS.CSV", "BARS.pack"),
        ("BRK.B.csv", "BRK.B.pack"),
        ("2024.01.parquet", "2024.01.pack"),
        ("bars", "bars.pack"),
    ],
)
def test_the_default_target_lies_beside_the_input(tmp_path: Path, source: str, target: str) -> None:
    import gzip

    text = csv_text(bar_table({"A": [0, 1, 2]})).encode()
    file = tmp_path / source
    if source == "bars":
        file.mkdir()
        (file / "a.csv").write_bytes(text)
    elif source.endswith(".parquet"):
        pq.write_table(bar_table({"A": [0, 1, 2]}), file)
    else:
        file.write_bytes(gzip.compress(text) if source.endswith(".gz") else text)
    assert pack(file).path == tmp_path / target
    assert pack(str(file), overwrite=True).path == tmp_path / target


def test_input_without_a_name_needs_a_target(tmp_path: Path) -> None:
    table = bar_table({"A": [0, 1]})
    for source in (table, [tmp_path / "a.csv", tmp_path / "b.csv"], str(tmp_path / "*.csv"), "s3://bucket/a.csv"):
        with pytest.raises(PackError, match="-o DIR"):
            pack(source)


def test_missing_parents_are_made(tmp_path: Path) -> None:
    assert pack(bar_table({"A": [0, 1]}), tmp_path / "deep" / "er" / "x").path == tmp_path / "deep" / "er" / "x"


@pytest.mark.parametrize("text", ["", "time,symbol,open,high,low,close\n", "\n\n"])
def test_input_without_bars_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bars.csv").write_text(text)
    with pytest.raises(BarsError):
        pack(tmp_path / "bars.csv")
    assert [entry.name for entry in tmp_path.iterdir()] == ["bars.csv"]


def test_input_of_dropped_rows_is_refused_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "bars.csv").write_text("time,open,high,low,close\n2024-01-01T00:00:00Z,,,,\n2024-01-01T00:01:00Z,,,,\n")
    with pytest.raises(BarsError, match=r"2 rows dropped: null price|no price|null"):
        pack(tmp_path / "bars.csv", read=ReadOptions(symbol="A", interval="1min"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["bars.csv"]


@pytest.mark.parametrize("column", ["high", "volume"])
def test_values_beyond_float32_are_refused(tmp_path: Path, column: str) -> None:
    values = np.array([1.0, 1e39, 1.0])
    table = bar_table({"A": [0, 1, 2]}, **{column: values})
    with pytest.raises(BarsError, match=rf"column '{column}'.*3\.4e38"):
        pack(table, tmp_path / "x.pack")
    with pytest.raises(BarsError, match=f"'{column}'"):
        pack_in_memory(table)
    assert list(tmp_path.iterdir()) == []


def test_float32_limits_are_kept(tmp_path: Path) -> None:
    high = np.array([FLOAT32_MAX, -FLOAT32_MAX, 1e-45])
    found = pack(bar_table({"A": [0, 1, 2]}, high=high), tmp_path / "x.pack")
    assert np.array_equal(found.rows[:, 1], high.astype(np.float32))


def test_wrong_options_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="interval"):
        pack(tmp_path / "nothing.csv", read=ReadOptions(interval="soon"))
