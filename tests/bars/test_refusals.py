"""What is refused: file, line, column, value and remedy are named, and nothing else than BarsError comes out."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bars.conftest import HEADER, ROWS, ReadText, lines, one_symbol

from stager.bars.read import ReadOptions, read
from stager.errors import BarsError, ConfigError

GOOD = lines(*ROWS)
PACKED = gzip.compress(GOOD.encode() * 50)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"\n \n\t\n", "empty", id="blank"),
        pytest.param(b"<!DOCTYPE html>\n<p>Too many requests</p>", "HTML", id="html"),
        pytest.param(b"  <html><body>,</body></html>", "HTML", id="html without doctype"),
        pytest.param(b'{"error": "no, not today"}', "JSON", id="json object"),
        pytest.param(b"[[1,2,3,4,5,6]]", "no known format", id="json array"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull", id="lfs"),
        pytest.param(PACKED[:-1], "truncated", id="gzip without its last byte"),
        pytest.param(PACKED[:-8], "truncated", id="gzip without its check sum"),
        pytest.param(PACKED[:20], "truncated", id="gzip cut early"),
        pytest.param(PACKED[:-8] + bytes(8), "damaged", id="gzip with a wrong check sum"),
        pytest.param(pa.compress(GOOD.encode() * 50, "zstd", asbytes=True)[:-3], "truncated", id="zstd"),
        pytest.param(b"\x7fELF\0\0\0\x01" + bytes(range(256)) * 4, "NUL|UTF-8", id="binary"),
        pytest.param(GOOD.encode("utf-16-le"), "UTF-16", id="utf-16 without its mark"),
        pytest.param(GOOD.replace("time", "zeît").encode("latin-1"), "UTF-8", id="latin-1 header"),
        pytest.param(GOOD.encode() + bytes(500), "not written to its end", id="NUL bytes at the end"),
        pytest.param(b"PK\x03\x04" + bytes(100), "zip", id="zip"),
        pytest.param(b"ARROW1\0\0" + bytes(100), "Feather", id="feather"),
        pytest.param(b"PAR1" + bytes(100) + b"PAR1", "damaged", id="parquet footer"),
        pytest.param(b"PAR1", "damaged", id="parquet begin"),
        pytest.param(b"no delimiter here\n1\n", "--delimiter", id="no delimiter"),
        pytest.param(lines(*ROWS[1:], header=ROWS[0]).encode(), "not a header", id="headerless"),
        pytest.param(b"1704067200,1,2,1,2,5\n1704067260,1,2,1,2,5\n", "not a header", id="headerless numbers"),
        pytest.param(lines(*ROWS, header="time,symbol,open,high,low,open,volume").encode(), "2 times", id="twice"),
        pytest.param(lines(*ROWS, header="time,symbol,open,high,low,Open,volume").encode(), "both", id="two opens"),
        pytest.param(lines(*ROWS, header="time,date,open,high,low,close,volume").encode(), "time=NAME", id="two times"),
        pytest.param(lines(*ROWS, header="time,symbol,open,high,low,last,volume").encode(), "close=NAME", id="missing"),
        pytest.param(lines(*ROWS, header="time,symbol,o,h,l,last,volume").encode(), "open=NAME", id="letters"),
        pytest.param(b"x" * 300_000 + b",y\n", "longer", id="endless line"),
    ],
)
def test_a_file_that_holds_no_bars(read_text: ReadText, content: bytes, words: str) -> None:
    with pytest.raises(BarsError, match=words) as caught:
        read_text(content)
    assert "bars.csv" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [
        ("2024-05-06T13:34:00Z,A,1,2,\x1c1,2,3", "low", "is no number"),
        ("2024-05-06T13:34:00Z,A,1,2,x1,2,3", "low", "'x1' is no number"),
        ("2024-05-06T13:34:00Z,A,1,2,1,2,12k", "volume", "'12k' is no number"),
        ('2024-05-06T13:34:00Z,A,1,2,1,2,"12,000"', "volume", "'12,000' is no number"),
        ("2024-05-06T13:34:00Z,A,1,2,1,2", None, "6 fields, and the header has 7"),
        ("2024-05-06T13:34:00Z,A,1,2,1,2,3,4", None, "8 fields, and the header has 7"),
        ('2024-05-06T13:34:00Z,"A,1,2,1,2,3', None, "not closed"),
        ("2024-05-06T13:34:00Z,,1,2,1,2,3", "symbol", "symbol is missing"),
        (",A,1,2,1,2,3", "time", "time is missing"),
        ("06.05.2024 13:34,A,1,2,1,2,3", "time", "'06.05.2024 13:34'.*ISO 8601"),
        ("2024-05-06T13:34:00,A,1,2,1,2,3", "time", "with and without a zone"),
        ("2024-02-30T13:34:00Z,A,1,2,1,2,3", "time", "'2024-02-30T13:34:00Z' is no time that exists"),
        ("1715000000,A,1,2,1,2,3", "time", "two forms"),
        ("1979-05-06T13:34:00Z,A,1,2,1,2,3", "time", "1979-05-06.*--allow-years"),
        ("2300-05-06T13:34:00Z,A,1,2,1,2,3", "time", "2300-05-06.*int64 nanoseconds"),
    ],
)
@pytest.mark.parametrize("n_before", [0, 2, 300], ids=["first", "early", "late"])
@pytest.mark.parametrize("packing", ["plain", "gzip"])
def test_a_wrong_cell(
    read_text: ReadText, row: str, column: str | None, words: str, n_before: int, packing: str
) -> None:
    good = [f"2024-05-06T{i // 60:02}:{i % 60:02}:00Z,A,1,2,1,2,3" for i in range(n_before + 3)]
    # The blank line counts as a line, and holds no row.
    text = lines(*good[:n_before], "", row, *good[n_before:])
    with pytest.raises(BarsError, match=words) as caught:
        read_text(gzip.compress(text.encode()) if packing == "gzip" else text)
    if not (n_before == 0 and ("with and without" in words or "two forms" in words)):
        assert caught.value.line == n_before + 3
    assert caught.value.column == column
    assert str(caught.value.path).endswith("bars.csv")


def test_wrong_utf8_names_its_line(read_text: ReadText) -> None:
    rows = [f"2024-05-06T{i // 60:02}:{i % 60:02}:00Z,Ab,1,2,1,2,3" for i in range(600)]
    early = lines(*rows).encode().replace(b"00:05:00Z,Ab", b"00:05:00Z,\xc4b")
    late = (lines(*rows * 20)).encode()
    late = late[:-40] + late[-40:].replace(b",Ab,", b",\xc4b,")
    for text, line in ((early, 7), (late, 12_001)):
        with pytest.raises(BarsError, match="UTF-8") as caught:
            read_text(text)
        assert caught.value.line == line


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "sub.csv").mkdir()
    (tmp_path / "notes.md").write_text("nothing")
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    for source, words in (
        (tmp_path / "none.csv", "no such file"),
        (tmp_path / "*.csv.gz", "no file matches"),
        (tmp_path, "no bar files"),
        (pipe, "no regular file"),
        ((tmp_path / "none.csv").as_uri(), "no such file"),
        (tmp_path.as_uri(), "no bar files"),
        ("nonsense://host/x.csv", "nonsense://.*(pip install|use s3://)"),
        ("", "no path"),
        ([], "no input"),
        (42, "give a path"),
        (b"bars.csv", "give a path"),
        ([tmp_path / "none.csv", "other"], "no such file"),
    ):
        if source == tmp_path:
            pipe.unlink()
        with pytest.raises(BarsError, match=words):
            read(source)  # type: ignore[arg-type]
        if source == tmp_path:
            os.mkfifo(pipe)


def test_text_that_is_named_parquet(read_text: ReadText) -> None:
    with pytest.raises(BarsError, match="named Parquet"):
        read_text(GOOD, name="bars.parquet")


def test_symbols_must_be_told_apart(tmp_path: Path, read_text: ReadText) -> None:
    text = one_symbol("2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z")
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv").write_text(text)
    with pytest.raises(BarsError, match="--symbol"):
        read([tmp_path / "a.csv", tmp_path / "b.csv"])
    with pytest.raises(BarsError, match="--symbol"):
        read(read_text(text).table.drop_columns("symbol"))
    with pytest.raises(BarsError, match="'symbol' holds symbols"):
        read_text(GOOD, symbol="A")


def test_a_column_that_was_told_must_be_there(read_text: ReadText) -> None:
    with pytest.raises(BarsError, match=r"'last' for close.*'open'"):
        read_text(GOOD, columns={"close": "last"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": {"price": "x"}}, "no role"),
        ({"columns": {"open": "x", "close": "x"}}, "two roles"),
        ({"columns": {"symbol": "x"}, "symbol": "A"}, "leave one out"),
        ({"zone": "Mars/Olympus"}, "zone"),
        ({"zone": "+25:00"}, "zone"),
        ({"interval": "1 fortnight"}, "interval"),
        ({"interval": "0min"}, "interval"),
        ({"symbol": " "}, "symbol"),
        ({"delimiter": ",,"}, "delimiter"),
        ({"delimiter": "\n"}, "delimiter"),
        ({"allow_years": (2000, 1990)}, "allow_years"),
        ({"allow_years": (1000, 1990)}, "allow_years"),
        ({"label": "middle"}, "label"),
        ({"encoding": "klingon"}, "encoding"),
        ({"encoding": "base64"}, "encoding"),
        ({"date_order": "ymd"}, "date_order"),
        ({"decimal": ",", "thousands": ".,"}, "both"),
        ({"field": "time"}, "field"),
        ({"nan": "keep"}, "nan"),
        ({"adjustment": "some"}, "adjustment"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReadOptions(**options)  # type: ignore[arg-type]


def test_tables_that_hold_no_bars() -> None:
    time = pa.array([0, 60], pa.timestamp("s", "UTC"))
    price = pa.array([1.0, 2.0])
    names = ["time", "symbol", "open", "high", "low", "close"]

    def table(**columns: pa.Array) -> pa.Table:
        given = dict.fromkeys(names, price) | {"time": pa.array([1_700_000_000, 1_700_000_060])}
        return pa.table(given | {"symbol": pa.array(["A", "A"])} | columns)

    assert read(table()).table.num_rows == 2
    for wrong, words in (
        (table(symbol=price), "type double"),
        (table(symbol=pa.array([b"\xff", b"A"])), "UTF-8"),
        (table(symbol=pa.nulls(2)), "symbol is missing"),
        (table(open=pa.array([True, False])), "needs numbers"),
        (table(open=pa.array([[1], [2]])), "needs numbers"),
        (table(open=pa.array(["1", "x"])), "'x' is no number"),
        (table(open=pa.array(["1", "\uff11"])), "is no number"),
        (table(time=price), "1 is neither seconds"),
        (table(time=pa.array([1.5, 2.5])), "no time"),
        (table(time=pa.array([1, 2], pa.time32("s"))), "no time"),
        (table(time=time), "1970-01-01.*--allow-years"),
        (table(time=pa.array([2**62, 0], pa.timestamp("s", "UTC"))), "--allow-years"),
        (table(time=pa.array([2**31 - 1, 0], pa.date32())), "--allow-years"),
        (table(time=pa.array([2**64 - 1, 5], pa.uint64())), "int64"),
        (table(time=pa.array([None, 1_700_000_000])), "time is missing"),
        (pa.table({"a": price}), "no column for time"),
        (pa.table([price, price], names=["a", "a"]), "2 times"),
    ):
        with pytest.raises(BarsError, match=words) as caught:
            read(wrong)
        assert str(caught.value).startswith("table")


def test_parquet_without_bars(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(BarsError, match="'a'"):
        read(tmp_path / "a.parquet")


def test_header_names_are_not_mixed_up(read_text: ReadText) -> None:
    assert HEADER in GOOD
    with pytest.raises(BarsError, match="could both be the symbol"):
        read_text(lines(*(row + ",X" for row in ROWS), header=HEADER + ",ticker"))


def test_rows_of_several_symbols_do_not_become_one(tmp_path: Path) -> None:
    bars = one_symbol("2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z")
    folders = {name: tmp_path / "parts" / f"symbol={name}" for name in ("AAPL", "MSFT")}
    for folder in folders.values():
        folder.mkdir(parents=True)
        (folder / "a.csv").write_text(bars)
    assert read(tmp_path / "parts").symbols == ("AAPL", "MSFT")
    with pytest.raises(BarsError, match=r"'MSFT'.*'AAPL', so they are not all of the symbol 'X'"):
        read(tmp_path / "parts", ReadOptions(symbol="X"))
    assert read(folders["AAPL"], ReadOptions(symbol="X")).symbols == ("X",)
    # The folder and the column contradict each other.
    (folders["AAPL"] / "a.csv").write_text(lines(*(row.replace(",A,", ",AAPL,") for row in ROWS)))
    with pytest.raises(BarsError, match=r"a\.csv:2, column 'symbol': the symbol is 'B', and the folder says 'AAPL'"):
        read(tmp_path / "parts")
    assert read(folders["AAPL"] / "a.csv", ReadOptions(columns={"symbol": "symbol"})).symbols == ("AAPL", "B")
    # Beside the folders lies a file of nobody.
    (folders["AAPL"] / "a.csv").write_text(bars)
    (tmp_path / "parts" / "b.csv").write_text(bars)
    assert any(
        "beside the folder lies 'b.csv', which is not read" in text for text in read(tmp_path / "parts").warnings
    )
    nameless = tmp_path / "symbol=__HIVE_DEFAULT_PARTITION__"
    nameless.mkdir()
    (nameless / "a.csv").write_text(bars)
    with pytest.raises(BarsError, match="there is no symbol"):
        read(nameless)
