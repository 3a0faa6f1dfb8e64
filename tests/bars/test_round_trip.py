"""Any bars, written in any supported way and any order, come back equal bit for bit."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stager.bars.read import ReadOptions, read

PRICES = ("open", "high", "low", "close")
START = int(np.datetime64("1980-01-01", "ns").astype(np.int64))
END = int(np.datetime64("2025-01-01", "ns").astype(np.int64))

# Anything but what a CSV line can't hold, and blanks around it.
names = (
    st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=8)
    .map(str.strip)
    .filter(bool)
)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    symbols = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    keys = draw(
        st.lists(st.tuples(st.sampled_from(symbols), st.integers(START, END - 1)), min_size=1, max_size=30, unique=True)
    )
    columns = {name: draw(st.lists(numbers, min_size=len(keys), max_size=len(keys))) for name in PRICES}
    maybe = st.one_of(st.none(), numbers)
    columns |= {
        name: [draw(numbers), *draw(st.lists(maybe, min_size=len(keys) - 1, max_size=len(keys) - 1))]
        for name in draw(st.sampled_from([(), ("volume",), ("volume", "Open Interest"), ("x y", "VWAP")]))
    }
    return pa.table(
        {
            "symbol": [symbol for symbol, _ in keys],
            "time": pa.array([time for _, time in keys], pa.timestamp("ns", "UTC")),
            **{name: pa.array(values, pa.float64()) for name, values in columns.items()},
        }
    )


def csv(table: pa.Table) -> bytes:
    """Text with shortest round-trip floats, every second symbol quoted where it need not be."""
    rows = [",".join(table.column_names)]
    # Without pandas there is no Python object for nanoseconds.
    times = table["time"].cast(pa.timestamp("ns")).cast(pa.string()).to_pylist()
    for i, row in enumerate(table.drop_columns("time").to_pylist()):
        symbol = row["symbol"]
        if i % 2 or '"' in symbol or "," in symbol:
            symbol = '"' + symbol.replace('"', '""') + '"'
        # A time zone may be written in any way.
        time = times[i] + ("Z", "+00:00")[i % 2]
        cells = ["" if value is None else repr(value) for value in list(row.values())[1:]]
        rows.append(",".join((symbol, time, *cells)))
    return "\n".join(rows).encode() + b"\n"


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables(), random=st.randoms(use_true_random=False))
def test_bars_come_back(tmp_path: Path, table: pa.Table, random: object) -> None:
    order = list(range(table.num_rows))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = table.take(order)
    text = csv(shuffled)
    (tmp_path / "bars.csv").write_bytes(text)
    (tmp_path / "bars.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "bars.csv.zst").write_bytes(pa.compress(text, "zstd", asbytes=True))
    pq.write_table(shuffled, tmp_path / "bars.parquet", row_group_size=7)
    (tmp_path / "half1.csv").write_bytes(csv(shuffled.slice(0, len(order) // 2)))
    (tmp_path / "half2.csv").write_bytes(csv(shuffled.slice(len(order) // 2)))
    rows = sorted(range(table.num_rows), key=lambda i: (table["symbol"][i].as_py(), table["time"][i].value))
    expected = table.take(rows)
    halves = [tmp_path / "half1.csv", tmp_path / "half2.csv"]
    for source in (
        tmp_path / "bars.csv",
        tmp_path / "bars.csv.gz",
        tmp_path / "bars.csv.zst",
        tmp_path / "bars.parquet",
        shuffled,
        halves,
    ):
        bars = read(source, ReadOptions(interval="1min", label="open"))
        assert bars.symbols == tuple(sorted(set(expected["symbol"].to_pylist())))
        assert bars.table["symbol"].to_pylist() == expected["symbol"].to_pylist()
        assert bars.table["time"].combine_chunks().equals(expected["time"].combine_chunks())
        for name in bars.table.column_names[2:]:
            found, wanted = bars.table[name].to_numpy(), expected[name].to_numpy()
            given_ = ~np.isnan(wanted)
            assert np.array_equal(found[given_].view(np.int64), wanted[given_].view(np.int64))
            assert np.isnan(found[~given_]).all()
        assert sum(bars.dropped.values()) == 0


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_every_delimiter(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "bars.csv"
    path.write_text(
        "time,open,high,low,close\n2024-05-06T13:30:00Z,0.1,3e-5,-0.0,1e308\n2024-05-06T13:31:00Z,1,2,3,4\n".replace(
            ",", delimiter
        )
    )
    assert read(path).table["open"].to_pylist() == [0.1, 1.0]
    assert read(path).table["close"].to_pylist() == [1e308, 4.0]
