"""A pack of more data than memory is the pack that is made in memory: bytes, manifest and errors."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from bars_fixtures import bar_table, csv_text
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_contents import contents

from stager.bars import columns as bar_columns
from stager.bars import decode_arrow, decode_csv, text_parts
from stager.bars.inspection import check, with_findings
from stager.bars.read import ReadOptions
from stager.errors import PackError, StagerError
from stager.packs import packing, placing, scratch, usage
from stager.packs.packing import pack
from stager.packs.usage import Budget, Usage
from stager.packs.verify import verify

MINUTE = 60 * 10**9
# A Friday's evening before clocks are put back in New York, and forward.
STARTS = {"plain": 1_704_067_200, "back": 1_730_610_000, "forward": 1_710_028_800}


@contextmanager
def tiny(*, room: int = 1 << 40, held: int = 0, part: int = 1, workers: int = 2, chunk: int = 5) -> Iterator[None]:
    """Shares of memory so small that a few rows don't fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "of", lambda memory, n_workers, files: Budget(1 << 30, workers, room, held, part))
        patch.setattr(decode_csv, "_LEAST_PART_NBYTES", 150)
        patch.setattr(text_parts, "_LINE_NBYTES", 16)
        patch.setattr(decode_arrow, "_MOST_PART_ROWS", 7)
        patch.setattr(bar_columns, "_CHUNK_ROWS", chunk)
        patch.setattr(scratch, "_SHEET_ROWS", 2 * chunk)
        patch.setattr(placing, "_CHUNK_ROWS", 3)
        yield


def outcome(function: Any, path: Path) -> dict[str, Any] | str:
    try:
        function(path)
    except StagerError as error:
        assert not path.exists()
        assert not path.with_name(path.name + ".partial").exists()
        return f"{type(error).__name__}: {error}".replace(str(path), "PACK")
    return contents(path)


def in_memory(files: Sequence[Path], options: ReadOptions, path: Path) -> dict[str, Any] | str:
    """The same by way of all bars as one table in memory."""
    return outcome(lambda path: packing.write(with_findings(packing.read_bars(files, options)), path, False), path)


FORMS = ("utc", "local", "seconds", "session")


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[tuple[str, pa.Table]], dict[str, Any]]:
    """Tables to be written as files, each with the ending of its file, and options."""
    form = draw(st.sampled_from(FORMS))
    unit = 86_400 if form == "session" else draw(st.sampled_from([60, 1800, 3600]))
    start = STARTS[draw(st.sampled_from(sorted(STARTS)))] // 86_400 * 86_400
    names = draw(st.lists(st.sampled_from(["A", "B", "NA", "é", "000001", "Z"]), min_size=1, max_size=4, unique=True))
    has_volume = draw(st.booleans())
    further = draw(st.sets(st.sampled_from(["x", "y"])))
    tables = []
    seed = draw(st.integers(0, 2**31))
    generator = np.random.default_rng(seed)
    conflicts = draw(st.booleans())
    for number in range(draw(st.integers(1, 4))):
        n_rows, shift = draw(st.integers(0, 40)), draw(st.sampled_from([0, 0, 12])) * number
        order = draw(st.sampled_from(["any", "any", "time", "symbol", "newest first"]))
        symbols, steps = generator.choice(names, n_rows), generator.integers(0, 60, n_rows) + shift
        if order != "any":
            steps, symbols = np.repeat(np.arange(12) + shift, len(names)), np.tile(names, 12)
        if order == "symbol":
            steps, symbols = np.tile(np.arange(12) + shift, len(names)), np.repeat(names, 12)
        if order == "newest first":
            steps = steps[::-1]
        # Identical rows are of the same price, conflicting ones not.
        close = steps + 10.0 + (generator.random(len(steps)) < 0.02 if conflicts else 0)
        table: dict[str, Any] = {"time": start + steps * unit, "symbol": symbols}
        table |= {"open": close, "high": close + 0.5, "low": close - 0.5, "close": close}
        if draw(st.booleans()):
            table["low"] = np.where(steps == 7, np.nan, table["low"])
        if has_volume:
            table["volume"] = steps * 3.0
        for name in sorted(further):
            if name == "x" or draw(st.booleans()):
                is_empty = draw(st.booleans())
                table[name] = np.where((steps % 4 == 0) | is_empty, np.nan, steps / 4)
        ending = draw(st.sampled_from([".csv", ".csv", ".csv.gz", ".parquet"]))
        tables.append((ending, _as_table(table, form)))
    options: dict[str, Any] = {"duplicates": draw(st.sampled_from(["error", "first", "last"]))}
    if form == "local" and draw(st.integers(0, 9)):
        options["zone"] = "America/New_York"
    if draw(st.integers(0, 3)):
        options["interval"] = "1d" if form == "session" else f"{unit // 60}min"
    if form != "session" and draw(st.booleans()):
        options["label"] = "close"
    return tables, options


