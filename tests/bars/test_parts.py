"""Files that are larger than the memory for one input: read in parts, or refused before memory runs out."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from bars_fixtures import bar_table, csv_text
from read_parts import Rows, read_in_parts

from stager.bars import decode_arrow, decode_csv, text_parts
from stager.bars.read import ReadOptions, read
from stager.errors import BarsError

ROWS = bar_table({"A": range(40), "B": range(40)})
TEXT = csv_text(ROWS)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_csv, "_LEAST_PART_NBYTES", 400)
    monkeypatch.setattr(text_parts, "_LINE_NBYTES", 16)
    monkeypatch.setattr(decode_arrow, "_MOST_PART_ROWS", 9)


def same_as_whole(file: Path, **options: object) -> Rows:
    """What is read in parts, which is what is read as a whole."""
    found = read_in_parts(file, ReadOptions(**options))  # type: ignore[arg-type]
    assert found.n_parts > 2
    bars = read(file, ReadOptions(**options))  # type: ignore[arg-type]
    order = np.lexsort((found.times, found.symbols))
    assert np.array_equal(found.times[order], bars.arranged.times)
    assert [found.symbols[i] for i in order] == bars.table["symbol"].to_pylist()
    for name, values in found.columns.items():
        assert np.array_equal(values[order], bars.table[name].to_numpy(), equal_nan=True), name
    assert found.taken.n_rows == bars.inputs[0].n_rows
    assert set(found.taken.warnings) <= set(bars.warnings)
    return found


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("packed", [False, True])
def test_text(tmp_path: Path, end: str, packed: bool) -> None:
    file = tmp_path / "bars.csv"
    data = TEXT.replace("\n", end).encode()
    file.write_bytes(gzip.compress(data) if packed else data)
    same_as_whole(file)


@pytest.mark.parametrize("what", ["blank lines", "repeated headers", "comments", "a footer", "no last line end", "BOM"])
def test_lines_that_are_no_rows(tmp_path: Path, what: str) -> None:
    lines = TEXT.splitlines()
    if what == "blank lines":
        lines[20:20] = lines[60:60] = ["", "  "]
    elif what == "repeated headers":
        lines[50:50] = lines[3:3] = [lines[0]]
    elif what == "comments":
        lines[30:30] = ["# a remark"]
    elif what == "a footer":
        lines.append("Data as of 2024-01-02 by a vendor")
    file = tmp_path / "bars.csv"
    text = "\n".join(lines) + "\n" * (what != "no last line end")
    file.write_bytes(b"\xef\xbb\xbf" * (what == "BOM") + text.encode())
    found = same_as_whole(file)
    if what in ("a footer", "no last line end"):
        assert any("last line" in warning for warning in found.taken.warnings)


LATER = [line.replace("2024-01-01", "2024-01-02") for line in TEXT.splitlines()[1:]]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("cell", "message"), [("many", "'many' is no number"), ("nan", "the price is nan"), ("", None)]
)
def test_errors_name_the_line_of_the_file(tmp_path: Path, end: str, cell: str, message: str | None) -> None:
    lines = TEXT.splitlines() + LATER
    lines.insert(10, "")
    fields = lines[140].split(",")
    fields[2] = cell
    lines[140] = ",".join(fields)
    file = tmp_path / "bars.csv"
    file.write_bytes((end.join(lines) + end).encode())
    if message is None:
        assert read_in_parts(file, ReadOptions()).taken.n_dropped == 1
        return
    with pytest.raises(BarsError, match=message) as in_parts:
        read_in_parts(file, ReadOptions())
    with pytest.raises(BarsError, match=message) as whole:
        read(file)
    assert (in_parts.value.line, in_parts.value.column) == (whole.value.line, whole.value.column) == (141, "open")


def test_a_cut_row_is_named_too(tmp_path: Path) -> None:
    file = tmp_path / "bars.csv"
    lines = TEXT.splitlines()
    lines[66] = lines[66][:30]
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(BarsError, match="fields, and the header has") as caught:
        read_in_parts(file, ReadOptions())
    assert caught.value.line == 67


def test_a_sentence_is_a_footer_at_the_end_only(tmp_path: Path) -> None:
    file = tmp_path / "bars.csv"
    lines = TEXT.splitlines()
    for line in range(20, 60):
        file.write_text("\n".join([*lines[:line], "This is a sentence", *lines[line:]]) + "\n")
        with pytest.raises(BarsError, match="the row has 1 fields") as caught:
            read_in_parts(file, ReadOptions())
        assert caught.value.line == line + 1


def test_a_damaged_compressed_file(tmp_path: Path) -> None:
    file = tmp_path / "bars.csv.gz"
    file.write_bytes(gzip.compress(TEXT.encode())[:-200])
    with pytest.raises(BarsError, match="the gzip file is truncated or damaged"):
        read_in_parts(file, ReadOptions())


@pytest.mark.parametrize("index", [False, True])
def test_parquet(tmp_path: Path, index: bool) -> None:
    file = tmp_path / "bars.parquet"
    table = ROWS.append_column("odd", pa.array([None, 2**60] * 40, pa.int64()))
    pq.write_table(table, file, row_group_size=80 if index else 11)
    found = same_as_whole(file)
    assert found.taken.warnings == ["column 'odd' holds whole numbers of 2^53 and above, which float64 rounds"]


def test_a_row_of_parquet_is_named(tmp_path: Path) -> None:
    table = ROWS.set_column(4, "low", pa.array([1.0] * 71 + [float("inf")] + [1.0] * 8))
    pq.write_table(table, tmp_path / "bars.parquet")
    with pytest.raises(BarsError, match="the price is inf") as caught:
        read_in_parts(tmp_path / "bars.parquet", ReadOptions())
    assert caught.value.line == 72


def test_whole_numbers_tell_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "bars.csv"
    lines = ["time,symbol,open,high,low,close", *(f"{1_704_067_200 + 60 * i},A,1,1,1,1" for i in range(80))]
    file.write_text("\n".join(lines) + "\n")
    found = same_as_whole(file)
    assert found.taken.time.source == "whole numbers from 1704067200 to 1704071940"
    lines[70] = lines[70].replace(",A", "000,A")
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(BarsError, match="in one unit"):
        read_in_parts(file, ReadOptions())


def test_dates_first_and_clocks_later(tmp_path: Path) -> None:
    file = tmp_path / "bars.csv"
    days = [f"2024-01-{1 + i // 2:02} {'09:30' if i > 50 else '00:00'}:00,{'AB'[i % 2]},1,1,1,1" for i in range(60)]
    file.write_text("\n".join(["time,symbol,open,high,low,close", *days]) + "\n")
    same_as_whole(file, zone="America/New_York")
    with pytest.raises(BarsError, match="has no zone"):
        read_in_parts(file, ReadOptions())


def test_a_wide_file(tmp_path: Path) -> None:
    file = tmp_path / "bars.csv"
    names = [f"{symbol}:{field}" for symbol in "AB" for field in ("open", "high", "low", "close")]
    rows = [f"2024-01-01T{i // 60:02}:{i % 60:02}:00Z," + ",".join(str(i + j) for j in range(8)) for i in range(90)]
    file.write_text("\n".join(["time," + ",".join(names), *rows]) + "\n")
    same_as_whole(file)


WHOLE = ("a.json", "a.feather", "a.zip", "a.txt", "marked.csv", "times.csv", "t.parquet")


def _files(folder: Path) -> dict[str, Path]:
    files = {name: folder / name for name in WHOLE}
    rows = ROWS.to_pylist()
    text = TEXT.replace("2024-01-01T", "01.01.2024 ").replace(":00.000000000Z", ":00")
    files["a.json"].write_text(json.dumps([row | {"time": str(row["time"])} for row in rows], default=str))
    pa.feather.write_feather(ROWS, str(files["a.feather"]))
    with zipfile.ZipFile(files["a.zip"], "w") as archive:
        archive.writestr("bars.csv", TEXT)
    files["a.txt"].write_bytes(TEXT.encode("utf-16"))
    files["times.csv"].write_text(text)
    files["marked.csv"].write_text(TEXT.replace(",", ";").replace(".25;", ",25;").replace(".75;", ",75;"))
    pq.write_table(ROWS.set_column(1, "time", pa.array(["01.01.2024 00:00"] * 80)), files["t.parquet"])
    return files


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_read_in_parts_says_so(tmp_path: Path, name: str) -> None:
    file = _files(tmp_path)[name]
    with pytest.raises(BarsError, match=r"reading it takes about .* of memory, and .* or give more --memory") as caught:
        read_in_parts(file, ReadOptions())
    assert caught.value.path == str(file)


@pytest.mark.parametrize("cell", ["many", '"1,000,039.75"'])
@pytest.mark.parametrize("line", [30, 150])
@pytest.mark.parametrize("column", ["open", "extra"])
def test_cells_that_are_no_plain_numbers_are_named(tmp_path: Path, cell: str, line: int, column: str) -> None:
    file = tmp_path / "bars.csv"
    lines = [each + (",extra" if number == 0 else ",1") for number, each in enumerate(TEXT.splitlines() + LATER)]
    cells = lines[line].split(",")
    cells[2 if column == "open" else -1] = cell
    lines[line] = ",".join(cells)
    file.write_text("\n".join(lines) + "\n")
    if (column, line) == ("extra", 30):
        # Seen beforehand, so it is left out, as of any file.
        assert any("holds text" in text for text in same_as_whole(file).taken.warnings)
        return
    with pytest.raises(BarsError, match=r"is no .*number.*--memory") as caught:
        read_in_parts(file, ReadOptions())
    assert (caught.value.line, caught.value.column) == (line + 1, column)
