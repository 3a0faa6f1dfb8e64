"""Which rows end a sample, why the others don't, and what is predicted: against a plain loop over the rows."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import zoneinfo
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples import labelling
from stager.samples.building import REASONS, build_index
from stager.samples.index import SampleIndex
from stager.samples.plan import Plan, describe, make_plan
from stager.samples.select import Select
from stager.samples.targets import Target

NAN = float("nan")
KINDS = ("return", "log_return", "difference", "direction", "value")


def value_of(target: Target, entry: float, leave: float) -> float | str:
    """The target in float64, or the reason that there is none."""
    used = (leave,) if target.kind == "value" else (entry, leave)
    if not all(math.isfinite(value) for value in used):
        return "missing value in the target"
    if target.kind == "value":
        found = leave
    elif target.kind == "difference":
        found = leave - entry
    elif target.kind == "direction":
        move = leave - entry
        found = 0.0 if abs(move) <= target.threshold * abs(entry) else math.copysign(1, move)
        if found == 0 and target.classes == 2:
            return "direction zero left out"
    elif entry <= 0 or (target.kind == "log_return" and leave <= 0):
        return "base of the target not positive"
    else:
        found = leave / entry - 1 if target.kind == "return" else math.log(leave / entry)
    return found if abs(found) < 3.5e38 else "missing value in the target"


def session_of(stamp: int, select: Select) -> dt.date | None:
    """The day whose hours, of one part and in a zone, hold the instant; None outside."""
    assert select.session is not None
    hours, zone = select.session.split()
    local = dt.datetime.fromtimestamp(stamp / 1e9, zoneinfo.ZoneInfo(zone))
    start, end = (dt.time(int(clock[:2]), int(clock[3:])) for clock in hours.split("-"))
    now, day = local.time(), local.date()
    before_end = now <= end if select.close_inclusive else now < end
    if start < end:
        return day if now >= start and before_end else None
    if now >= start:
        return day
    return day - dt.timedelta(days=1) if before_end else None


def jumps_into(select: Select, symbol: str, before: int, after: int) -> bool:
    """Whether a roll or split takes effect after one bar and not after the next."""
    tables = [table for table in (select.rolls, select.splits) if table is not None]
    return any(
        event["symbol"] == symbol and before < event["time"] <= after and event.get("ratio") != 1
        for table in tables
        for event in plain(table)
    )


def plain(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with instants as integers: what pyarrow makes of nanoseconds depends on whether pandas is installed."""
    numbers = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in table.columns]
    return pa.table(numbers, names=table.column_names).to_pylist()


def is_member(select: Select, symbol: str, decision: int) -> bool:
    return any(
        entry["symbol"] == symbol and entry["start"] <= decision and (entry["end"] is None or decision < entry["end"])
        for entry in plain(select.universe)
    )


