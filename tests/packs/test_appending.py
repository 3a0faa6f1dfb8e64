"""Appending gives what packing everything at once gives, and leaves what is there as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stager.bars.read import ReadOptions
from stager.errors import BarsError, NotAPackError, PackError
from stager.packs import pieces
from stager.packs.appending import append
from stager.packs.compacting import compact
from stager.packs.layout import Pack, open_pack
from stager.packs.packing import pack, pack_in_memory
from stager.packs.verify import verify

ONE_MINUTE = ReadOptions(interval="1min")


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file and directory below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def assert_same(found: Pack, wanted: Pack) -> None:
    """Bit for bit the same pack, but for segments and provenance."""
    assert found.symbols == wanted.symbols
    assert found.columns == wanted.columns
    for name in ("first_rows", "counts", "times"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name))
    assert found.rows.dtype == np.float32
    assert found.rows.flags.c_contiguous
    assert found.rows.tobytes() == np.asarray(wanted.rows).tobytes()
    for name in found.columns:
        assert found.column(name).tobytes() == wanted.column(name).tobytes()
    assert found.bars.to_pydict().keys() == wanted.bars.to_pydict().keys()
    assert found.bars["symbol"].to_pylist() == wanted.bars["symbol"].to_pylist()
    assert found.bars.schema.equals(wanted.bars.schema)
    assert found.bars["time"].equals(wanted.bars["time"])
    assert found.fingerprint == wanted.fingerprint
    for name in ("columns", "span", "n_rows", "n_symbols", "interval", "timestamps", "adjustment", "dropped"):
        assert getattr(found.manifest, name) == getattr(wanted.manifest, name), name


@st.composite
def cut_tables(draw: st.DrawFn) -> tuple[pa.Table, list[pa.Table]]:
    """Bars, and the same bars in parts that overlap, follow one another, lie in each other, or add symbols."""
    symbols = draw(st.lists(st.sampled_from(["A", "AA", "B", "é", "1E5", "NA"]), min_size=1, max_size=4, unique=True))
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(symbols), st.integers(0, draw(st.sampled_from([6, 40, 10**6])))),
            min_size=1,
            max_size=60,
            unique=True,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, n_parts = len(steps), draw(st.integers(2, 5))
    values = rng.normal(100, 1, (n, 5))
    extra = np.where(rng.random(n) < 0.3, np.nan, rng.normal(0, 1, n))
    extra[0] = 1.5
    table = pa.table(
        {
            "symbol": pa.array([symbol for symbol, _ in steps]),
            "time": pa.array([START + step * MINUTE for _, step in steps], pa.timestamp("ns", "UTC")),
            **{name: values[:, i] for i, name in enumerate(("open", "high", "low", "close", "volume"))},
            "extra": extra,
        }
    )
    kind = draw(st.sampled_from(["any", "later", "symbols"]))
    if kind == "any":
        part_of = rng.integers(0, n_parts, n)
    elif kind == "later":
        part_of = np.argsort(np.argsort([step for _, step in steps])) * n_parts // n
    else:
        part_of = np.array([symbols.index(symbol) % n_parts for symbol, _ in steps])
    part_of[0] = 0  # the first part has a value of every column
    again = rng.random(n) < 0.2
    parts = [
        table.take(np.flatnonzero((part_of == part) | (again & (part_of < part) & (rng.random(n) < 0.5))))
        for part in range(n_parts)
    ]
    return table, [part for part in parts if part.num_rows]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=cut_tables(), short=st.sampled_from([1, 64]))
def test_appending_is_packing_at_once(tmp_path: Path, cut: tuple[pa.Table, list[pa.Table]], short: int) -> None:
    table, parts = cut
    target = tmp_path / "x.pack"
    pack(parts[0], target, read=ONE_MINUTE, overwrite=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_SHORT_ROWS", short)
        patch.setattr(pieces, "_CHUNK_ROWS", 7)
        for part in parts[1:]:
            append(target, part)
        assert verify(target) == []
        assert_same(open_pack(target), pack_like(parts, table))


def pack_like(parts: list[pa.Table], table: pa.Table) -> Pack:
    """The bars of all parts packed at once, in memory."""
    packed = pack_in_memory(pa.concat_tables(parts), ONE_MINUTE)
    assert packed.n_rows == table.num_rows
    return packed


def test_segments_are_left_as_they_are(tmp_path: Path) -> None:
    target = tmp_path / "x.pack"
    old = pack(bar_table({"A": range(5), "B": range(3)}), target)
    before = {name: data for name, data in snapshot(target).items() if name.startswith("segment")}
    inode = (target / "segment-0" / "rows.npy").stat().st_ino
    found = append(target, bar_table({"A": range(5, 9)}))
    after = snapshot(target)
    assert {name: after[name] for name in before} == before
    assert (target / "segment-0" / "rows.npy").stat().st_ino == inode
    assert [segment.n_rows for segment in found.manifest.segments] == [8, 4]
    assert len(found.manifest.inputs) == 2
    assert os.listdir(tmp_path) == ["x.pack"]
    # A pack that was opened before stays what it was.
    assert (old.n_rows, len(old.rows)) == (8, 8)


def test_many_appends(tmp_path: Path) -> None:
    target = tmp_path / "x.pack"
    symbols = [f"S{number:03}" for number in range(50)]
    days = [bar_table({s: range(day * 4, day * 4 + 4) for s in symbols[: 30 + day]}) for day in range(20)]
    pack(days[0], target)
    for day in days[1:]:
        append(target, day)
    assert len(open_pack(target).manifest.segments) == 20
    assert_same(open_pack(target), pack_in_memory(pa.concat_tables(days), ONE_MINUTE))
    assert verify(target) == []


def test_what_is_there_already_is_dropped_and_counted(tmp_path: Path) -> None:
    target = tmp_path / "x.pack"
    table = bar_table({"A": range(5)})
    pack(table, target)
    found = append(target, table)
    assert len(found.manifest.segments) == 1
    assert found.manifest.dropped["duplicate"] == 5
    assert len(found.manifest.inputs) == 2
    assert append(target, bar_table({"A": range(7)})).manifest.dropped["duplicate"] == 10
    assert open_pack(target).n_rows == 7
    assert verify(target) == []


def scaled(table: pa.Table, factor: float, rows: slice = slice(None), *names: str) -> pa.Table:
    for name in names or ("open", "high", "low", "close"):
        values = table[name].to_numpy().copy()
        values[rows] = values[rows] * factor
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    return table


class TestDifferingBars:
    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        target = tmp_path / "x.pack"
        pack(bar_table({"A": range(5), "B": range(5)}, volume=range(10)), target)
        return target

    def refused(self, target: Path, table: pa.Table) -> str:
        before = snapshot(target.parent)
        with pytest.raises(PackError) as refused:
            append(target, table)
        assert snapshot(target.parent) == before
        return str(refused.value)

    def test_one_value(self, target: Path) -> None:
        table = scaled(overlapping(), 1.5, slice(0, 1), "close")
        close = 1e6 + 3
        told = self.refused(target, table)
        assert "1 bars of 1 symbols differ" in told
        assert f"A at 2024-01-01 00:03:00: close {close!r} in the pack, {1.5 * close!r} in the input" in told
        assert "re-adjusted" not in told
        assert "remove these bars from the input, or pack all files again" in told

    @pytest.mark.parametrize("factor", [0.25, 0.998, 2.0, 1.0625])
    def test_a_constant_ratio_is_an_adjustment(self, target: Path, factor: float) -> None:
        told = self.refused(target, scaled(overlapping(), factor, slice(0, 6)))
        assert f"all prices of its 2 overlapping bars differ by the ratio {factor:.4g}: re-adjusted" in told
        assert "the prices of 1 symbols were re-adjusted" in told

    def test_rounded_prices_have_a_ratio_too(self, target: Path) -> None:
        table = scaled(overlapping(), 0.25, slice(0, 6))
        rounded = {name: np.round(table[name].to_numpy(), -1) for name in ("open", "high", "low", "close")}
        for name, values in rounded.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        table = pa.concat_tables([table.slice(0, 6), overlapping().slice(6)])
        assert "differ by the ratio 0.25" in self.refused(target, table)

    def test_other_volume_is_no_adjustment(self, target: Path) -> None:
        told = self.refused(target, scaled(overlapping(), 2.0, slice(None), "volume"))
        assert "by the ratio" not in told
        assert "A at 2024-01-01 00:03:00: volume 3.0 in the pack, 6.0 in the input" in told

    def test_no_ratio_of_a_price_of_zero_or_a_sign(self, target: Path) -> None:
        for factor in (0.0, -1.0):
            assert "by the ratio" not in self.refused(target, scaled(overlapping(), factor, slice(0, 6)))

    def test_missing_values_are_compared(self, tmp_path: Path) -> None:
        target = tmp_path / "y.pack"
        extra = [1.0, np.nan, 3.0]
        pack(bar_table({"A": range(3)}, extra=extra), target)
        same = bar_table({"A": range(4)}, extra=[*extra, 4.0])
        assert append(target, same).manifest.dropped["duplicate"] == 3
        told = self.refused(target, bar_table({"A": range(3)}, extra=[1.0, 2.0, 3.0]))
        assert "extra nan in the pack, 2.0 in the input" in told

    def test_some_of_many_symbols_are_shown(self, tmp_path: Path) -> None:
        target = tmp_path / "y.pack"
        table = bar_table({f"S{number}": range(3) for number in range(9)})
        pack(table, target)
        told = self.refused(target, scaled(table, 2.0))
        assert "27 bars of 9 symbols" in told
        assert "and 4 more symbols" in told
        assert "the prices of 9 symbols" in told


def overlapping() -> pa.Table:
    """Rows 3 to 8 of A (two of them in the pack), then all of B."""
    table = bar_table({"A": range(9), "B": range(9)}, volume=[*range(5), *range(20, 24), *range(5, 14)])
    return pa.concat_tables([table.slice(3, 6), table.slice(9)])


class TestWhatDoesNotFit:
    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        target = tmp_path / "x.pack"
        pack(bar_table({"A": range(5)}, extra=range(5)), target, read=ReadOptions(adjustment="split"))
        return target

    def refused(self, target: Path, table: Any, kind: type[Exception] = PackError, **options: Any) -> str:
        before = snapshot(target.parent)
        with pytest.raises(kind) as refused:
            append(target, table, read=ReadOptions(**options))
        assert snapshot(target.parent) == before
        return str(refused.value)

    def test_another_interval(self, target: Path) -> None:
        told = self.refused(target, bar_table({"A": [9]}, extra=[1]), interval="5min")
        assert "the bars are of 5min, those of the pack of 1min" in told

    def test_a_step_of_another_interval_is_told(self, target: Path) -> None:
        found = append(target, bar_table({"A": range(10, 60, 5)}, extra=range(10)))
        assert any("appended bars is 5min, and the pack's interval 1min" in w for w in found.manifest.warnings)

    def test_another_adjustment(self, target: Path) -> None:
        table = bar_table({"A": [9]}, extra=[1])
        assert "told is raw, that of the pack split" in self.refused(target, table, adjustment="raw")
        assert append(target, table).manifest.adjustment == "split"

    def test_a_column_less(self, target: Path) -> None:
        assert "the input has no column 'extra'" in self.refused(target, bar_table({"A": [9]}))

    def test_a_column_without_values_is_missing_values(self, target: Path) -> None:
        found = append(target, bar_table({"A": [9, 10]}, extra=[None, None]))
        assert np.isnan(found.column("extra")).tolist() == [False] * 5 + [True] * 2
        assert found.manifest.columns[-1].n_missing == 2
        assert verify(target) == []

    def test_a_column_more_is_left_out_and_told(self, target: Path) -> None:
        found = append(target, bar_table({"A": [9]}, extra=[1], more=[2]))
        assert "more" not in found.columns
        assert "column 'more' is left out: the pack does not have it" in found.manifest.warnings

    def test_columns_in_another_order(self, target: Path) -> None:
        table = bar_table({"A": [9]}, extra=[7])
        found = append(target, table.select(["extra", "volume", "close", "time", "low", "open", "symbol", "high"]))
        assert found.column("extra").tolist() == [0, 1, 2, 3, 4, 7]
        assert verify(target) == []

    def test_session_dates_and_instants(self, tmp_path: Path) -> None:
        target = tmp_path / "d.pack"
        dates = bar_table({"A": range(5)}, unit=DAY)
        assert pack(dates, target).manifest.timestamps == "session"
        told = self.refused(target, bar_table({"A": [6, 7]}, unit=DAY, start=START + 3600 * 10**9))
        assert "the times of the input are instants, those of the pack session dates" in told
        assert append(target, bar_table({"A": [6]}, unit=DAY)).n_rows == 6

    def test_stamps_that_marked_the_end(self, tmp_path: Path) -> None:
        target = tmp_path / "c.pack"
        pack(bar_table({"A": range(1, 5)}), target, read=ReadOptions(label="close"))
        assert "say --label close" in self.refused(target, bar_table({"A": range(5, 7)}))
        found = append(target, bar_table({"A": range(5, 7)}), read=ReadOptions(label="close"))
        assert ((found.times - START) // MINUTE).tolist() == [0, 1, 2, 3, 4, 5]

    def test_no_bar(self, target: Path) -> None:
        self.refused(target, bar_table({"A": []}, extra=[]), BarsError)

    def test_a_value_too_large(self, target: Path) -> None:
        told = self.refused(target, bar_table({"A": [9]}, extra=[1e300]), BarsError)
        assert "above 3.4e38" in told

    def test_no_pack(self, tmp_path: Path) -> None:
        with pytest.raises(NotAPackError):
            append(tmp_path / "no.pack", bar_table({"A": range(3)}))
        assert list(tmp_path.iterdir()) == []


def test_bars_in_between_and_new_symbols_are_told(tmp_path: Path) -> None:
    target = tmp_path / "x.pack"
    pack(bar_table({"A": [0, 1, 5], "C": [0, 1]}), target)
    found = append(target, bar_table({"A": [2, 3, 6], "B": [0]}))
    assert [w for w in found.manifest.warnings if "appended" in w] == [
        "appended symbols that the pack did not have: B",
        "2 appended bars lie before the last bar that the pack had of their symbol; they were put in between",
    ]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    pack(bar_table({"A": range(3)}), tmp_path / "disk" / "x.pack")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "x.pack")
    append(tmp_path / "link", bar_table({"A": [3]}))
    assert open_pack(tmp_path / "link").n_rows == 4
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]
    assert os.listdir(tmp_path / "disk") == ["x.pack"]


def test_any_step_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, bars = tmp_path / "x.pack", bar_table({"A": range(3, 6)})
    pack(bar_table({"A": range(3)}), target)
    before = snapshot(tmp_path)
    for name in ("rename", "fsync", "mkdir"):
        for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
            call = 0
            while True:
                calls, real = iter(range(1000)), getattr(os, name)

                def failing(*arguments: Any, **keywords: Any) -> Any:
                    if next(calls) == call:  # noqa: B023
                        raise error  # noqa: B023
                    return real(*arguments, **keywords)  # noqa: B023

                with monkeypatch.context() as patch:
                    patch.setattr(os, name, failing)
                    try:
                        append(target, bars)
                    except (PackError, KeyboardInterrupt):
                        assert open_pack(target).n_rows == 3 or (name, call) == ("fsync", 6)
                        assert snapshot(tmp_path) == before or (name, call) == ("fsync", 6)
                    else:
                        # Only after the commit may a step fail without harm.
                        assert open_pack(target).n_rows == 6
                        break
                call += 1
            assert call > 0
            shutil.rmtree(target)
            pack(bar_table({"A": range(3)}), target)
            before = snapshot(tmp_path)


KILLED = """
import itertools, os, shutil, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from bars_fixtures import bar_table
from stager.packs import publish
from stager.packs.appending import append
from stager.packs.compacting import compact
from stager.packs.layout import open_pack
from stager.packs.packing import pack
from stager.packs.verify import verify

