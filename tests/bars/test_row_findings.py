"""What is found while rows are read: duplicates, order, the relation of prices, unfinished bars."""

from __future__ import annotations

import os
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from bars.conftest import ReadText, lines, one_symbol
from bars_fixtures import DAY, MINUTE, START
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.checks import Piece
from stager.bars.findings import Finding
from stager.bars.interval import Interval
from stager.bars.read import Bars, ReadOptions, read
from stager.bars.relation import FAULTS, PAIRS, Relation, relation
from stager.bars.unfinished import unfinished
from stager.errors import BarsError


def of(bars: Bars, check: str) -> Finding:
    (found,) = (one for one in bars.findings if one.check == check)
    return found


class TestDuplicates:
    @settings(deadline=None)
    @given(
        rows=st.lists(st.tuples(st.sampled_from("AB"), st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=40),
        keep=st.sampled_from(["first", "last"]),
    )
    def test_which_is_kept(self, tmp_path_factory: pytest.TempPathFactory, rows: list, keep: str) -> None:
        path = tmp_path_factory.mktemp("rows") / "bars.csv"
        cells = [f"2024-05-06T13:{minute:02}Z,{symbol},{n},{n},{n},{n},{n}" for symbol, minute, n in rows]
        path.write_text(lines(*cells))
        kept: dict[tuple[str, int], int] = {}
        for symbol, minute, n in rows:
            if keep == "last" or (symbol, minute) not in kept:
                kept[symbol, minute] = n
        bars = read(path, ReadOptions(duplicates=keep, interval="1min"))  # type: ignore[arg-type]
        assert bars.table["close"].to_pylist() == [kept[key] for key in sorted(kept)]
        n_differing = sum(kept[symbol, minute] != n for symbol, minute, n in rows)
        found = of(bars, "duplicates")
        assert found.n == len(rows) - len(kept)
        assert found.severity == ("warning" if n_differing else "note" if found.n else "fine")
        assert bars.dropped["duplicate"] == len(rows) - len(kept) - n_differing
        assert bars.dropped.get("conflicting duplicate", 0) == n_differing
        assert (found.sentence in bars.warnings) == bool(n_differing)

    def test_they_are_refused_unless_told(self, read_text: ReadText) -> None:
        text = lines(*(f"2024-05-06T13:3{minute}Z,A,5,5,5,5,{volume}" for minute, volume in [(0, 1), (1, 2), (1, 3)]))
        with pytest.raises(BarsError, match=r"13:31:00 that differ; 1 .*--duplicates first or --duplicates last"):
            read_text(text)
        bars = read_text(text, duplicates="last")
        assert bars.table["volume"].to_pylist() == [1, 3]
        found = of(bars, "duplicates")
        assert found.text == (
            "1 row dropped that differed from another one of their symbol and time, the last of which was kept: first "
            "A at 2024-05-06 13:31Z"
        )

    def test_across_files(self, tmp_path: Path) -> None:
        for name, close in (("1.csv", 5), ("2.csv", 6)):
            rows = [f"2024-05-06T13:3{minute}Z,A,5,7,4,{close},1" for minute in range(3)]
            (tmp_path / name).write_text(lines(*rows))
        for keep, close in (("first", 5), ("last", 6)):
            bars = read(tmp_path, ReadOptions(duplicates=keep))  # type: ignore[arg-type]
            assert bars.table["close"].to_pylist() == [close] * 3
            assert bars.dropped == {"null price": 0, "duplicate": 0, "conflicting duplicate": 3}


class TestOrder:
    def test_in_order(self, read_text: ReadText) -> None:
        assert of(read_text(one_symbol("2024-05-06T13:30Z", "2024-05-06T13:31Z")), "order").severity == "fine"

    def test_newest_first(self, read_text: ReadText) -> None:
        bars = read_text(one_symbol(*(f"2024-05-06T13:3{minute}Z" for minute in (4, 3, 2, 1))), name="X.csv")
        found = of(bars, "order")
        assert (found.severity, found.n, found.n_of) == ("note", 3, 4)
        assert found.text == ("3 rows of X came after a later one (newest first), first X at 2024-05-06 13:33Z; sorted")
        assert [one.value for one in bars.decisions if one.what == "order"] == ["sorted by time"]

    def test_one_symbol_out_of_order(self, read_text: ReadText) -> None:
        rows = [(0, "A"), (0, "B"), (1, "A"), (3, "B"), (2, "A"), (1, "B"), (2, "B")]
        cells = [f"2024-05-06T13:3{minute}Z,{symbol},1,1,1,1,{minute}" for minute, symbol in rows]
        found = of(read_text(lines(*cells)), "order")
        assert (found.n, found.places[0].symbol, found.places[0].time) == (1, "B", "2024-05-06T13:31:00Z")
        assert "(out of order)" in found.text


PRICE = st.integers(1, 4).map(float)


class TestRelation:
    @settings(deadline=None)
    @given(st.lists(st.tuples(PRICE, PRICE, PRICE, PRICE), min_size=1, max_size=30))
    def test_is_counted(self, rows: list[tuple[float, ...]]) -> None:
        prices = [np.array(column) for column in zip(*rows, strict=True)]
        found = relation(np.zeros(len(rows), np.uint8), np.arange(len(rows)), prices)
        wrong = [i for i, (o, h, l, c) in enumerate(rows) if h < max(o, c) or l > min(o, c)]  # noqa: E741
        assert (found.n_bars, found.n_violations, found.n_gross) == (len(rows), len(wrong), len(wrong))
        assert found.first == ((0, wrong[0]) if wrong else None)
        if wrong:
            assert found.faults == tuple(sum(row[a] > row[b] for row in rows) for a, b in FAULTS)
            fits = [sum(row[a] == max(row) and row[b] == min(row) for row in rows) for a, b in PAIRS]
            assert found.fits == tuple(fits)

    def test_sums_are_those_of_all(self) -> None:
        rng = np.random.default_rng(3)
        prices = [rng.uniform(1, 2, 40) for _ in range(4)]
        codes, times = np.zeros(40, np.uint8), np.arange(40)
        parts = [
            relation(codes[i : i + 10], times[i : i + 10], [p[i : i + 10] for p in prices]) for i in (0, 10, 20, 30)
        ]
        assert sum(parts[1:], parts[0]) == relation(codes, times, prices)
        assert sum(parts, Relation()) == relation(codes, times, prices)

    @pytest.mark.parametrize("names", list(permutations(["open", "high", "low", "close"])), ids="-".join)
    def test_swapped_columns_are_named(self, read_text: ReadText, names: tuple[str, ...]) -> None:
        """The columns hold open, high, low and close, whatever their names say."""
        rows = [f"2024-05-06T13:{minute}Z,20.{minute},22.5,19,21.{minute},1" for minute in range(10, 40)]
        bars = read_text(lines(*rows, header=f"time,{','.join(names)},volume"))
        found = of(bars, "relation")
        if names[1:3] == ("high", "low"):
            # Open and close alone can't be told apart.
            assert found.severity == "fine"
            return
        assert (found.severity, found.n, found.n_of) == ("warning", 30, 30)
        assert f"{names[1]!r}, read as {names[1]}, holds the highest price" in found.text
        assert f"{names[2]!r}, read as {names[2]}, the lowest" in found.text
        assert f"--column high={names[1]} --column low={names[2]}" in found.remedy
        assert found.sentence in bars.warnings
        columns = {"high": names[1], "low": names[2], "open": names[0], "close": names[3]}
        right = read_text(lines(*rows, header=f"time,{','.join(names)},volume"), columns=columns)
        assert of(right, "relation").severity == "fine"

    def test_one_file_of_several(self, tmp_path: Path) -> None:
        for day in range(1, 5):
            header = "time,open,low,high,close" if day == 3 else "time,open,high,low,close"
            rows = [f"2024-05-0{day}T13:{minute}Z,20,22,19,21" for minute in range(10, 20)]
            (tmp_path / f"{day}.csv").write_text(lines(*rows, header=header))
        bars = read(tmp_path, ReadOptions(symbol="A"))
        found = of(bars, "relation")
        assert found.text.startswith(f"{tmp_path / '3.csv'}: 10 of 10 bars (100 %)")
        assert found.places[0].time == "2024-05-03T13:10:00Z"

    def test_a_few_wrong_bars_are_counted_and_shown(self, read_text: ReadText) -> None:
        rows = [f"2024-05-06T13:{minute}Z,20,22,19,{23 if minute == 17 else 21},1" for minute in range(10, 40)]
        found = of(read_text(lines(*rows, header="time,open,high,low,close,volume"), name="X.csv"), "relation")
        assert (found.n, found.places[0].time) == (1, "2024-05-06T13:17:00Z")
        assert "1 of 30 bars (3.33 %)" in found.text
        assert "close above high in 1" in found.text
        assert "only close is outside" in found.remedy

    def test_rounding_is_a_note(self, read_text: ReadText) -> None:
        rows = [f"2024-05-06T13:{minute}Z,20,21.0000001,19,21.0000002,1" for minute in range(10, 40)]
        found = of(read_text(lines(*rows, header="time,open,high,low,close,volume")), "relation")
        assert (found.severity, found.n) == ("note", 30)
        assert "rounding" in found.text


class TestUnfinished:
    def look(self, times: list[int], **how: object) -> Finding:
        piece = Piece(np.zeros(len(times), np.uint8), np.array(times), ())
        values = {"interval": Interval.parse("1min"), "label": "open", "timestamps": "utc", "now": START} | how
        return unfinished([None], [[piece]], ("A",), **values)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("last", "how", "n"),
        [
            (START - MINUTE, {}, 0),
            (START - MINUTE + 1, {}, 1),
            (START, {"label": "close"}, 0),
            (START + 1, {"label": "close"}, 1),
            (START - 31 * DAY, {"interval": Interval.parse("1mo")}, 0),
            (START - 30 * DAY, {"interval": Interval.parse("1mo")}, 0),
            (START, {"interval": Interval.parse("1mo"), "timestamps": "session"}, 1),
            (START - DAY, {"interval": Interval.parse("1d"), "timestamps": "session"}, 0),
            (START, {"interval": Interval.parse("1d"), "timestamps": "session"}, 1),
        ],
    )
    def test_by_the_clock(self, last: int, how: dict[str, object], n: int) -> None:
        found = self.look([START - 90 * DAY, last], **how)
        assert (found.n, found.severity != "fine") == (n, bool(n))

    def test_dates_may_be_finished_before_midnight(self) -> None:
        how = {"interval": Interval.parse("1d"), "timestamps": "session"}
        assert self.look([START], now=START + 20 * 60 * MINUTE, **how).severity == "note"
        assert self.look([START], now=START + 21 * 60 * MINUTE, **how).severity == "fine"

    @pytest.mark.parametrize(("close", "hour"), [("16:00 America/New_York", 21), ("24:00 America/Los_Angeles", 32)])
    def test_dates_are_finished_at_the_declared_close(self, close: str, hour: int) -> None:
        how = {"interval": Interval.parse("1d").closing(close), "timestamps": "session"}
        assert self.look([START], now=START + hour * 60 * MINUTE - 1, **how).severity == "warning"
        assert self.look([START], now=START + hour * 60 * MINUTE, **how).severity == "fine"

    def test_the_future_is_a_wrong_zone(self) -> None:
        found = self.look([START + 60 * MINUTE, START + 61 * MINUTE])
        assert (found.severity, found.n) == ("warning", 2)
        assert found.text == "2 bars of A lie in the future, A at 2024-01-01 01:00Z"

    def test_by_the_time_at_which_the_file_was_written(self, tmp_path: Path) -> None:
        path = tmp_path / "X.csv"
        path.write_text(one_symbol(*(f"2024-05-06T13:3{minute}Z" for minute in range(5))))
        written = np.datetime64("2024-05-06T13:34:30", "ns").astype(np.int64)
        os.utime(path, ns=(int(written), int(written)))
        bars = read(path)
        found = of(bars, "unfinished")
        assert (found.severity, found.n, found.places[0].time) == ("warning", 1, "2024-05-06T13:34:00Z")
        assert found.sentence in bars.warnings
        os.utime(path, ns=(int(written) + 30 * 10**9,) * 2)
        assert of(read(path), "unfinished").severity == "fine"