def model(
    pack: Pack, window: int, target: Target | None, select: Select
) -> tuple[list[tuple[int, Any]], dict[str, int]]:
    """Decision rows with their targets, and rows by reason, one row after another."""
    symbols = [symbol for symbol, count in zip(pack.symbols, pack.counts.tolist(), strict=True) for _ in range(count)]
    times = pack.times.tolist()
    step = pack.interval.nanoseconds
    session = [None if select.session is None else session_of(time, select) for time in times]
    filled = pack.column("is_filled").tolist() if "is_filled" in pack.columns else [0.0] * pack.n_rows
    # The last real bar of the symbol before each row: a roll or split begins at a real bar.
    real_before = [
        max((times[r] for r in range(row) if symbols[r] == symbols[row] and not filled[r]), default=-(2**63))
        for row in range(pack.n_rows)
    ]
    run_of, begins = [0], ["warm-up of the window"]
    for row in range(1, pack.n_rows):
        begin = None
        if symbols[row] != symbols[row - 1]:
            begin = "warm-up of the window"
        elif not filled[row] and jumps_into(select, symbols[row], real_before[row], times[row]):
            begin = "roll or split in the window"
        elif session[row] != session[row - 1]:
            begin = "session boundary in the window"
        elif (times[row] - times[row - 1]) // step - 1 > select.max_gap:
            begin = "gap in the window"
        run_of.append(run_of[-1] + (begin is not None))
        if begin:
            begins.append(begin)
    columns = {name: pack.column(name).tolist() for name in pack.columns}
    served = pack.columns if select.columns is None else select.columns
    reasons = dict.fromkeys(REASONS, 0)
    samples: list[tuple[int, Any]] = []
    start, end = select.interval or (None, None)
    for row in range(pack.n_rows):
        rows = range(row - window + 1, row + 1)
        decision = dt.datetime.fromtimestamp((times[row] + step) / 1e9, dt.UTC)
        history = [r for r in range(row + 1) if symbols[r] == symbols[row] and not filled[r]]
        answer: float | str | None = None
        if select.symbols is not None and symbols[row] not in select.symbols:
            answer = "symbol not selected"
        elif (start is not None and decision < start) or (end is not None and decision >= end):
            answer = "outside the interval"
        elif select.session is not None and session[row] is None:
            answer = "outside the session"
        elif len(history) < select.min_history:
            answer = "history too short"
        elif rows[0] < 0 or run_of[rows[0]] != run_of[row]:
            is_short = symbols.count(symbols[row]) < window
            answer = "symbol shorter than the window" if is_short else begins[run_of[row]]
        elif select.universe is not None and not is_member(select, symbols[row], times[row] + step):
            answer = "not in the universe"
        elif filled[row] and not select.allow_filled:
            answer = "decision at a filled bar"
        elif (times[row] + step) // step % select.stride:
            answer = "not on the stride"
        elif any(not math.isfinite(columns[name][r]) for name in served for r in rows):
            answer = "missing value in the window"
        elif target is not None:
            leave = row + target.delay + target.horizon
            used = (leave,) if target.kind == "value" else (row + target.delay, leave)
            if leave >= pack.n_rows or run_of[leave] != run_of[row]:
                answer = "label beyond the end of the run"
            elif not select.allow_filled and any(filled[r] for r in used):
                answer = "entry or exit at a filled bar"
            else:
                answer = value_of(
                    target, columns[target.price][row + target.delay], columns[target.exit or target.price][leave]
                )
        if isinstance(answer, str):
            reasons[answer] += 1
        else:
            samples.append((row, answer))
    return samples, reasons


def assert_equals_the_model(pack: Pack, window: int, target: Target | None, select: Select) -> None:
    samples, reasons = model(pack, window, target, select)
    if not samples:
        with pytest.raises(SampleError, match=f"no sample in {pack.n_rows:,} rows"):
            build_index(pack, window, target, select)
        return
    index = build_index(pack, window, target, select)
    rows = index.rows(np.arange(index.n_samples))
    assert rows.tolist() == [row for row, _ in samples]
    assert index.reasons == reasons
    assert index.n_samples + sum(index.reasons.values()) == pack.n_rows
    if target is None:
        assert index.y is None
        return
    assert index.y is not None
    assert index.y.dtype == np.float32
    wanted = np.array([value for _, value in samples], np.float64).astype(np.float32)
    if target.kind == "log_return":
        np.testing.assert_array_max_ulp(index.y[rows], wanted, maxulp=2)
    else:
        assert np.array_equal(index.y[rows], wanted)


