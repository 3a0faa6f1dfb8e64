"""Damaged files end in bars or in a BarsError, and in nothing else."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bars.conftest import lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stager.bars.read import ReadOptions, read
from stager.errors import BarsError

TEXT = lines(
    *(f"2024-05-06T13:{m:02}:00Z,{s},{m}.25,{m}.5,{m}.125,{m}.75,{m},x{m}" for m in range(40) for s in ("AA", '"B,B"')),
    header="time,symbol,open,high,low,close,volume,note",
).encode()


def parquet(**options: object) -> bytes:
    table = pa.table(
        {
            "symbol": pa.array(["AA", "BB"] * 40),
            "time": pa.array([1714999800 + 60 * (i // 2) for i in range(80)], pa.timestamp("s", "UTC")),
            **{name: pa.array([float(i) for i in range(80)]) for name in ("open", "high", "low", "close")},
            "volume": pa.array(list(range(80))),
            "note": pa.array([f"x{i}" for i in range(80)]),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=30, **options)  # type: ignore[arg-type]
    return sink.getvalue().to_pybytes()


FILES = {
    "csv": TEXT,
    "gzip": gzip.compress(TEXT),
    "zstd": pa.compress(TEXT, "zstd", asbytes=True),
    "parquet": parquet(),
    "plain parquet": parquet(compression="none", use_dictionary=False),
}


@pytest.mark.parametrize("name", FILES)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    path = tmp_path / "damaged"
    path.write_bytes(content[:cut])
    refused = None
    try:
        bars = read(path, ReadOptions(nan=data.draw(st.sampled_from(["error", "null"]))))
    except BarsError as error:
        refused = error
    if refused is not None:
        assert refused.path == str(path)
        assert len(str(refused).splitlines()) == 1
    else:
        bars.table.validate(full=True)
        assert sum(column.null_count for column in bars.table.columns) == 0
        assert bars.counts.sum() == bars.table.num_rows


@pytest.mark.parametrize("name", ["gzip", "zstd", "parquet"])
def test_every_cut_of_a_packed_file_is_refused(tmp_path: Path, name: str) -> None:
    content = FILES[name]
    assert read_bytes(tmp_path, content) == 80
    for length in [*range(0, len(content), 13), len(content) - 1]:
        with pytest.raises(BarsError):
            read_bytes(tmp_path, content[:length])


def read_bytes(folder: Path, content: bytes) -> int:
    (folder / "cut").write_bytes(content)
    return read(folder / "cut").table.num_rows


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
)
def test_rubbish(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rubbish.csv"
    path.write_bytes(content)
    with pytest.raises(BarsError):
        read(path)