place, target = Path(sys.argv[2]), Path(sys.argv[2]) / "x.pack"
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
left = None

def die_when_due(*_):
    global left
    if left is not None:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

def hook(event, arguments):
    reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event in EVENTS and not reads and "x.pack" in str(arguments[0]):
        die_when_due()

fsync = os.fsync
def counted(descriptor):
    die_when_due()
    fsync(descriptor)
    die_when_due()

def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def prepare():
    pack(bar_table({"A": range(3), "B": range(2)}), target, overwrite=True)

def kill_at(step):
    global left
    sys.addaudithook(hook)
    os.fsync = counted
    left = step
    append(target, bar_table({"A": range(3, 6), "AB": range(2)}))

def check():
    found = open_pack(target)
    n_rows = found.n_rows
    assert n_rows in (5, 10), n_rows
    assert len(found.rows) == n_rows and verify(target) == []
    if n_rows == 5:
        append(target, bar_table({"A": [7]}))
        append(target, bar_table({"A": range(3, 6), "AB": range(2)}))
        assert open_pack(target).n_rows == 11 and verify(target) == []
        assert sorted(os.listdir(target)) == ["manifest.json", "segment-0", "segment-1", "segment-2"]
        assert os.listdir(place) == ["x.pack"]
    print("old" if n_rows == 5 else "new", flush=True)