def _as_table(columns: dict[str, Any], form: str) -> pa.Table:
    seconds = np.asarray(columns["time"], np.int64)
    times: Any = pa.array(seconds)
    if form != "seconds":
        local = seconds
        times = pa.array(local).cast(pa.timestamp("s")).cast(pa.string())
        if form == "session":
            times = pa.array([text[:10] for text in times.to_pylist()], pa.string())
        if form == "utc":
            times = pa.array([text.replace(" ", "T") + "Z" for text in times.to_pylist()], pa.string())
    arrays = {"time": times, "symbol": pa.array(list(columns["symbol"]), pa.string())}
    for name, values in columns.items():
        if name not in arrays:
            arrays[name] = pa.array(np.asarray(values, np.float64), from_pandas=True)
    return pa.table(arrays)


def save(tables: Sequence[tuple[str, pa.Table]], folder: Path) -> list[Path]:
    files = []
    for number, (ending, table) in enumerate(tables):
        file = folder / f"{number}{ending}"
        if ending == ".parquet":
            time = table["time"]
            if pa.types.is_string(time.type):
                is_utc = table.num_rows and str(time[0]).endswith("Z")
                plain = pa.array([str(text).removesuffix("Z") for text in time], pa.string()).cast(pa.timestamp("ns"))
                table = table.set_column(0, "time", plain.cast(pa.timestamp("ns", "UTC")) if is_utc else plain)
            pq.write_table(table, file, row_group_size=11)
        else:
            plain_file = folder / "plain"
            pacsv.write_csv(table, plain_file, pacsv.WriteOptions(quoting_style="none"))
            text = plain_file.read_bytes().replace(b'"', b"")
            plain_file.unlink()
            file.write_bytes(gzip.compress(text) if ending.endswith(".gz") else text)
        files.append(file)
    return files


@settings(deadline=None, max_examples=150)
@given(given_inputs=inputs(), held=st.sampled_from([0, 2000, 1 << 30]), part=st.sampled_from([1, 900, 4000, 1 << 30]))
def test_it_is_the_pack_made_in_memory(
    given_inputs: tuple[list[tuple[str, pa.Table]], dict[str, Any]], held: int, part: int
) -> None:
    tables, options = given_inputs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = save(tables, folder)
        read = ReadOptions(**options)
        expected = in_memory(files, read, folder / "memory.pack")
        with tiny(held=held, part=part):
            found = outcome(lambda path: pack(files, path, read=read), folder / "x.pack")
        assert found == expected
        if not isinstance(found, str):
            assert verify(folder / "x.pack") == []