@st.composite
def targets(draw: st.DrawFn) -> Target:
    kind = draw(st.sampled_from(KINDS))
    arguments: dict[str, Any] = {"kind": kind}
    if kind == "direction":
        arguments |= {"threshold": draw(st.sampled_from([0.0, 1e-6, 0.5])), "classes": draw(st.sampled_from([2, 3]))}
    names = st.sampled_from(["volume", "vwap", "open", "close", "high"])
    arguments |= {"price": draw(names), "exit": draw(st.none() | names)}
    arguments |= {"delay": draw(st.integers(0, 3)), "horizon": draw(st.integers(0, 4))}
    is_open = arguments["price"] == "open", (arguments["exit"] or arguments["price"]) == "open"
    entry = 2 * arguments["delay"] + (not is_open[0])
    leave = 2 * (arguments["delay"] + arguments["horizon"]) + (not is_open[1])
    if entry < 1:
        arguments["delay"] = 1
    if leave <= entry:
        arguments["horizon"] += 1
    return Target(**arguments)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Pack, int, Target | None, Select]:
    window = draw(st.integers(1, 5))
    target = draw(targets() | targets() | st.none())
    reach = 0 if target is None else target.delay + target.horizon
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = sorted({1, max(1, window - 1), window, max(1, window + reach - 1), window + reach, window + reach + 1})
    steps: dict[str, list[int]] = {}
    for symbol in draw(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=3, unique=True)):
        gaps = np.ones(40, np.int64)
        n_gaps = draw(st.integers(0, 4))
        gaps[random.integers(0, 40, n_gaps)] = random.integers(2, 5, n_gaps)
        length = 40 if random.random() < 0.5 else random.choice(lengths)
        steps[symbol] = np.cumsum(gaps)[:length].tolist()
    share = random.choice([0.0, 0.02, 0.05])

    def spoilt(values: list[float], *bad: float) -> list[float]:
        return [random.choice(bad) if random.random() < share else value for value in values]

    close = [1e6 * k + row for k, some in enumerate(steps.values(), 1) for row in range(len(some))]
    columns = {
        "close": spoilt(list(close), 0.0, -5.0, 1e-30, 3e38),
        "open": spoilt([value - 0.25 for value in close], 0.0, -1.0),
        "volume": spoilt(random.integers(0, 4, len(close)).astype(float).tolist(), 0.0, NAN, math.inf),
        "vwap": spoilt([value + 0.125 for value in close], NAN, -3e38, math.inf),
    }
    for name in ("volume", "vwap"):  # a column without a value is no column
        if all(map(math.isnan, columns[name])):
            columns[name][0] = 1.0
    if draw(st.booleans()):
        columns["is_filled"] = random.choice([0.0, 0.0, 0.0, 1.0], len(close)).tolist()
    pack = memory_pack(steps, **columns)
    symbols = draw(st.none() | st.none() | st.lists(st.sampled_from(sorted(steps)), min_size=1, unique=True))

    def bound() -> dt.datetime | None:
        if random.random() < 0.7:
            return None
        return dt.datetime.fromtimestamp(START // 10**9 + 60 * int(random.integers(45)), dt.UTC)

    start, end = bound(), bound()
    interval = None if start is not None and end is not None and start >= end else (start, end)
    options: dict[str, Any] = {"max_gap": draw(st.sampled_from([0, 0, 1, 2]))}
    if draw(st.booleans()):
        options |= selections(draw, random, pack)
    return pack, window, target, Select(symbols=symbols, interval=interval, **options)


def selections(draw: st.DrawFn, random: np.random.Generator, pack: Pack) -> dict[str, Any]:
    """Some of the further selections."""

    def instants(n: int) -> pa.Array:
        return pa.array(START + random.integers(-2, 60, n) * MINUTE, pa.timestamp("ns", "UTC"))

    def some(n: int) -> list[str]:
        return ["A", *random.choice([*pack.symbols, "ZZ", pack.symbols[0]], n).tolist()][-n:] if n else []

    options: dict[str, Any] = {}
    if draw(st.booleans()):
        hours = draw(st.sampled_from(["00:05-00:20 UTC", "19:10-19:00 America/New_York", "05:30-06:00 Asia/Kolkata"]))
        options |= {"session": hours, "close_inclusive": draw(st.booleans())}
    if draw(st.booleans()):
        options["rolls"] = pa.table({"symbol": [*some(3), pack.symbols[0]], "time": instants(4)})
    if draw(st.booleans()):
        ratios = [2.0, 1.0, 0.1]
        options["splits"] = pa.table({"symbol": [*some(2), pack.symbols[0]], "time": instants(3), "ratio": ratios})
    if draw(st.booleans()):
        starts = instants(4)
        lengths = pa.array(random.integers(1, 30, 4) * MINUTE, pa.duration("ns"))
        ends = pc.if_else(pa.array([True, True, False, True]), pc.add(starts, lengths), None)
        options["universe"] = pa.table({"symbol": [*some(3), pack.symbols[0]], "start": starts, "end": ends})
    options["stride"] = draw(st.sampled_from([1, 1, 2, 5]))
    options["min_history"] = draw(st.sampled_from([0, 0, 1, 3, 30, 2**70]))
    options["columns"] = draw(st.sampled_from([None, ("close",), ("vwap", "open"), pack.columns]))
    options["allow_filled"] = draw(st.booleans())
    return options


@settings(deadline=None, max_examples=400)
@given(case=cases())
def test_equals_the_model(case: tuple[Pack, int, Target | None, Select]) -> None:
    assert_equals_the_model(*case)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_chunks_of_rows_have_no_seam(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(labelling, "_CHUNK_ROWS", size)
    pack = memory_pack({"A": range(9), "B": [0, 1, 2, 5, 6, 7, 8], "C": range(4)})
    for delay, horizon in ((0, 1), (1, 2), (2, 3), (20, 1)):
        assert_equals_the_model(pack, 2, Target(delay=delay, horizon=horizon), Select())


@pytest.mark.parametrize("length", range(1, 12))
def test_the_shortest_symbol_that_has_a_sample(length: int) -> None:
    """A window of 4, a delay of 2 and a horizon of 3 need 9 rows."""
    target = Target(horizon=3, delay=2)
    if length < 9:
        with pytest.raises(
            SampleError, match=f"the longest run has {length} rows, the window needs 4 and the target 5"
        ):
            build_index(memory_pack({"A": range(length)}), 4, target, Select())
    else:
        index = build_index(memory_pack({"A": range(length)}), 4, target, Select())
        assert index.rows(np.arange(index.n_samples)).tolist() == list(range(3, length - 5))
    index = build_index(memory_pack({"A": range(length), "B": range(9)}), 4, target, Select())
    assert index.n_samples == max(0, length - 8) + 1


def test_targets_do_not_look_across_symbols() -> None:
    """With closes of 1e6 * symbol + row every difference tells how far apart entry and exit are."""
    pack = memory_pack({"A": range(50), "B": range(50), "C": range(50)})
    index = build_index(pack, 5, Target(horizon=7, kind="difference"), Select())
    rows = index.rows(np.arange(index.n_samples))
    assert index.y is not None
    assert set(index.y[rows].tolist()) == {7.0}
    value = build_index(pack, 5, Target(horizon=7, delay=3, kind="value"), Select())
    assert value.y is not None
    rows = value.rows(np.arange(value.n_samples))
    assert np.array_equal(value.y[rows], pack.rows[rows + 10, 3])


def test_returns_are_of_float64() -> None:
    """Moves of 1e-9 at 60,000 vanish in float32 prices, not in the target."""
    rng = np.random.default_rng(3)
    closes = 60_000 * np.cumprod(1 + rng.normal(0, 1e-9, 500))
    pack = memory_pack({"A": range(500)}, close=closes)
    for kind, exact in (
        ("return", closes[3:] / closes[1:-2] - 1),
        ("log_return", np.log(closes[3:] / closes[1:-2])),
        ("difference", closes[3:] - closes[1:-2]),
    ):
        index = build_index(pack, 1, Target(horizon=2, kind=kind), Select())  # type: ignore[arg-type]
        assert index.y is not None
        assert np.array_equal(index.y[:497], exact.astype(np.float32))
    assert np.abs(closes[3:] / closes[1:-2] - 1).max() < 1e-8
    assert len(np.unique(closes.astype(np.float32))) == 1


def test_moves_of_exactly_the_threshold_are_zero() -> None:
    pack = memory_pack({"A": range(5)}, close=[100.0, 125.0, 93.75, 125.0, 160.0])
    index = build_index(pack, 1, Target(horizon=1, delay=0, kind="direction", threshold=0.25), Select())
    assert index.y is not None
    assert index.y[:4].tolist() == [0.0, 0.0, 1.0, 1.0]
    two = build_index(pack, 1, Target(horizon=1, delay=0, kind="direction", threshold=0.25, classes=2), Select())
    assert two.rows(np.arange(2)).tolist() == [2, 3]
    assert two.reasons["direction zero left out"] == 2


def test_an_open_can_be_left_in_the_same_bar() -> None:
    pack = memory_pack({"A": range(4)})
    index = build_index(pack, 1, Target("open", exit="close", horizon=0, kind="difference"), Select())
    assert index.y is not None
    assert index.y[:3].tolist() == [0.25, 0.25, 0.25]


def test_one_symbols_gap_removes_no_sample_of_another() -> None:
    pack = memory_pack({"A": range(6), "B": range(6)}, vwap=[*[1.0] * 6, 1.0, NAN, *[1.0] * 4])
    index = build_index(pack, 2, None, Select())
    assert index.rows(np.arange(index.n_samples)).tolist() == [1, 2, 3, 4, 5, 9, 10, 11]
    assert index.reasons["missing value in the window"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"price": "open", "delay": 0, "horizon": 1}, "before the decision"),
        ({"horizon": 0}, "exit must lie after the entry"),
        ({"price": "close", "exit": "open", "horizon": 0}, "exit must lie after the entry"),
        ({"price": "open", "horizon": 0}, "exit must lie after the entry"),
        ({"horizon": -1}, "horizon is -1"),
        ({"horizon": 1.5}, "horizon is 1.5"),
        ({"horizon": True}, "horizon is True"),
        ({"horizon": 1, "delay": -1}, "delay is -1"),
        ({"horizon": 1, "kind": "profit"}, "kind is 'profit'; there are: return, log_return"),
        ({"horizon": 1, "kind": ["return"]}, "kind is"),
        ({"horizon": 1, "threshold": 0.1}, "belong to kind='direction'"),
        ({"horizon": 1, "classes": 2}, "belong to kind='direction'"),
        ({"horizon": 1, "kind": "direction", "classes": 4}, "classes is 4"),
        ({"horizon": 1, "kind": "direction", "threshold": -0.1}, "threshold is -0.1"),
        ({"horizon": 1, "kind": "direction", "threshold": NAN}, "threshold is nan"),
        ({"horizon": 1, "kind": "direction", "threshold": math.inf}, "threshold is inf"),
        ({"horizon": 1, "kind": "direction", "threshold": "0.1"}, "threshold is '0.1'"),
        ({"horizon": 1, "price": 3}, "price is 3"),
        ({"horizon": 1, "exit": ""}, "exit is ''"),
    ],
)
def test_targets_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleError, match=words.replace("(", r"\(")):
        Target(**arguments)


