"""A pack is whole or absent, whatever goes wrong, and nothing foreign is ever touched."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bars_fixtures import bar_table, csv_text

from stager.bars.read import ReadOptions
from stager.errors import BarsError, NotAPackError, PackError, PackExistsError
from stager.packs import layout, packing, placing, publish, segment
from stager.packs.layout import open_pack
from stager.packs.packing import pack
from stager.packs.verify import verify

OLD = bar_table({"OLD": range(5)})
NEW = bar_table({"NEW": range(8)})


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file and directory below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(params=["absent", "older"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A target without a pack, and one with an older pack."""
    path = tmp_path / "place" / "x.pack"
    path.parent.mkdir()
    if request.param == "older":
        pack(OLD, path)
    return path


class TestOverwriting:
    def test_an_existing_pack_is_kept(self, tmp_path: Path) -> None:
        target = tmp_path / "x.pack"
        pack(OLD, target)
        before = snapshot(tmp_path)
        with pytest.raises(PackExistsError, match=r"x\.pack.*--force") as refused:
            pack(NEW, target)
        assert isinstance(refused.value, FileExistsError)
        assert snapshot(tmp_path) == before

    def test_it_is_replaced_when_asked(self, tmp_path: Path) -> None:
        target = tmp_path / "x.pack"
        pack(OLD, target)
        assert pack(NEW, target, overwrite=True).symbols == ("NEW",)
        assert verify(target) == []
        assert os.listdir(tmp_path) == ["x.pack"]

    def test_without_an_atomic_exchange_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(publish, "_exchange", lambda a, b: False)
        self.test_it_is_replaced_when_asked(tmp_path)

    def test_what_a_killed_replacement_left_is_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pack(OLD, tmp_path / "x.pack.old")
        self.test_without_an_atomic_exchange_too(tmp_path, monkeypatch)

    def test_what_is_called_old_is_not_removed_unless_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(publish, "_exchange", lambda a, b: False)
        pack(OLD, tmp_path / "x.pack")
        _write(tmp_path / "x.pack.old" / "precious.txt")
        before = snapshot(tmp_path)
        with pytest.raises(PackError, match=r"x\.pack: can't be written"):
            pack(NEW, tmp_path / "x.pack", overwrite=True)
        assert snapshot(tmp_path) == before

    def test_a_reader_of_the_old_pack_keeps_it(self, tmp_path: Path) -> None:
        old = pack(OLD, tmp_path / "x.pack")
        pack(NEW, tmp_path / "x.pack", overwrite=True)
        assert old.rows[:, 3].tolist() == old.column("close").tolist() == [1e6 + row for row in range(5)]

    def test_a_damaged_pack_is_replaced_when_asked(self, tmp_path: Path) -> None:
        target = tmp_path / "x.pack"
        pack(OLD, target)
        (target / "manifest.json").write_bytes(b"{")
        with pytest.raises(PackExistsError):
            pack(NEW, target)
        assert pack(NEW, target, overwrite=True).symbols == ("NEW",)

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        pack(OLD, tmp_path / "disk" / "x.pack")
        (tmp_path / "link").symlink_to(tmp_path / "disk" / "x.pack")
        with pytest.raises(PackExistsError):
            pack(NEW, tmp_path / "link")
        pack(NEW, tmp_path / "link", overwrite=True)
        assert (tmp_path / "link").is_symlink()
        assert open_pack(tmp_path / "disk" / "x.pack").symbols == ("NEW",)
        assert sorted(os.listdir(tmp_path)) == ["disk", "link"]
        assert os.listdir(tmp_path / "disk") == ["x.pack"]

    def test_a_link_to_nothing_leads_to_the_new_pack(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("x.pack")
        pack(NEW, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert open_pack(tmp_path / "x.pack").symbols == ("NEW",)

    @pytest.mark.parametrize("name", [".", "sub/.."])
    def test_the_working_directory_can_be_the_pack(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        pack(OLD, tmp_path / "x.pack")
        monkeypatch.chdir(tmp_path / "x.pack")
        assert pack(NEW, name, overwrite=True).symbols == ("NEW",)
        assert os.listdir(tmp_path) == ["x.pack"]


def _write(path: Path, text: str = "mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: _write(path),
    "a directory of files": lambda path: _write(path / "precious.txt"),
    "an empty directory": lambda path: path.mkdir(),
    "a web page's manifest": lambda path: (_write(path / "manifest.json", '{"name": "page"}'), _write(path / "x.js")),
    "a manifest alone": lambda path: _write(path / "manifest.json", '{"name": "page"}'),
    "a pack with notes in it": lambda path: (pack(OLD, path), _write(path / "notes.txt")),
    "a pack with notes in its segment": lambda path: (pack(OLD, path), _write(path / "segment-0" / "notes.txt")),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_no_pack_is_never_replaced(tmp_path: Path, what: str, overwrite: bool) -> None:
    FOREIGN[what](tmp_path / "x.pack")
    before = snapshot(tmp_path)
    with pytest.raises(NotAPackError, match=r"x\.pack.*-o DIR"):
        pack(NEW, tmp_path / "x.pack", overwrite=overwrite)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("what", ["a file", "a directory of files", "a pack with notes in it", "a link to itself"])
def test_what_is_called_partial_is_not_removed_unless_it_is(tmp_path: Path, what: str) -> None:
    FOREIGN[what](tmp_path / "x.pack.partial")
    before = snapshot(tmp_path)
    with pytest.raises(NotAPackError, match=r"x\.pack\.partial"):
        pack(NEW, tmp_path / "x.pack")
    assert snapshot(tmp_path) == before


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    _write(tmp_path / "file")
    with pytest.raises(PackError, match=r"file/x\.pack: can't be written"):
        pack(NEW, tmp_path / "file" / "x.pack")
    assert snapshot(tmp_path) == {"file": b"mine"}


def test_bad_input_in_the_second_file(target: Path, tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text(csv_text(NEW))
    (tmp_path / "2.csv").write_text(csv_text(NEW).replace("NEW", "TWO").replace("999999.75", "many"))
    before = snapshot(target.parent)
    with pytest.raises(BarsError, match=r"2\.csv"):
        pack([tmp_path / "1.csv", tmp_path / "2.csv"], target, overwrite=True)
    assert snapshot(target.parent) == before


def failing(function: Callable[..., Any], call: int, error: BaseException) -> Callable[..., Any]:
    """The function, failing at its k-th call."""
    calls = itertools.count(1)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == call:
            raise error
        return function(*arguments, **keywords)

    return fail


# Where writing can fail: object, attribute, and how often it is called for a new pack.
STEPS = [
    (Path, "mkdir", 2),
    (shutil, "disk_usage", 1),
    (segment, "write_arrow", 1),
    (os, "posix_fallocate", 2),
    (os, "pwrite", 20),
    (placing, "digest", 1),
    (layout, "block_checksums", 3),
    (Path, "write_bytes", 1),
    (os, "fsync", 6),
    (packing, "publish", 1),
]


@pytest.mark.parametrize(
    ("where", "name", "call"),
    [(where, name, call) for where, name, n in STEPS for call in range(1, n + 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_any_step_of_writing_may_fail(
    target: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, call: int, error: BaseException
) -> None:
    before = snapshot(target.parent)
    monkeypatch.setattr(where, name, failing(getattr(where, name), call, error))
    if isinstance(error, OSError):
        with pytest.raises(PackError, match=r"x\.pack: can't be written: No space left on device"):
            pack(NEW, target, overwrite=True)
    else:
        with pytest.raises(KeyboardInterrupt):
            pack(NEW, target, overwrite=True)
    monkeypatch.undo()
    assert snapshot(target.parent) == before
    assert pack(NEW, target, overwrite=True).symbols == ("NEW",)


@pytest.mark.parametrize("exchange", [True, False])
def test_the_last_rename_may_fail(target: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    before = snapshot(target.parent)
    n_renames = 2 if before and not exchange else 1
    monkeypatch.setattr(publish, "_exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", failing(os.rename, n_renames, OSError(5, "Input/output error")))
    with pytest.raises(PackError, match="Input/output error"):
        pack(NEW, target, overwrite=True)
    assert snapshot(target.parent) == before


def test_a_directory_that_can_not_be_synced_is_no_failure(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(os.fsync, 7, OSError(22, "Invalid argument")))
    assert pack(NEW, target, overwrite=True).symbols == ("NEW",)
    assert os.listdir(target.parent) == ["x.pack"]


@pytest.mark.parametrize("phase", ["parse", "sort", "write", "checksum"])
def test_interrupted_in_any_phase(target: Path, tmp_path: Path, phase: str) -> None:
    (tmp_path / "new.csv").write_text(csv_text(NEW))
    before = snapshot(target.parent)

    def interrupt(now: str, done_nbytes: int, total_nbytes: int) -> None:
        if now == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "new.csv", target, overwrite=True, progress=interrupt)
    assert snapshot(target.parent) == before


def test_progress_is_told_in_bytes_and_ends_at_its_total(tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text(csv_text(NEW))
    told: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    pack(tmp_path / "new.csv", progress=lambda phase, done, total: told[phase].append((done, total)))
    assert list(told) == ["parse", "sort", "write", "checksum"]
    for steps in told.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1] > 0


def test_a_full_disk_is_told_before_anything_is_written(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(target.parent)
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 3 << 19))
    small = pack(NEW, target, overwrite=True)
    assert small.symbols == ("NEW",)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 1000))
    before = snapshot(target.parent)
    with pytest.raises(PackError, match=r"x\.pack: the pack takes 1\.00 MiB, the disk has 1000 B free"):
        pack(OLD, target, overwrite=True)
    assert snapshot(target.parent) == before


SLOW = """
import sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from bars_fixtures import bar_table
from stager.packs.packing import pack

def slow(phase, done, total):
    if phase == sys.argv[3]:
        print("here", flush=True)
        time.sleep(60)

pack(bar_table({"NEW": range(8)}), sys.argv[2], overwrite=True, progress=slow)
"""


@pytest.fixture
def slow_packer(target: Path) -> Any:
    """Start a process that packs to the target and sleeps in a phase; returned when it sleeps."""
    started: list[subprocess.Popen[bytes]] = []

    def start(phase: str) -> subprocess.Popen[bytes]:
        tests = str(Path(__file__).parents[1])
        process = subprocess.Popen([sys.executable, "-c", SLOW, tests, str(target), phase], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("phase", ["write", "checksum"])
def test_a_killed_pack_leaves_the_older_one(target: Path, slow_packer: Any, phase: str) -> None:
    before = snapshot(target.parent)
    process = slow_packer(phase)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = snapshot(target.parent)
    assert {name: data for name, data in left.items() if ".partial" not in name} == before
    assert left.keys() - before.keys()  # it was in the middle of writing
    assert pack(NEW, target, overwrite=True).symbols == ("NEW",)
    assert verify(target) == []
    assert os.listdir(target.parent) == ["x.pack"]


def test_ctrl_c_leaves_nothing(target: Path, slow_packer: Any) -> None:
    before = snapshot(target.parent)
    process = slow_packer("checksum")
    process.send_signal(signal.SIGINT)
    # It sleeps for a minute; a busy disk may hold up what it was syncing.
    assert process.wait(45) != 0
    assert snapshot(target.parent) == before


def test_a_second_process_is_refused_and_harms_nothing(target: Path, slow_packer: Any) -> None:
    process = slow_packer("checksum")
    during = snapshot(target.parent)
    with pytest.raises(PackError, match=r"x\.pack\.partial: another process is packing"):
        pack(OLD, target, overwrite=True)
    assert snapshot(target.parent) == during
    process.kill()
    process.wait()
    assert pack(OLD, target, overwrite=True).symbols == ("OLD",)


def _race(target: str, symbol: str, barrier: Any, results: Any) -> None:
    table = bar_table({symbol: range(2000)})
    for _ in range(15):
        barrier.wait(30)
        try:
            pack(table, target, overwrite=True)
            results.put("packed")
        except Exception as error:
            results.put(repr(error))


def test_two_processes_racing_to_one_target(tmp_path: Path) -> None:
    target = tmp_path / "x.pack"
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    racers = [context.Process(target=_race, args=(str(target), name, barrier, results)) for name in ("A", "B")]
    for racer in racers:
        racer.start()
    outcomes = [results.get(timeout=60) for _ in range(30)]
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    assert outcomes.count("packed") >= 15
    for outcome in outcomes:
        assert outcome == "packed" or (outcome.startswith("PackError(") and "another process" in outcome), outcome
    assert verify(target) == []
    assert os.listdir(tmp_path) == ["x.pack"]


def test_an_old_pack_being_deleted_is_no_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the exchange the old pack is called x.pack.partial for a moment."""
    target = tmp_path / "x.pack"
    pack(OLD, target)
    rmtree, tried = shutil.rmtree, []

    def intrude(path: Path, **keywords: Any) -> None:
        if not tried:
            tried.append(path)
            with pytest.raises(PackError, match="another process is packing"):
                pack(OLD, target, overwrite=True)
        rmtree(path, **keywords)

    monkeypatch.setattr(shutil, "rmtree", intrude)
    assert pack(NEW, target, overwrite=True).symbols == ("NEW",)
    assert tried == [tmp_path / "x.pack.partial"]
    assert os.listdir(tmp_path) == ["x.pack"]


def test_a_pack_can_be_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.pack"
    rows_file = layout.RowsFile
    replacements = [NEW, OLD, NEW]

    def replace_first(*arguments: Any) -> Any:
        if replacements:
            table = replacements.pop()
            with monkeypatch.context() as inside:
                inside.setattr(layout, "RowsFile", rows_file)
                pack(table, target, overwrite=True)
        return rows_file(*arguments)

    pack(OLD, target)
    monkeypatch.setattr(layout, "RowsFile", replace_first)
    found = open_pack(target)
    assert found.symbols == ("NEW",)
    assert found.rows[:, 3].tolist() == found.column("close").tolist() == NEW["close"].to_pylist()
    replacements += [NEW, OLD]
    assert verify(target) == []


def test_a_target_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "x.pack"

    def other(phase: str, done_nbytes: int, total_nbytes: int) -> None:
        if phase == "checksum" and not target.exists():
            shutil.copytree(tmp_path / "x.pack.partial", target)
            (target / "manifest.json").write_text("{}")

    with pytest.raises(PackExistsError):
        pack(NEW, target, progress=other)
    assert (target / "manifest.json").read_text() == "{}"
    assert os.listdir(tmp_path) == ["x.pack"]


def test_interval_of_one_bar_must_be_told(tmp_path: Path) -> None:
    table = bar_table({"A": [0]})
    with pytest.raises(BarsError, match="--interval"):
        pack(table, tmp_path / "x.pack")
    assert list(tmp_path.iterdir()) == []
    assert pack(table, tmp_path / "x.pack", read=ReadOptions(interval="1min")).n_rows == 1


def test_a_table_stays_as_it_was(tmp_path: Path) -> None:
    table = bar_table({"B": [0, 1], "A": [1, 0]})
    copy = pa.table({name: pa.array(table[name].to_pylist(), table[name].type) for name in table.column_names})
    pack(table, tmp_path / "x.pack")
    assert table.equals(copy)