@settings(deadline=None, max_examples=100)
@given(given_inputs=inputs(), held=st.sampled_from([0, 1 << 30]))
def test_large_files_in_parts_too(given_inputs: tuple[list[tuple[str, pa.Table]], dict[str, Any]], held: int) -> None:
    """A file that is read in parts gives the same, or an error that says it can't be."""
    tables, options = given_inputs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = save(tables, folder)
        read = ReadOptions(**options)
        expected = in_memory(files, read, folder / "memory.pack")
        with tiny(room=600, held=held, part=900):
            found = outcome(lambda path: pack(files, path, read=read), folder / "x.pack")
        if isinstance(found, str) and "--memory" in found:
            # Times that occurred twice are told apart by rows that may be in another part.
            assert "occurred twice" in found
            return
        if isinstance(found, str) and isinstance(expected, str) and "occurred twice" in expected:
            return
        assert found == expected


def daily(folder: Path, n_files: int) -> list[Path]:
    """A file a day of three symbols."""
    files = [folder / f"{day}.csv" for day in range(n_files)]
    for day, file in enumerate(files):
        steps = range(1440 * day, 1440 * day + 100)
        file.write_text(csv_text(bar_table({"A": steps, "B": steps, "C": steps})))
    return files


def test_scratch_is_told_and_gone(tmp_path: Path) -> None:
    files, taken = daily(tmp_path, 4), Usage()
    with tiny():
        pack(files, tmp_path / "x.pack", usage=taken)
    assert taken.scratch_nbytes > 1200 * 48
    assert taken.anonymous_nbytes > 1 << 20
    assert sorted(path.name for path in (tmp_path / "x.pack").iterdir()) == ["manifest.json", "segment-0"]


@pytest.mark.parametrize("free", [0, 30_000])
def test_scratch_is_checked_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    files = daily(tmp_path, 4)
    room = namedtuple("room", "free")((1 << 20) + free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    with tiny(), pytest.raises(PackError, match=r"x\.pack: about .* of scratch and .* of disk .* --memory"):
        pack(files, tmp_path / "x.pack")
    assert not list(tmp_path.glob("x.pack*"))


def test_memory_is_shared_out_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "available_nbytes", lambda: 8 << 30)
    monkeypatch.setattr(usage, "total_nbytes", lambda: 16 << 30)
    monkeypatch.setattr(usage, "anonymous_nbytes", lambda: 100 << 20)
    assert Budget.of(None, 2).memory_nbytes == 4 << 30
    found = Budget.of(1 << 30, 4)
    assert found.held_nbytes + found.n_workers * max(found.room_nbytes, found.part_nbytes) < (1 << 30) - (100 << 20)
    assert found.room_nbytes > found.part_nbytes > 0
    with pytest.raises(PackError, match=r"9\.00 GiB, 8\.00 GiB are available"):
        Budget.of(9 << 30, 1)
    with pytest.raises(PackError, match=r"takes 100\.00 MiB; give at least 228\.00 MiB"):
        Budget.of(128 << 20, 1)
    monkeypatch.setattr(usage, "thread_count", lambda: 64)
    assert [Budget.of(n << 30, None).n_workers for n in (1, 2, 8)] == [6, 14, 62]
    with pytest.raises(PackError, match="workers is 0"):
        Budget.of(1 << 30, 0)
    monkeypatch.setattr(usage, "available_nbytes", lambda: 1 << 30)
    assert Budget.of(None, 2).memory_nbytes == (1 << 30) + (100 << 20)
    monkeypatch.setattr(usage, "total_nbytes", lambda: 512 << 20)
    assert Budget.of(None, 2).memory_nbytes == (100 + 64 + 256) << 20


def test_a_symbol_that_is_larger_than_memory_is_cut_by_time(tmp_path: Path) -> None:
    """Rows that come in any order, some of them twice, of one symbol beside small ones."""
    steps = np.random.default_rng(3).permutation(3000).tolist()
    table = bar_table({"A": range(3), "BIG": [*steps, *steps[:50]], "C": range(3)})
    table = table.set_column(
        table.column_names.index("close"), "close", pa.array([float(t.value) for t in table["time"]])
    )
    for name in ("open", "high", "low", "volume"):
        table = table.set_column(table.column_names.index(name), name, table["close"])
    file = tmp_path / "bars.csv"
    file.write_text(csv_text(table))
    expected = in_memory([file], ReadOptions(), tmp_path / "memory.pack")
    assert not isinstance(expected, str)
    assert expected["dropped"]["duplicate"] == 50
    with tiny(part=20_000, chunk=700):
        assert outcome(lambda path: pack([file], path), tmp_path / "x.pack") == expected


