"""Formats: the vocabulary, what is found by itself, and what is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from bars.conftest import ReadText, decided, instants, lines, one_symbol
from hypothesis import given
from hypothesis import strategies as st

from stager.bars.decode import decode
from stager.bars.drafts import draft
from stager.bars.formats import NumberRule, built_in, named, text_of, vocabulary
from stager.bars.numbers import Marks, dot_may_group, marks_of, read_numbers
from stager.bars.patterns import parse, possible, regex_of
from stager.bars.read import ReadOptions, read
from stager.bars.room import Room
from stager.bars.sources import find
from stager.errors import BarsError, ConfigError

MINE = """
title = "Mine"
header = ["Wann", "Auf", "Hoch", "Tief", "Zu", "Menge"]
delimiter = ";"
skip = ["Ende.*"]
label = "close"
adjustment = "split"

[columns]
time = "Wann"
open = "Auf"
high = "Hoch"
low = "Tief"
close = "Zu"
volume = "Menge"

[time]
pattern = "%d.%m.%Y %H:%M"
zone = "Europe/Berlin"

[numbers]
decimal = ","
price_scale = 100

[symbol]
from_file = '^([a-z]+)-'
upper = true
"""
TEXT = (
    "Wann;Auf;Hoch;Tief;Zu;Menge\n"
    "01.07.2024 09:01;1.000,0;1.100,5;900;1.050;12,5\n"
    "Wann;Auf;Hoch;Tief;Zu;Menge\n"
    "01.07.2024 09:02;1.000,0;1.100,5;900;1.050;-\n"
    "Ende der Datei\n"
)


def test_a_format_of_ones_own(tmp_path: Path, read_text: ReadText) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    bars = read_text(TEXT, name="dax-2024.csv", format=str(tmp_path / "mine.toml"))
    assert bars.symbols == ("DAX",)
    assert instants(bars) == ["2024-07-01T07:00:00", "2024-07-01T07:01:00"]
    assert bars.table["high"].to_pylist() == [11.005, 11.005]
    assert bars.table["volume"].to_pylist()[0] == 12.5
    assert np.isnan(bars.table["volume"].to_pylist()[1])
    assert bars.adjustment == "split"
    assert decided(bars)["format"] == ("mine", "as told")
    assert decided(bars)["zone"] == ("Europe/Berlin", "the format mine")
    assert decided(bars)["label"][0] == "close"
    assert decided(bars)["price scale"][0] == "divided by 100"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('title = "Mine"', 'titel = "Mine"', "titel"),
        ('label = "close"', 'label = "end"', "label"),
        ('close = "Zu"', "", "lacks close"),
        ('zone = "Europe/Berlin"', 'zone = "Europe/Bern"', "zone"),
        ("%d.%m.%Y %H:%M", "%d.%m %H:%M", "year"),
        ("%d.%m.%Y %H:%M", "%d.%m.%Y %Q", "%Q"),
        ("price_scale = 100", "price_scale = 0", "price_scale"),
        ("'^([a-z]+)-'", "'^[a-z]+-'", "one group"),
        ("'^([a-z]+)-'", "'^([a-z]+-'", "regular expression"),
        ('header = ["Wann", "Auf", "Hoch", "Tief", "Zu", "Menge"]', "", "header or positions"),
        ('decimal = ","', 'decimal = ";"', "decimal"),
        ('zone = "Europe/Berlin"', 'unit = "ms of day"', "date_from_file"),
        ('delimiter = ";"', 'delimiter = ";;"', "delimiter"),
        ('delimiter = ";"', 'encoding = "klingon"', "encoding"),
        ("[time]", "[time", "TOML"),
    ],
)
def test_a_wrong_format_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in MINE
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=words) as caught:
        named(str(path))
    assert str(path) in str(caught.value)


def test_unknown_formats_are_named() -> None:
    with pytest.raises(ConfigError, match="kraken-ohlcvt"):
        named("kraken")
    with pytest.raises(ConfigError, match="no such"):
        named("nowhere.toml")


def test_what_comes_with_stager() -> None:
    assert len(built_in()) >= 25
    for name, each in built_in().items():
        assert each.name == name
        assert each.title
        assert name in ReadOptions(format=name).format  # type: ignore[operator]
        assert "[columns]" in text_of(name)
    assert {"files", "header", "time.zone", "numbers.price_scale", "symbol.from_file"} <= {n for n, _ in vocabulary()}


def test_every_file_is_told_for_itself(tmp_path: Path) -> None:
    """An archive that changed from milliseconds to microseconds, and to a header."""
    names = "open_time,open,high,low,close,volume,close_time,quote_volume,count,taker_buy_volume,taker_buy_quote,x"
    row = "{},1.5,2.5,0.5,1.5,10,{},1,1,1,1,0\n"
    old, new = 1735603200000, 1735689600000000
    (tmp_path / "BTCUSDT-1m-2024-12.csv").write_text("".join(row.format(old + 60000 * i, 0) for i in range(3)))
    (tmp_path / "BTCUSDT-1m-2025-01.csv").write_text(
        f"{names}\n" + "".join(row.format(new + 60000000 * i, 0) for i in range(3))
    )
    bars = read(tmp_path)
    assert bars.symbols == ("BTCUSDT",)
    assert instants(bars)[::3] == ["2024-12-31T00:00:00", "2025-01-01T00:00:00"]
    sources = [d.source for d in bars.decisions if d.what == "time"]
    assert all(source.endswith(f"{name}.csv") for source, name in zip(sources, ("2024-12", "2025-01"), strict=True))
    assert {d.value for d in bars.decisions if d.what == "time"} == {
        "milliseconds since 1970 UTC", "microseconds since 1970 UTC",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "words"),
    [("12,345", "--decimal"), ("1.2.3", "is no number"), ("1,23,4", "is no number"), ("12..5", "is no number")],
)
def test_numbers_that_can_be_read_in_two_ways(read_text: ReadText, cell: str, words: str) -> None:
    text = lines(f'2024-05-06T13:30:00Z,1,2,1,2,"{cell}"', header="time,open,high,low,close,volume")
    with pytest.raises(BarsError, match=words) as caught:
        read_text(text)
    assert (caught.value.line, caught.value.column) == (2, "volume")


def test_commas_that_are_told(read_text: ReadText) -> None:
    text = lines('2024-05-06T13:30:00Z,1,2,1,2,"12,345"', '2024-05-06T13:31:00Z,1,2,1,2,"2"',
                 header="time,open,high,low,close,volume")  # fmt: skip
    assert read_text(text, decimal=",").table["volume"].to_pylist() == [12.345, 2.0]
    assert read_text(text, thousands=",").table["volume"].to_pylist() == [12345.0, 2.0]
    # Prices with dots tell what a comma is.
    assert read_text(text.replace("1,2,1,2", "1.5,2.5,1.5,2.5")).table["volume"].to_pylist() == [12345.0, 2.0]


def test_a_single_wrong_comma_changes_no_other_number(read_text: ReadText) -> None:
    rows = [f"2024-05-06T13:{m:02};149.526;149.554;149.452;149.489;1" for m in range(5)]
    header = "time;open;high;low;close;volume"
    rows[3] = rows[3].replace("149.489", "149,48")
    with pytest.raises(BarsError, match="149,48"):
        read_text(lines(*rows, header=header), zone="UTC")


def test_columns_by_position(read_text: ReadText) -> None:
    text = "1714999800,1.5,2.5,0.5,1.5\n1714999860,1.5,2.5,0.5,1.5\n"
    columns = {"time": "1", "open": "2", "high": "3", "low": "4", "close": "5"}
    assert read_text(text, columns=columns).table.num_rows == 2
    with pytest.raises(BarsError, match="no known format"):
        read_text(text)


@pytest.mark.parametrize(
    ("cell", "right"),
    [
        ("06/05/2024 13:30", "--date-order"),
        ("13/05/2024 13:30", "2024-05-13T13:30:00"),
        ("05/13/2024 1:30 PM", "2024-05-13T13:30:00"),
        ("05/13/2024 12:00 AM", "2024-05-13T00:00:00"),
        ("13 May 2024 13:30", "2024-05-13T13:30:00"),
        ("May 13, 2024 13:30:00", "2024-05-13T13:30:00"),
        ("2024.05.13 13:30", "2024-05-13T13:30:00"),
        ("20240513 133000", "2024-05-13T13:30:00"),
        ("2024/05/13 13:30:00+0200", "2024-05-13T11:30:00"),
        ("1715607000.5", "2024-05-13T13:30:00"),
        ("30/02/2024 13:30", "can't tell|no time that exists"),
    ],
)
def test_times_as_people_write_them(read_text: ReadText, cell: str, right: str) -> None:
    text = one_symbol(f'"{cell}"')
    zone = {} if "+" in cell or "." in cell[-3:] else {"zone": "UTC"}
    if right.startswith("2024"):
        assert instants(read_text(text, interval="1min", **zone)) == [right]
        return
    with pytest.raises(BarsError, match=right):
        read_text(text, interval="1min", **zone)


@given(
    moments=st.lists(st.integers(-8_000_000_000, 7_000_000_000), min_size=1, max_size=20),
    pattern=st.sampled_from(
        ["%Y-%m-%d %H:%M:%S", "%d.%m.%Y %H:%M:%S", "%m/%d/%Y %I:%M:%S %p", "%Y%m%d %H%M%S", "%b %d, %Y %H:%M:%S"]
    ),
)
def test_patterns_agree_with_the_calendar(moments: list[int], pattern: str) -> None:
    stamps = np.array(moments, dtype="datetime64[s]")
    texts = [stamp.item().strftime(pattern).rjust(4, "0") for stamp in stamps]
    found, bad, _ = parse(pa.chunked_array([texts]), pattern)
    assert bad == -1
    assert found.to_numpy().astype("datetime64[s]").tolist() == stamps.tolist()


@given(values=st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=20), comma=st.booleans())
def test_marked_numbers_agree_with_plain_ones(values: list[int], comma: bool) -> None:
    texts = [f"{value / 100:,.2f}" for value in values]
    if comma:
        texts = [text.translate(str.maketrans(",.", ".,")) for text in texts]
    column = pa.chunked_array([texts])
    marks = marks_of([column], NumberRule(), None, None)
    if marks == Marks(".", "'\u2019 \u00a0\u202f\u2009") and not comma:
        assert not any("," in text for text in texts)
    assert isinstance(marks, Marks)
    found, bad = read_numbers(column, marks, NumberRule())
    assert bad == -1
    assert found.to_pylist() == [value / 100 for value in values]


def test_pattern_letters() -> None:
    assert regex_of("%Y%m%d%H%M") == r"^(?P<Y>\d{4})(?P<m>\d{2})(?P<d>\d{2})(?P<H>\d{2})(?P<M>\d{2})$"
    assert possible(["03/11/2024"], "dmy") == ["%d/%m/%Y"]
    for wrong in ("%Y-%m", "%Y-%m-%d %I:%M", "%Y-%Y-%m-%d", "%"):
        with pytest.raises(ConfigError, match="pattern"):
            regex_of(wrong)


def test_the_documented_format_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    (tmp_path / "documented.toml").write_text(text.partition("```toml\n")[2].partition("```")[0])
    found = named(str(tmp_path / "documented.toml"))
    assert found.time.zone == "Europe/Berlin"
    for name in built_in():
        assert f"`{name}`" in text, name


def test_a_file_of_one_field_is_no_bars(read_text: ReadText) -> None:
    text = "Date,AAA,BBB\n2024-01-02,1,2\n2024-01-03,1,2\n"
    with pytest.raises(BarsError, match="--field close"):
        read_text(text)
    with pytest.raises(BarsError, match="no open, high, low"):
        read_text(text, field="close")


def test_wide_files(read_text: ReadText) -> None:
    fields = ("open", "high", "low", "close")
    joined = "Date," + ",".join(f"{symbol}:{field}" for symbol in "BA" for field in fields)
    levels = "Price," + ",".join(("Open", "High", "Low", "Close") * 2) + "\nTicker,B,B,B,B,A,A,A,A\nDate" + "," * 8
    for header in (joined, levels):
        bars = read_text(f"{header}\n2024-01-02,1,2,1,2,,,,\n2024-01-03,1,2,1,2,3,4,3,4\n")
        assert bars.symbols == ("A", "B")
        assert bars.table["open"].to_pylist() == [3.0, 1.0, 1.0]
        assert (bars.timestamps, bars.dropped["null price"]) == ("session", 1)


def test_footers_comments_and_headers_again(read_text: ReadText) -> None:
    header = "time,open,high,low,close"
    rows = [f"2024-05-06T{13 + i // 60}:{i % 60:02}:00Z,1.5,2.5,0.5,1.5" for i in range(300)]
    for place in (3, 250):
        text = lines(*rows[:place], header, "# a remark, with a comma", *rows[place:], header=header)
        assert read_text(text).table.num_rows == 300
    bars = read_text(lines(*rows, "Downloaded from Example.com as of 05-06-2024", header=header))
    assert bars.table.num_rows == 300
    assert any("Downloaded" in text for text in bars.warnings)
    with pytest.raises(BarsError, match="1 fields") as caught:
        read_text(lines(*rows, rows[0][:14], header=header))
    assert caught.value.line == 302


def test_json_beside_bar_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bars.csv").write_text(one_symbol("2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z"))
    (tmp_path / "index.json").write_text('{"about": "notes"}')
    assert read(tmp_path).table.num_rows == 2


@pytest.mark.parametrize(
    "text",
    [
        '[{"t":1714999800,"o":1.5,"h":2,"l":1,"c":1.5},{"t":1714999860,"o":1.5,"h":2,"l":1,"c":1.5}]',
        '{"t":1714999800,"o":1.5,"h":2,"l":1,"c":1.5}\n{"t":1714999860,"o":1.5,"h":2,"l":1,"c":1.5}\n',
        '{"s":"ok","t":[1714999800,1714999860],"o":[1.5,1.5],"h":[2,2],"l":[1,1],"c":[1.5,1.5]}',
        '{"symbol":"NA","bars":[{"t":1714999800,"o":1.5,"h":2,"l":1,"c":1.5},{"t":1714999860,"o":1.5,"h":2,"l":1,"c":1.5}]}',
        '{"columns":["time","open","high","low","close"],"data":[[1714999800,1.5,2,1,1.5],[1714999860,1.5,2,1,1.5]]}',
    ],
)
def test_forms_of_json(read_text: ReadText, text: str) -> None:
    bars = read_text(text, name="NA.json")
    assert bars.symbols == ("NA",)
    assert instants(bars) == ["2024-05-06T12:50:00", "2024-05-06T12:51:00"]
    assert bars.table["open"].to_pylist() == [1.5, 1.5]
    with pytest.raises(BarsError):
        read_text(text[: len(text) // 2], name="NA.json")


def test_dates_beside_an_empty_clock_and_beyond_int64(read_text: ReadText) -> None:
    header = "Date,Time,Open,High,Low,Close"
    bars = read_text(lines("2024.01.02,,1,2,1,2", "2024.01.03,,1,2,1,2", header=header))
    assert bars.timestamps == "session"
    with pytest.raises(BarsError, match="int64 nanoseconds"):
        read_text(lines("13/04/2262,1,2,1,2", header="date,open,high,low,close"), allow_years=(1900, 2261))


def test_a_header_that_names_too_few_columns_is_told_and_drafted(tmp_path: Path) -> None:
    text = "Date,Open,High,Low,Close,Volume\n" + "".join(
        f"2024-05-0{day},09:01:00,1,2,0.5,1.5,7\n" for day in range(1, 8)
    )
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(BarsError, match=r":2: every row has 7 fields, and the header names 6: .*formats new"):
        read(path)
    drafted = draft(str(path), ReadOptions())
    described = re.sub(r'"FILL IN: .*"', '"mine"', drafted)
    for number, role in enumerate(("open", "high", "low", "close"), start=3):
        described = described.replace(f'{role} = "FILL IN"', f'{role} = "column {number}"')
    described = described.replace('time = "column 1"', 'time = ["column 1", "column 2"]')
    (tmp_path / "mine.toml").write_text(described)
    bars = read(path, ReadOptions(format=f"{tmp_path}/mine.toml", zone="UTC", interval="1d"))
    assert bars.table["high"].to_pylist() == [2.0] * 7
    assert bars.symbols == ("x",)


# The same numbers as people write them, and what must be told.
WRITTEN: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "plain": (["10.5", "1234.25"], ["100", "12345000"], {}),
    "thousands": (["10.5", "1,234.25"], ["100", "12,345,000"], {}),
    "decimal comma": (["10,5", "1.234,25"], ["100", "12.345.000"], {}),
    "apostrophes": (["10.5", "1'234.25"], ["100", "12'345'000"], {}),
    "told": (["10,5", "1234,25"], ["100", "12345000"], {"decimal": ","}),
    "words": (["10.5", "1234.25"], ["-", "12,345,000"], {}),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("container", ["parquet", "feather", "json", "dictionary", "table", "csv"])
def test_numbers_as_text_are_read_alike_in_every_container(container: str, written: str, tmp_path: Path) -> None:
    prices, volumes, told = WRITTEN[written]
    cells = {
        "time": ["2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z"],
        **{role: prices for role in ("open", "high", "low", "close")},
        "volume": volumes,
    }
    table, path = pa.table(cells), tmp_path / f"x.{container}"
    source: Any = path
    if container == "parquet":
        pq.write_table(table, path)
    elif container == "feather":
        feather.write_feather(table, str(path))
    elif container == "json":
        path.write_text(json.dumps([dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]))
    elif container == "csv":
        path.write_text("\n".join(";".join(row) for row in (cells, *zip(*cells.values(), strict=True))) + "\n")
    else:
        named = table.column_names[1:]
        source = pa.table(
            {"time": table["time"], **{name: table[name].dictionary_encode() for name in named}}
            if container == "dictionary"
            else {"time": table["time"], **{name: table[name].cast(pa.large_string()) for name in named}}
        )
    bars = read(source, ReadOptions(symbol="A", interval="1min", **told))
    assert bars.table["close"].to_pylist() == [10.5, 1234.25]
    volume = bars.table["volume"].to_numpy()
    assert np.isnan(volume[0]) == (volumes[0] == "-")
    assert volume[1] == 12345000


def test_a_comma_in_text_that_may_be_either_is_asked_about(tmp_path: Path) -> None:
    cells = {"time": ["2024-05-06T13:30:00Z"] * 1, **{role: ["1,234"] for role in ("open", "high", "low", "close")}}
    pq.write_table(pa.table(cells), tmp_path / "x.parquet")
    with pytest.raises(BarsError, match=r"'1,234' is no number that can be read in one way only.*--decimal"):
        read(tmp_path / "x.parquet", ReadOptions(interval="1min"))


def test_wide_columns_of_text_are_numbers(tmp_path: Path) -> None:
    cells = {"Date": ["2024-05-06", "2024-05-07"]}
    cells |= {f"A:{role}": ["1,234.5", "1,235.5"] for role in ("open", "high", "low", "close")}
    pq.write_table(pa.table(cells), tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet").table["close"].to_pylist() == [1234.5, 1235.5]


def test_text_that_is_no_number_is_named_with_its_row(tmp_path: Path) -> None:
    cells = {"time": ["2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z"]}
    cells |= {role: ["1.5", "oops" if role == "low" else "1.5"] for role in ("open", "high", "low", "close")}
    pq.write_table(pa.table(cells), tmp_path / "x.parquet")
    with pytest.raises(BarsError, match=r"x\.parquet:2, column 'low': 'oops' is no number"):
        read(tmp_path / "x.parquet", ReadOptions(interval="1min"))


def test_marks_of_a_large_file_are_told_or_all_of_it_is_read(tmp_path: Path) -> None:
    n = 40_000
    prices = [f"{10_000 + row % 7},5" for row in range(n)]
    cells: dict[str, Any] = {"time": [1_700_000_000 + 60 * row for row in range(n)]}
    cells |= {role: prices for role in ("open", "high", "low", "close")}
    pq.write_table(pa.table(cells), tmp_path / "x.parquet", row_group_size=5_000)
    (source,) = find(tmp_path / "x.parquet")
    with pytest.raises(BarsError, match="--decimal"):
        list(decode(source, ReadOptions(symbol="A"), lambda tell: None, Room(source.name, 1 << 20)))
    parts = list(decode(source, ReadOptions(symbol="A", decimal=","), lambda tell: None, Room(source.name, 1 << 20)))
    assert len(parts) > 1
    assert sum(part.n_rows for part in parts) == n
    assert parts[-1].columns["close"][-1].as_py() == 10_000.5 + (n - 1) % 7


@pytest.mark.parametrize("container", ["csv", "parquet"])
def test_dots_between_thousands_of_volume_are_asked_about(tmp_path: Path, container: str) -> None:
    cells = {"time": ["2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z", "2024-05-06T13:32:00Z"]}
    cells |= {role: ["12", "13", "14"] for role in ("open", "high", "low", "close")} | {
        "volume": ["950", "1.234", "2.500"]
    }
    path = tmp_path / f"x.{container}"
    if container == "parquet":
        pq.write_table(pa.table(cells), path)
    else:
        path.write_text("\n".join(";".join(row) for row in (cells, *zip(*cells.values(), strict=True))) + "\n")
    with pytest.raises(BarsError, match=r"'2\.500' beside '950' may be .*--decimal \. or --thousands \."):
        read(path)
    assert read(path, ReadOptions(thousands=".")).table["volume"].to_pylist() == [950, 1234, 2500]
    assert read(path, ReadOptions(decimal=".")).table["volume"].to_pylist() == [950, 1.234, 2.5]


@pytest.mark.parametrize(
    ("cells", "asks"),
    [
        (["1.234", "2.5", "950"], False),
        (["1.234", "2.500", "950.000"], False),
        (["0.500", "950", "1.500"], False),
        (["1.500", "1200"], False),
        (["1.500", "0"], False),
        (["149.520", "149.533", "151"], True),
        (["950", "1.234", "12.500"], True),
    ],
)
def test_when_dots_may_part_thousands(cells: list[str], asks: bool) -> None:
    assert (dot_may_group(cells) is not None) == asks