for step in itertools.count():
    assert in_child(prepare) == 0
    status = in_child(lambda: kill_at(step))
    assert in_child(check) == 0
    if not os.WIFSIGNALED(status):
        assert status == 0
        break
"""


def test_killed_at_every_step(tmp_path: Path) -> None:
    """The pack is the old or the new one, whole, and a later append works."""
    tests = str(Path(__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, tests, str(tmp_path)], capture_output=True, text=True, timeout=250
    )
    assert ran.returncode == 0, ran.stderr
    states = ran.stdout.split()
    assert states == sorted(states, reverse=True)
    assert states.count("old") > 15
    assert states.count("new") > 1


class TestCompacting:
    @settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(cut=cut_tables())
    def test_it_is_packing_at_once(self, tmp_path: Path, cut: tuple[pa.Table, list[pa.Table]]) -> None:
        table, parts = cut
        target = tmp_path / "x.pack"
        pack(parts[0], target, read=ONE_MINUTE, overwrite=True)
        for part in parts[1:]:
            append(target, part)
        manifest = open_pack(target).manifest
        found = compact(target)
        assert verify(target) == []
        assert len(found.manifest.segments) == 1
        assert_same(found, pack_like(parts, table))
        assert (found.manifest.inputs, found.manifest.created) == (manifest.inputs, manifest.created)
        # The same files as those of a pack that was never appended to.
        pack(pa.concat_tables(parts), tmp_path / "at-once.pack", read=ONE_MINUTE, overwrite=True)
        for file in ("rows.npy", "bars.arrow", "symbols.arrow"):
            assert (target / "segment-0" / file).read_bytes() == (
                tmp_path / "at-once.pack" / "segment-0" / file
            ).read_bytes()
        assert sorted(os.listdir(tmp_path)) == ["at-once.pack", "x.pack"]

    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        target = tmp_path / "x.pack"
        pack(bar_table({"A": range(4), "B": range(2)}), target)
        append(target, bar_table({"A": range(4, 6)}))
        return target

    def test_one_segment_is_left_as_it_is(self, target: Path) -> None:
        compact(target)
        before = snapshot(target)
        assert compact(target).n_rows == 8
        assert snapshot(target) == before

    def test_more_can_be_appended(self, target: Path) -> None:
        compact(target)
        assert append(target, bar_table({"A": range(6, 8)})).n_rows == 10
        assert verify(target) == []

    def test_damage_is_not_sealed(self, target: Path) -> None:
        file = target / "segment-1" / "bars.arrow"
        raw = bytearray(file.read_bytes())
        place = raw.index(np.array([1e6, 1e6 + 1]).tobytes())
        raw[place] ^= 1
        file.write_bytes(raw)
        before = snapshot(target.parent)
        with pytest.raises(PackError, match=r"x\.pack: its bars are not those that were written; .*`stager verify`"):
            compact(target)
        assert snapshot(target.parent) == before

    def test_any_step_may_fail(self, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before, told = snapshot(target.parent), []
        for name in ("fsync", "posix_fallocate"):
            for call in range(50):
                calls, real = iter(range(1000)), getattr(os, name)

                def failing(*arguments: Any) -> Any:
                    if next(calls) == call:  # noqa: B023
                        raise OSError(28, "No space left on device")
                    return real(*arguments)  # noqa: B023

                with monkeypatch.context() as patch:
                    patch.setattr(os, name, failing)
                    try:
                        compact(target)
                    except PackError as error:
                        told.append(str(error))
                    else:
                        break
                assert snapshot(target.parent) == before
            shutil.rmtree(target)
            pack(bar_table({"A": range(4), "B": range(2)}), target)
            append(target, bar_table({"A": range(4, 6)}))
            before = snapshot(target.parent)
        assert len(told) >= 12
        assert all("can't be written: No space left on device" in one for one in told)

    def test_a_second_process_is_refused(self, target: Path) -> None:
        from stager.packs.publish import partial_of

        with partial_of(target), pytest.raises(PackError, match="another process is packing"):
            compact(target)
        with partial_of(target), pytest.raises(PackError, match="another process is packing"):
            append(target, bar_table({"A": range(6, 8)}))