def test_files_may_stand_in_any_order(tmp_path: Path) -> None:
    files = daily(tmp_path, 5)
    with tiny(part=5000):
        prints = {pack(some, tmp_path / f"{n}.pack").fingerprint for n, some in enumerate((files, files[::-1]))}
    assert len(prints) == 1


@pytest.mark.parametrize("duplicates", ["first", "last"])
def test_first_and_last_count_files_in_their_order(tmp_path: Path, duplicates: str) -> None:
    for name, price in (("1", 5.0), ("2", 6.0), ("3", 7.0)):
        prices = dict.fromkeys(("open", "high", "low", "close"), [price] * 9)
        (tmp_path / f"{name}.csv").write_text(csv_text(bar_table({"A": range(9)}, **prices)))
    with tiny():
        found = pack(sorted(tmp_path.glob("*.csv")), tmp_path / "x", read=ReadOptions(duplicates=duplicates))  # type: ignore[arg-type]
    assert set(found.column("close")) == {5.0 if duplicates == "first" else 7.0}


@pytest.mark.parametrize(("held", "part"), [(0, 1), (0, 900), (5000, 4000), (1 << 40, 1 << 30)])
def test_what_is_wrong_is_told_as_of_bars_in_memory(tmp_path: Path, held: int, part: int) -> None:
    """Every fault that `stager check` warns of, in files in parts and symbols that are cut."""
    for number in range(3):
        steps = list(range(60 * number, 60 * number + 60))
        table = bar_table({"A": steps[::-1], "BIG": [*steps, 5], "C": steps[:40]})
        n = table.num_rows
        close = 100 + np.arange(n) % 5 + np.where(np.arange(n) > 90, 200.0, 0) + number
        open_, high, low, volume = close + 0.0, close + 1, close - 1, np.full(n, 9.0)
        volume[10:30], volume[70:75], volume[100] = 0, 0, -1
        high[66] -= 2
        low[[3, 80]] = -5
        times = table["time"].cast(pa.int64()).to_numpy().copy()
        times[[62, 77]] += 1_000_000_000
        if number == 1:
            high, low = low, high
        if number == 2:
            # In the future.
            times[-1] = 4_102_444_800 * 10**9
        names = ("open", "high", "low", "close", "volume")
        for name, values in zip(names, (open_, high, low, close, volume), strict=True):
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        stamps = pa.array(times).cast(pa.timestamp("ns", "UTC"))
        table = table.set_column(table.column_names.index("time"), "time", stamps)
        (tmp_path / f"{number}.csv").write_text(csv_text(table))
    files = sorted(tmp_path.glob("*.csv"))
    read = ReadOptions(duplicates="last", interval="1min", allow_years=(1980, 2200))
    expected = in_memory(files, read, tmp_path / "memory.pack")
    assert not isinstance(expected, str)
    shown = [one.sentence for one in check(files, read).findings if one.severity == "warning"]
    for room in (1 << 40, 600):
        with tiny(room=room, held=held, part=part):
            found = outcome(lambda path: pack(files, path, read=read, overwrite=True), tmp_path / f"{room}.pack")
        assert found == expected
        assert sorted(found["warnings"]) == sorted(shown)
    for word in ("differed from another", "swapped", "in the future", "off the grid", "zero or below", "in a row"):
        assert any(word in text for text in shown), word
    assert any("volume below 0" in text for text in shown)
    assert any("jumps of price" in text for text in shown)
    (order,) = (one for one in expected["decisions"] if one["what"] == "order")
    assert "of A, BIG came after a later one (out of order)" in order["source"]