PACK = memory_pack({"A": range(10), "B": [0, 1, 2, 7, 8]})


@pytest.mark.parametrize(
    ("window", "target", "select", "words"),
    [
        (11, None, {}, r"the longest run has 10 rows, the window needs 11; .*max_gap is 0"),
        (8, Target(horizon=2), {}, r"longest run has 10 rows, .* needs 8 and the target 3 more \(delay 1, horizon 2\)"),
        (2**70, None, {}, "the longest run has 10 rows"),
        (2, Target(horizon=2**70), {}, "the longest run has 10 rows"),
        (2, Target(horizon=1, delay=2**70), {}, "the longest run has 10 rows"),
        (0, None, {}, "window is 0"),
        (-3, None, {}, "window is -3"),
        (2.0, None, {}, "window is 2.0"),
        (True, None, {}, "window is True"),
        ("2", None, {}, "window is '2'"),
        (2, Target("vwap", horizon=1), {}, "the target needs column 'vwap'; the pack has: open, high, low, close"),
        (2, Target(horizon=1, exit="bid"), {}, "the target needs column 'bid'"),
        (2, None, {"symbols": ("A", "C")}, "no symbol 'C'; it has 2: A, B"),
        (2, None, {"symbols": (1,)}, "no symbol 1"),
        (2, None, {"symbols": ()}, r"no sample in 15 rows: widen the selection.*15 rows: symbol not selected"),
        (2, None, {"interval": ("2025-01-01", None)}, "15 rows: outside the interval"),
        (2, None, {"interval": (None, "2023-12-31")}, "15 rows: outside the interval"),
        (5, None, {"symbols": ("B",)}, "5 rows: gap in the window|2 rows: gap in the window"),
    ],
)
def test_samples_that_are_refused(window: Any, target: Target | None, select: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleError, match=words):
        build_index(PACK, window, target, Select(**select))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_gap": -1}, "max_gap is -1"),
        ({"max_gap": 1.0}, "max_gap is 1.0"),
        ({"max_gap": True}, "max_gap is True"),
        ({"symbols": "AAPL"}, "symbols is the text 'AAPL'"),
        ({"symbols": 5}, "symbols is 5"),
        ({"interval": "2024"}, "interval is '2024'"),
        ({"interval": 2024}, "interval is 2024"),
        ({"interval": ("2024-01-01",)}, "start, end"),
        ({"interval": ("2024-01-01", "2024-01-01")}, "is empty"),
        ({"interval": ("2024-01-02", "2024-01-01")}, "is empty"),
        ({"interval": ("soon", None)}, "'soon' is no instant"),
        ({"interval": (5, None)}, "5 is no instant"),
        ({"interval": (None, 1.5)}, "1.5 is no instant"),
        ({"interval": ("1500-01-01", None)}, "'1500-01-01'.* 1678 to 2261"),
        ({"interval": (None, dt.datetime(9999, 12, 31))}, "9999.* 1678 to 2261"),
        ({"interval": (None, "9999-12-31T23:59:59-12:00")}, "9999.* 1678 to 2261"),
    ],
)
def test_selections_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleError, match=words):
        Select(**arguments)


