"""What a user gets from files that are right: columns, cells, symbols, several inputs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from bars.conftest import HEADER, ROWS, ReadText, decided, instants, lines, one_symbol

from stager.bars.read import Bars, InputFile, ReadOptions, read
from stager.errors import BarsError


def same(one: Bars, other: Bars) -> bool:
    return one.table.equals(other.table) and one.symbols == other.symbols


def test_rows_come_sorted_by_symbol_and_time(read_text: ReadText) -> None:
    bars = read_text(lines(*ROWS))
    assert bars.symbols == ("A", "B")
    assert bars.first_rows.tolist() == [0, 3]
    assert bars.counts.tolist() == [3, 2]
    assert bars.first_rows.dtype == bars.counts.dtype == np.int64
    assert bars.table["symbol"].to_pylist() == ["A", "A", "A", "B", "B"]
    assert bars.table["close"].to_pylist() == [20.5, 21.0, 21.5, 10.5, 11.0]
    assert instants(bars)[:3] == ["2024-05-06T13:30:00", "2024-05-06T13:31:00", "2024-05-06T13:33:00"]
    assert (bars.interval.text, bars.timestamps, bars.adjustment) == ("1min", "utc", "unknown")
    assert bars.dropped == {"null price": 0, "duplicate": 0}
    assert bars.warnings == ()


def test_the_schema_is_the_promised_one(read_text: ReadText) -> None:
    header = "vwap,Close,symbol,HIGH,low,open,Date Time,n trades"
    bars = read_text(lines("1.5,2,A,3,1,2,2024-05-06 13:30Z,7", "1.6,2,A,3,1,2,2024-05-06 13:31Z,8", header=header))
    assert bars.table.schema == pa.schema(
        {
            "symbol": pa.dictionary(pa.int32(), pa.string()),
            "time": pa.timestamp("ns", "UTC"),
            **dict.fromkeys(("open", "high", "low", "close", "vwap", "n trades"), pa.float64()),
        }
    )
    assert all(column.num_chunks == 1 and column.null_count == 0 for column in bars.table.columns)
    bars.table.validate(full=True)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\ufeff" + lines(*ROWS), id="byte order mark"),
        pytest.param(lines(*ROWS, end="\r\n"), id="crlf"),
        pytest.param(lines(*ROWS, end="\r"), id="cr"),
        pytest.param(lines(*ROWS) + "\n\n  \n", id="trailing blank lines"),
        pytest.param(lines(ROWS[0], "", ROWS[1], "   ", *ROWS[2:]), id="blank lines inside"),
        pytest.param("\n\n" + lines(*ROWS), id="blank lines before"),
        pytest.param("\n".join('"' + row.replace(",", '","') + '"' for row in (HEADER, *ROWS)), id="quoted"),
        pytest.param(lines(*ROWS).replace(",", ";"), id="semicolon"),
        pytest.param(lines(*ROWS).replace(",", "\t"), id="tab"),
        pytest.param(lines(*ROWS).replace(",", "|"), id="bar"),
        pytest.param(lines(*ROWS).replace(",", ", "), id="blanks after commas"),
        pytest.param(lines(*ROWS).replace(",", " , "), id="blanks around commas"),
        pytest.param(lines(*ROWS, header=HEADER.upper()), id="upper case"),
        pytest.param(lines(*ROWS, header="Open_Time,Ticker,o,h,l,c,v"), id="letters"),
        pytest.param(lines(*ROWS, header="t,sym,o,h,l,c,v"), id="all letters"),
        pytest.param(lines(*ROWS, header="ts_event,code,Open,High,Low,Close,Volume"), id="synonyms"),
        pytest.param(lines(*ROWS, header="window_start,instrument,open,high,low,close,volume"), id="more synonyms"),
    ],
)
def test_forms_of_text_read_alike(read_text: ReadText, text: str) -> None:
    assert same(read_text(text), read_text(lines(*ROWS), name="plain.csv"))


def test_any_delimiter_can_be_told(read_text: ReadText) -> None:
    bars = read_text(lines(*ROWS).replace(",", "~"), delimiter="~")
    assert bars.table.num_rows == 5
    assert decided(bars)["delimiter"] == ("~", "as told")


def test_a_name_is_never_guessed(read_text: ReadText) -> None:
    header = "Date,Symbol,Open,High,Low,Close,Adj Close"
    bars = read_text(lines("2024-05-06,A,1,2,1,2,0.5", "2024-05-07,A,1,2,1,2,0.6", header=header))
    assert bars.table.column_names == ["symbol", "time", "open", "high", "low", "close", "Adj Close"]
    assert bars.table["close"].to_pylist() == [2.0, 2.0]
    assert decided(bars)["volume"][0] == "none"


def test_columns_can_be_told(read_text: ReadText) -> None:
    text = lines(*ROWS, header="when,who,first,High,Low,last,lots")
    names = {"time": "when", "symbol": "WHO", "open": "first", "close": "last", "volume": "lots"}
    assert same(read_text(text, columns=names), read_text(lines(*ROWS), name="plain.csv"))


def test_a_column_whose_role_went_to_another_is_left_out(read_text: ReadText) -> None:
    header = "Date,Open,High,Low,Close,Adj Close"
    text = lines("2024-05-06,1,2,1,2,0.5", "2024-05-07,1,2,1,2,0.6", header=header)
    bars = read_text(text, columns={"close": "Adj Close"})
    assert bars.table["close"].to_pylist() == [0.5, 0.6]
    assert "Close" not in bars.table.column_names
    assert any("'Close'" in text for text in bars.warnings)


def test_the_index_of_pandas_is_the_time(read_text: ReadText) -> None:
    bars = read_text(one_symbol("2024-05-06 13:30:00Z", "2024-05-06 13:31:00Z", header=",Open,High,Low,Close,Volume"))
    assert instants(bars) == ["2024-05-06T13:30:00", "2024-05-06T13:31:00"]
    header = ",time,open,high,low,close"
    bars = read_text(lines("0,2024-05-06 13:30Z,1,2,1,2", "1,2024-05-06 13:31Z,1,2,1,2", header=header))
    assert bars.table.column_names == ["symbol", "time", "open", "high", "low", "close"]
    assert any("no name" in text for text in bars.warnings)


def test_without_a_symbol_column_the_file_names_it(read_text: ReadText) -> None:
    text = one_symbol("2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z")
    bars = read_text(text, name="BRK.B.csv")
    assert bars.symbols == ("BRK.B",)
    assert decided(bars)["symbol"] == ("BRK.B", "the file's name")
    assert read_text(gzip.compress(text.encode()), name="6EH4.csv.gz").symbols == ("6EH4",)
    assert read_text(text, symbol="ES").symbols == ("ES",)


def test_symbols_stay_text(read_text: ReadText) -> None:
    names = ["000001", "07", "1E5", "NA", "NULL", "NaN", "None", "TRUE", "inf", "null", "Ä", "a b", "-"]
    rows = [f"2024-05-06T13:3{m}:00Z,{name},1,2,1,2,3" for m in (0, 1) for name in names]
    assert read_text(lines(*rows)).symbols == tuple(sorted(names))
    assert read_text(lines(*(row for row in rows if ",NA," in row))).symbols == ("NA",)


@pytest.mark.parametrize("word", ["", "null", "NULL", "None", "N/A", "NA", "#N/A", "-", " ", " -", '""'])
def test_a_missing_price_is_no_bar(read_text: ReadText, word: str) -> None:
    bars = read_text(lines(*ROWS, f"2024-05-06T13:34:00Z,A,1,2,{word},2,3"))
    assert bars.table.num_rows == 5
    assert bars.dropped == {"null price": 1, "duplicate": 0}
    assert [(one.n_rows, one.n_dropped) for one in bars.inputs] == [(6, 1)]


def test_a_row_of_delimiters_is_no_bar(read_text: ReadText) -> None:
    assert read_text(lines(*ROWS, ",,,,,,")).dropped["null price"] == 1


@pytest.mark.parametrize("word", ["", "null", "-", "nan", "NaN"])
def test_a_missing_volume_is_nan(read_text: ReadText, word: str) -> None:
    bars = read_text(lines(*ROWS, f"2024-05-06T13:34:00Z,A,1,2,1,2,{word}"))
    assert np.isnan(bars.table["volume"].to_numpy()[3])
    assert any("'volume'" in text and "1 bars" in text for text in bars.warnings)


@pytest.mark.parametrize("word", ["nan", "NaN", "inf", "-inf", "1e999"])
def test_a_price_that_is_no_number_is_an_error_unless_told(read_text: ReadText, word: str) -> None:
    text = lines(*ROWS[:2], f"2024-05-06T13:34:00Z,A,1,2,{word},2,3", *ROWS[2:])
    with pytest.raises(BarsError, match="--nan null") as caught:
        read_text(text)
    assert (caught.value.line, caught.value.column) == (4, "low")
    assert read_text(text, nan="null").dropped["null price"] == 1


def test_empty_and_text_columns_are_left_out_and_reported(read_text: ReadText) -> None:
    rows = [f"{row},NYSE,,x{i},{i}" for i, row in enumerate(ROWS)]
    bars = read_text(lines(*rows, header=HEADER + ",exchange,Adj Close,id,trades"))
    assert bars.table.column_names[7:] == ["trades"]
    for name in ("exchange", "Adj Close", "id"):
        assert any(repr(name) in text for text in bars.warnings), name


def test_a_column_that_turns_to_text_late_is_left_out(read_text: ReadText) -> None:
    rows = [f"2024-05-06T{h:02}:{m:02}:00Z,A,1,2,1,2,3,{h * m}" for h in range(20) for m in range(60)]
    bars = read_text(lines(*rows, "2024-05-06T21:00:00Z,A,1,2,1,2,3,late", header=HEADER + ",note"))
    assert "note" not in bars.table.column_names
    assert bars.table.num_rows == 1201
    assert any("'late'" in text for text in bars.warnings)


def test_a_column_without_any_volume_is_left_out(read_text: ReadText) -> None:
    bars = read_text(lines(*(row.rpartition(",")[0] + "," for row in ROWS)))
    assert "volume" not in bars.table.column_names
    assert any("'volume'" in text for text in bars.warnings)


def test_rounded_numbers_and_wrong_bars_are_reported(read_text: ReadText) -> None:
    bars = read_text(lines(*ROWS, f"2024-05-06T13:34:00Z,A,5,4,1,2,{2**53 + 1}"))
    assert any("2^53" in text for text in bars.warnings)
    assert any(text.startswith("1 of 6 bars") for text in bars.warnings)


def test_identical_rows_are_dropped_once(read_text: ReadText) -> None:
    bars = read_text(lines(*ROWS, ROWS[0], ROWS[2], ROWS[2]))
    assert same(bars, read_text(lines(*ROWS), name="plain.csv"))
    assert bars.dropped == {"null price": 0, "duplicate": 3}
    rows = [row.rpartition(",")[0] + "," for row in ROWS[:1] * 2] + list(ROWS[1:])
    assert read_text(lines(*rows)).dropped["duplicate"] == 1


def test_rows_that_differ_are_an_error(read_text: ReadText) -> None:
    text = lines(*ROWS, ROWS[0].replace("10.5", "10.6"), ROWS[1].replace("20.5", "20.6"))
    with pytest.raises(BarsError, match=r"'A'.*2024-05-06 13:30:00.*2 pairs"):
        read_text(text)


def test_an_empty_table_is_no_error(read_text: ReadText) -> None:
    for text in (HEADER, HEADER + "\n", HEADER + "\n\n\n"):
        bars = read_text(text)
        assert (bars.table.num_rows, bars.symbols, bars.interval) == (0, (), None)
        assert bars.table.column_names == HEADER.replace("time,symbol", "symbol,time").split(",")
    assert read_text(HEADER, interval="1h").interval.text == "1h"


def test_a_cut_last_line_is_reported(read_text: ReadText) -> None:
    assert any("line end" in text for text in read_text(lines(*ROWS)[:-1]).warnings)


def test_packed_and_parquet_files_read_alike(tmp_path: Path, read_text: ReadText) -> None:
    plain = read_text(lines(*ROWS))
    text = lines(*ROWS).encode()
    assert same(read_text(gzip.compress(text), name="a.csv.gz"), plain)
    assert same(read_text(gzip.compress(text[:90]) + gzip.compress(text[90:]), name="parts.gz"), plain)
    assert same(read_text(pa.compress(text, "zstd", asbytes=True), name="a.csv.zst"), plain)
    assert same(read_text(gzip.compress(text), name="misnamed.csv"), plain)
    pq.write_table(plain.table, tmp_path / "a.parquet")
    assert same(read(tmp_path / "a.parquet"), plain)
    assert same(read_text((tmp_path / "a.parquet").read_bytes(), name="misnamed.csv"), plain)
    assert same(read_text(gzip.compress((tmp_path / "a.parquet").read_bytes()), name="a.parquet.gz"), plain)
    assert same(read(plain.table), plain)


def test_large_files_are_parsed_in_segments(read_text: ReadText, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        f"2024-05-06T{h:02}:{m:02}:00Z,S{s},{h}.5,{h}.5,{h}.5,{h}.5,{m}"
        for h in range(9)
        for m in range(60)
        for s in (3, 1, 2)
    ]
    whole = read_text(lines(*rows))
    monkeypatch.setattr("stager.bars.decode_csv._SEGMENT_NBYTES", 4096)
    assert same(read_text(lines(*rows), name="segments.csv"), whole)
    with pytest.raises(BarsError) as caught:
        read_text(lines(*rows[:1500], "2024-05-07T00:00:00Z,S1,x,1,1,1,1", *rows[1500:]), name="wrong.csv")
    assert caught.value.line == 1502


def test_several_files_are_one_set_of_bars(tmp_path: Path, read_text: ReadText) -> None:
    whole = read_text(lines(*ROWS), name="whole.csv")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.csv").write_text(lines(*ROWS[:2]))
    (folder / "a.CSV.gz").write_bytes(gzip.compress(lines(*ROWS[2:]).encode()))
    (folder / "notes.md").write_text("not bars")
    for source in (
        folder,
        str(folder),
        str(folder / "*.[cC]*"),
        [folder / "b.csv", folder / "a.CSV.gz"],
        folder.as_uri(),
        [(folder / "b.csv").as_uri(), str(folder / "a*")],
    ):
        assert same(read(source), whole), source
    assert [(Path(one.name).name, one.n_rows) for one in read(folder).inputs] == [("a.CSV.gz", 3), ("b.csv", 2)]
    assert read(folder / "b.csv", ReadOptions(interval="1min")).inputs == (
        InputFile(str(folder / "b.csv"), (folder / "b.csv").stat().st_size, 2, 0),
    )


def test_a_file_twice_is_duplicates(tmp_path: Path, read_text: ReadText) -> None:
    read_text(lines(*ROWS))
    assert read([tmp_path / "bars.csv"] * 2).dropped["duplicate"] == 5


def test_further_columns_must_be_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(lines(*(f"{row},1" for row in ROWS[:2]), header=HEADER + ",vwap"))
    (tmp_path / "b.csv").write_text(lines(*(f"{row},1" for row in ROWS[2:]), header=HEADER + ",trades"))
    bars = read(tmp_path)
    assert bars.table.column_names[-1] == "volume"
    assert sum("not every file has it" in text for text in bars.warnings) == 2
    (tmp_path / "b.csv").write_text(lines(*(row.rpartition(",")[0] for row in ROWS[2:]), header=HEADER[:-7]))
    with pytest.raises(BarsError, match=r"b\.csv.*volume.*--column volume=NAME"):
        read(tmp_path)


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(lines(*ROWS[:2]))
    (tmp_path / "b.csv").write_text(lines(*ROWS[2:]))
    calls: list[tuple[str, int, int]] = []
    read(tmp_path, progress=lambda phase, done, total: calls.append((phase, done, total)))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert [call for call in calls if call[0] == "parse"][-1] == ("parse", size, size)
    assert calls[-1][0] == "sort"
    assert calls[-1][1] == calls[-1][2] == 5 * 6 * 8
    with pytest.raises(KeyboardInterrupt):
        read(tmp_path, progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))


def test_tables_of_other_types_read_alike(read_text: ReadText) -> None:
    plain = read_text(lines(*ROWS))
    table = plain.table
    for name, kind in (
        ("symbol", pa.large_string()),
        ("symbol", pa.string_view()),
        ("symbol", pa.binary()),
        ("time", pa.timestamp("s", "America/New_York")),
        ("time", pa.timestamp("us", "UTC")),
        ("open", pa.float32()),
        ("open", pa.decimal128(12, 3)),
        ("volume", pa.int16()),
        ("volume", pa.uint64()),
        ("close", pa.string()),
    ):
        column = table[name].cast(pa.string()) if name == "symbol" else table[name]
        other = table.set_column(table.column_names.index(name), name, column.cast(kind))
        assert same(read(other), plain), (name, kind)
    shuffled = table.take([3, 0, 4, 2, 1]).select(["close", "time", "low", "open", "symbol", "volume", "high"])
    assert same(read(pa.concat_tables([shuffled.slice(0, 2), shuffled.slice(2)])), plain)


def test_unused_and_null_symbols_of_a_dictionary(read_text: ReadText) -> None:
    table = read_text(lines(*ROWS)).table
    indices = pa.array([2, 2, 2, 1, 1], pa.int8())
    unused = pa.DictionaryArray.from_arrays(indices, pa.array(["zz", "B", "A"]))
    assert read(table.set_column(0, "symbol", unused)).symbols == ("A", "B")
    null = pa.DictionaryArray.from_arrays(indices, pa.array(["zz", None, "A"]))
    with pytest.raises(BarsError, match="symbol is missing") as caught:
        read(table.set_column(0, "symbol", null))
    assert caught.value.line == 4


def test_columns_of_a_table_that_hold_no_numbers_are_left_out(read_text: ReadText) -> None:
    table = read_text(lines(*ROWS)).table
    for name, column in (
        ("text", pa.array(["x"] * 5)),
        ("flag", pa.array([True] * 5)),
        ("when", table["time"]),
        ("list", pa.array([[1]] * 5)),
        ("none", pa.nulls(5)),
    ):
        bars = read(table.append_column(name, column))
        assert name not in bars.table.column_names
        assert any(repr(name) in text for text in bars.warnings)


def test_options_are_recorded(read_text: ReadText) -> None:
    bars = read_text(one_symbol("2024-05-06 13:31", "2024-05-06 13:32"), zone="UTC", label="close", adjustment="split")
    assert decided(bars)["zone"] == ("UTC", "as told")
    assert decided(bars)["label"][0] == "close"
    assert decided(bars)["interval"][0] == "1min"
    assert decided(bars)["adjustment"] == ("split", "as told")
    assert bars.adjustment == "split"


@pytest.mark.parametrize("times", ["ns", "s", "date", "seconds", "text", "dictionary", "missing"])
@pytest.mark.parametrize("ending", ["parquet", "csv", "feather"])
def test_columns_of_every_type_stay_together_in_large_files(tmp_path: Path, times: str, ending: str) -> None:
    """Arrow makes one chunk of several where it casts, and so not of all columns."""
    n_symbols, n_times = (20, 15_000) if times == "date" else (1, 300_000)
    seconds: Any = pa.array(np.tile(np.arange(n_times) * 60 + 1_500_000_000, n_symbols))
    stamps = seconds.cast(pa.timestamp("s"))
    column = {
        "ns": lambda: stamps.cast(pa.timestamp("ns")),
        "s": lambda: stamps,
        "date": lambda: pa.array(np.tile(np.arange(n_times) + 3_653, n_symbols).astype("datetime64[D]")),
        "seconds": lambda: seconds,
        "text": lambda: stamps.cast(pa.string()),
        "dictionary": lambda: stamps.cast(pa.string()).dictionary_encode(),
        "missing": lambda: pc.if_else(pc.less(seconds, seconds[-1]), stamps, None),
    }[times]()
    price = pa.array(np.arange(n_symbols * n_times, dtype=np.int32) + 1)
    if times == "missing":
        price = pc.if_else(pc.less(seconds, seconds[-1]), price, None)
    names = pa.array([f"S{number:02}" for number in range(n_symbols)])
    symbols = names.take(pa.array(np.repeat(np.arange(n_symbols), n_times)))
    prices = dict.fromkeys(("open", "high", "low", "close"), price)
    table = pa.table({"time": column, "symbol": symbols, **prices, "volume": price.cast(pa.float32())})
    file = tmp_path / f"bars.{ending}"
    if ending == "parquet":
        pq.write_table(table, file)
    elif ending == "feather":
        pa.feather.write_feather(table, str(file))
    else:
        pacsv.write_csv(table, file)
    bars = read(file, ReadOptions(zone=None if times in ("date", "seconds") else "UTC"))
    assert bars.table.num_rows == n_symbols * n_times - (times == "missing")
    assert np.array_equal(bars.table["close"].to_numpy(), np.arange(bars.table.num_rows) + 1.0)


@pytest.mark.parametrize("how", [{}, {"separators": (",", ":")}, {"indent": 2}], ids=["usual", "compact", "indented"])
def test_rows_of_json_may_hold_their_numbers_as_text(tmp_path: Path, how: dict[str, Any]) -> None:
    rows = [
        [1715002200000 + 60_000 * row, "0.0163", "0.0180", "0.0157", "0.0165", "148.9", 1715002259999 + 60_000 * row,
         "2434.1", 308, "1756.8", "28.4", "17.9"]
        for row in range(3)
    ]  # fmt: skip
    (tmp_path / "BTCUSDT.json").write_text(json.dumps(rows, **how))
    bars = read(tmp_path / "BTCUSDT.json", ReadOptions(symbol="BTCUSDT"))
    assert bars.table["low"].to_pylist() == [0.0157] * 3
    assert instants(bars)[-1] == "2024-05-06T13:32:00"


def test_one_page_of_several_is_told(tmp_path: Path) -> None:
    row = {"o": 1, "h": 2, "l": 1, "c": 1, "v": 1}
    page = {"bars": {"A": [{"t": 1715002200000 + 60_000 * number, **row} for number in range(3)]}}
    for token, is_told in ((None, False), ("abc", True)):
        (tmp_path / "x.json").write_text(json.dumps({**page, "next_page_token": token}))
        assert any("one page of several" in text for text in read(tmp_path / "x.json").warnings) == is_told


@pytest.mark.parametrize(
    ("close", "is_told"), [(10_500_000_000, True), (97_000_000, True), (628_930, False), (1_628_930.01, False)]
)
@pytest.mark.parametrize("container", ["csv", "parquet"])
def test_prices_that_seem_multiplied_are_told(tmp_path: Path, container: str, close: float, is_told: bool) -> None:
    table = pa.table(
        {"time": [1715002200, 1715002260], **{role: [close, close] for role in ("open", "high", "low", "close")}}
    )
    if container == "csv":
        pacsv.write_csv(table, tmp_path / "x.csv")
    else:
        pq.write_table(table, tmp_path / "x.parquet")
    bars = read(tmp_path / f"x.{container}")
    assert bars.table["close"].to_pylist() == [close] * 2
    assert any("price_scale" in text for text in bars.warnings) == is_told


def test_closes_alone_are_refused_with_what_helps(read_text: ReadText) -> None:
    text = "Date,AAA,BBB\n2024-01-02,1,2\n2024-01-03,1,2\n"
    with pytest.raises(BarsError, match=r"--field close"):
        read_text(text)
    with pytest.raises(BarsError, match=r"holds no open, high, low, .* repeat them as open, high and low"):
        read_text(text, field="close")


@pytest.mark.parametrize("form", ["records", "lines", "by symbol", "of one symbol"])
def test_a_key_that_stands_twice_in_a_row_of_json_is_refused(tmp_path: Path, form: str) -> None:
    row = '{"time": %d, "open": 1, "high": 2, "low": 1, "close": 1, "close": 2, "volume": 1}'
    rows = [row % (1715002200000 + 60_000 * number) for number in range(2)]
    texts = {
        "records": f"[{', '.join(rows)}]",
        "lines": "\n".join(rows),
        "by symbol": f'{{"bars": {{"A": [{", ".join(rows)}]}}}}',
        "of one symbol": f'{{"ticker": "A", "results": [{", ".join(rows)}]}}',
    }
    (tmp_path / "x.json").write_text(texts[form])
    with pytest.raises(BarsError, match="'close' stands twice"):
        read(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(texts[form].replace('"close": 1, ', ""))
    assert read(tmp_path / "x.json").table["close"].to_pylist() == [2.0, 2.0]
