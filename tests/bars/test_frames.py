"""Bars that are in memory already: tables, and the data frames of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bars_fixtures import bar_table

from stager import Stager, append, pack, read
from stager.bars.inspection import check
from stager.bars.read import ReadOptions
from stager.errors import BarsError, PackError

TABLE = bar_table({"B": range(5), "A": range(9)})


class Frame:
    """What has Arrow's stream interface and is nothing else, as data frames are to us."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def pandas_frame() -> Any:
    pytest.importorskip("pandas")
    return TABLE.to_pandas().set_index("time")


def polars_frame() -> Any:
    return pytest.importorskip("polars").from_arrow(TABLE)


FRAMES = {
    "any": lambda: Frame(TABLE),
    "batch": lambda: TABLE.combine_chunks().to_batches()[0],
    "reader": TABLE.to_reader,
    "pandas": pandas_frame,
    "polars": polars_frame,
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_is_its_table(kind: str, tmp_path: Path) -> None:
    right = pack(TABLE, tmp_path / "right.pack").fingerprint
    assert read(FRAMES[kind]()).symbols == ("A", "B")
    assert pack(FRAMES[kind](), tmp_path / "x.pack").fingerprint == right
    with Stager(FRAMES[kind](), window=3, batch_size=4, device="cpu") as one:
        assert one.plan.n_samples == 3 + 7
        assert one.resident.pack.fingerprint == right
    assert check(FRAMES[kind]()).findings


def test_a_frame_is_appended(tmp_path: Path) -> None:
    pack(TABLE, tmp_path / "x.pack")
    assert append(tmp_path / "x.pack", Frame(bar_table({"A": [9]}))).n_rows == TABLE.num_rows + 1


def test_a_frame_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="say where to with -o DIR"):
        pack(Frame(TABLE))
    naive = TABLE.set_column(1, "time", TABLE["time"].cast(pa.timestamp("ns")))
    with pytest.raises(BarsError, match=r"time 2024-01-01 00:0.* has no zone"):
        read(Frame(naive))
    assert read(Frame(naive), ReadOptions(zone="UTC")).symbols == ("A", "B")
    assert not list(tmp_path.iterdir())


class Broken:
    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        raise ValueError("columns of unlike length")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Broken(), "the Broken can't be taken over by Arrow: columns of unlike length"),
        ({"close": [1.0]}, r"the input is \{'close': \[1.0\]\}; give a path.* a pyarrow.Table, or a data frame"),
        (None, "the input is None; give a path"),
        (5, "the input is 5"),
        ([5], "the input is 5"),
        (b"bars.csv", "the input is b'bars.csv'"),
    ],
)
def test_what_is_no_input(source: Any, words: str) -> None:
    for use in (read, check, lambda given: Stager(given, window=3, batch_size=2, device="cpu")):
        with pytest.raises(BarsError, match=words):
            use(source)