@pytest.mark.parametrize(
    "start",
    [
        "2024-01-01T00:05",
        "2024-01-01T00:05Z",
        "2024-01-01T01:05+01:00",
        dt.datetime(2024, 1, 1, 0, 5),
        dt.datetime(2023, 12, 31, 19, 5, tzinfo=dt.timezone(dt.timedelta(hours=-5))),
        np.datetime64("2024-01-01T00:05"),
    ],
)
def test_instants_can_be_written_in_several_ways(start: Any) -> None:
    """The bar of 00:04 is decided at 00:05."""
    index = build_index(PACK, 2, None, Select(symbols=["A"], interval=(start, None)))
    assert index.rows(np.arange(index.n_samples)).tolist() == list(range(4, 10))
    assert index.reasons["outside the interval"] == 4


@pytest.mark.parametrize("end", ["1", "10", "123", "999"])
def test_instants_are_told_to_the_nanosecond(end: str) -> None:
    stamp = f"2024-01-01T00:05:00.123456{end}"

    class Timestamp(dt.datetime):
        """As that of pandas."""

        nanosecond = int(end.ljust(3, "0"))

    exact = int(np.datetime64(stamp, "ns").astype(np.int64))
    for start in (stamp, f"{stamp}Z", np.datetime64(stamp, "ns"), Timestamp(2024, 1, 1, 0, 5, 0, 123456)):
        assert Select(interval=(start, None)).bounds[0] == exact
    with pytest.raises(SampleError, match="is no instant"):
        Select(interval=(np.datetime64("NaT"), None))


def test_dates_are_their_first_instant() -> None:
    assert Select(interval=(dt.date(2024, 1, 1), dt.date(2024, 1, 2))).bounds == (START, START + DAY)
    assert Select(interval=("2024-01-01", "2024-01-02")).bounds == (START, START + DAY)


def test_the_interval_is_half_open_in_decisions() -> None:
    index = build_index(PACK, 1, None, Select(symbols=["A"], interval=("2024-01-01T00:03Z", "2024-01-01T00:06Z")))
    assert index.rows(np.arange(index.n_samples)).tolist() == [2, 3, 4]


def test_a_window_may_begin_before_the_interval() -> None:
    index = build_index(PACK, 5, None, Select(symbols=["A"], interval=("2024-01-01T00:06Z", "2024-01-01T00:07Z")))
    assert index.rows(np.arange(1)).tolist() == [5]


def plan_of(pack: Pack, index: SampleIndex, target: Target | None) -> Plan:
    return make_plan(pack, index, target, batch_size=4, n_batches=3, device="cpu", placement="host", path="mapped")


def test_the_plan_adds_up() -> None:
    target = Target(horizon=1, kind="direction", threshold=0.001)
    pack = memory_pack({"A": range(10), "B": [0, 1, 3, 4, 5, 6, 13, 14]})
    index = build_index(pack, 2, target, Select())
    plan = plan_of(pack, index, target)
    assert plan.n_samples == index.n_samples == 8
    assert plan.n_samples + sum(plan.reasons.values()) == plan.n_rows == pack.n_rows
    assert plan.samples_at_gap == {0: 7 + 1, 1: 7 + 3, 5: 7 + 3, 30: 7 + 5}
    for gap, n in plan.samples_at_gap.items():
        assert build_index(pack, 2, target, Select(max_gap=gap)).n_samples == n
    assert (plan.n_runs, plan.longest_run, plan.n_symbols) == (4, 10, 2)
    assert plan.rows_nbytes == pack.rows.nbytes
    assert plan.batch_nbytes == 4 * (2 * 5 + 1) * 4
    read = json.loads(json.dumps(plan.as_dict()))
    assert read["n_samples"] == 8
    assert read["samples_at_gap"] == {"0": 8, "1": 10, "5": 10, "30": 12}
    assert read["usable"] == 8 / 18
    assert read["warnings"] == list(plan.warnings)


def test_the_plan_warns_of_rows_that_are_lost() -> None:
    few = memory_pack({"A": range(10)})
    index = build_index(few, 4, None, Select())
    assert plan_of(few, index, None).usable == 0.7
    assert plan_of(few, index, None).warnings == ()
    assert "warning" not in str(plan_of(few, index, None))
    index = build_index(few, 5, None, Select())
    text = str(plan_of(few, index, None))
    assert "only 60% of the selected rows end a sample; most are lost to: warm-up of the window" in text
    assert "6 of 10 rows" in text
    assert "60.0% of the selected rows" in text
    assert "- warm-up of the window" in text
    assert "none" in text
    assert "0: 6, 1: 6, 5: 6, 30: 6" in text


def test_rows_that_were_not_selected_are_not_lost() -> None:
    pack = memory_pack({"A": range(10), "B": range(90)})
    index = build_index(pack, 3, None, Select(symbols=["A"]))
    assert plan_of(pack, index, None).usable == 0.8
    assert plan_of(pack, index, None).warnings == ()
    index = build_index(pack, 3, None, Select(symbols=["A"], interval=(None, "2024-01-01T00:05Z")))
    assert plan_of(pack, index, None).usable == 0.5
    assert "most are lost to: warm-up" in plan_of(pack, index, None).warnings[0]


@pytest.mark.parametrize(
    ("kind", "entry", "leave", "value"),
    [
        ("return", 0.0, 5.0, None),
        ("return", -0.0, 5.0, None),
        ("return", -2.0, 5.0, None),
        ("return", 5.0, 0.0, -1.0),
        ("return", 5.0, -5.0, -2.0),
        ("log_return", 0.0, 5.0, None),
        ("log_return", -2.0, -4.0, None),
        ("log_return", 5.0, 0.0, None),
        ("difference", -2.0, 0.0, 2.0),
        ("direction", -2.0, 0.0, 1.0),
        ("direction", 0.0, 0.0, 0.0),
        ("value", -2.0, 0.0, 0.0),
    ],
)
def test_prices_that_are_not_positive(kind: Any, entry: float, leave: float, value: float | None) -> None:
    pack = memory_pack({"A": range(3)}, close=[1.0, entry, leave])
    target = Target(horizon=1, kind=kind)
    if value is None:
        with pytest.raises(SampleError, match="1 rows: base of the target not positive"):
            build_index(pack, 1, target, Select())
    else:
        index = build_index(pack, 1, target, Select())
        assert index.y is not None
        assert index.y[0] == value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("entry", "leave"), [(math.inf, 5.0), (5.0, math.inf), (math.inf, math.inf), (5.0, -math.inf)])
def test_infinite_values_give_no_window_and_no_target(kind: Any, entry: float, leave: float) -> None:
    volume = [1.0, entry, leave, 1.0, 1.0, 1.0]
    index = build_index(
        memory_pack({"A": range(6)}, volume=volume), 1, Target("volume", horizon=1, kind=kind), Select()
    )
    bad = {row for row in range(6) if math.isinf(volume[row])}
    # A decision at row t enters at t + 1 and exits at t + 2; a target of kind "value" is the exit alone.
    used = (2,) if kind == "value" else (1, 2)
    lost = [t for t in range(4) if t not in bad and any(t + step in bad for step in used)]
    assert index.reasons["missing value in the window"] == len(bad)
    assert index.reasons["missing value in the target"] == len(lost)
    assert index.y is not None
    assert np.isfinite(index.y[index.rows(np.arange(index.n_samples))]).all()


def test_the_target_is_told_in_words() -> None:
    assert describe(None) == "none"
    assert describe(Target("open", exit="close", horizon=2)) == "return from open of bar t+1 to close of bar t+3"
    direction = Target(horizon=5, kind="direction", threshold=0.5, classes=2)
    assert describe(direction) == "direction from close of bar t+1 to close of bar t+6, threshold 0.5, 2 classes"


def test_the_same_bars_in_any_row_order_give_the_same_samples() -> None:
    table = bar_table({"B": [0, 1, 2, 5, 6], "A": range(6)}, vwap=[1.0, NAN, *[2.0] * 9])
    from stager.packs.packing import pack_in_memory

    target = Target(horizon=1)
    first = build_index(pack_in_memory(table), 2, target, Select())
    order = np.random.default_rng(2).permutation(table.num_rows)
    again = build_index(pack_in_memory(table.take(order)), 2, target, Select())
    assert np.array_equal(first.span_rows, again.span_rows)
    assert np.array_equal(first.span_ids, again.span_ids)
    assert first.y is not None
    assert again.y is not None
    assert np.array_equal(first.y, again.y, equal_nan=True)


def test_what_comes_after_a_label_changes_nothing() -> None:
    """Bars after the exit altered, delayed or left out: earlier samples stay bit for bit."""
    n, cut = 30, 20
    target = Target(horizon=3, delay=2)
    rng = np.random.default_rng(5)
    close = 100 + rng.normal(size=n).cumsum()
    whole = build_index(memory_pack({"A": range(n)}, close=close), 4, target, Select())
    later = [*range(cut), *(step + 7 for step in range(cut, n))]
    altered = np.concatenate([close[:cut], close[cut:] * 3])
    for steps, values in ((range(n), altered), (later, close), (range(cut), close[:cut])):
        other = build_index(memory_pack({"A": steps}, close=values), 4, target, Select())
        last = cut - target.reach  # decisions before it have their exit before the cut
        assert other.y is not None
        assert whole.y is not None
        assert np.array_equal(other.y[:last], whole.y[:last], equal_nan=True)
        mine = other.rows(np.arange(other.n_samples))
        assert mine[mine < last].tolist() == list(range(3, last))


def test_a_target_is_not_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Target(horizon=1).horizon = 2  # type: ignore[misc]
    assert Target(horizon=1) == Target("close", horizon=1, delay=1, kind="return")
    assert MINUTE * 60 * 24 == DAY


@settings(deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 1, 2, 3, 9, 1000]), min_size=1, max_size=300),
    seed=st.integers(0, 9),
)
def test_rows_of_many_samples_are_those_of_each(lengths, seed):
    """Of short and long spans in any order, and of rows in any order, as samples numbered by time have them."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *(length + 2 for length in lengths)])[:-1]
    mixed = rng.permutation(len(lengths))
    lengths = np.array(lengths)[mixed]
    span_ids = np.concatenate([[0], np.cumsum(lengths)])
    index = build_index(memory_pack({"A": range(8)}), 1, None, Select())
    index = dataclasses.replace(index, span_rows=starts[mixed], span_ids=span_ids)
    right = np.concatenate([np.arange(first, first + n) for first, n in zip(starts[mixed], lengths, strict=True)])
    ids = rng.integers(0, index.n_samples, 500)
    np.testing.assert_array_equal(index.rows(ids), right[ids])
    np.testing.assert_array_equal(index.rows(np.arange(index.n_samples)), right)
    np.testing.assert_array_equal(index.rows(ids[:7]), right[ids[:7]])
