"""What a killed pack leaves, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from bars_fixtures import MINUTE, START, bar_table, csv_text

from stager.bars.inspection import check
from stager.bars.read import ReadOptions
from stager.errors import NotAPackError, PackError, PackExistsError
from stager.packs import scratch as scratch_module
from stager.packs.appending import append
from stager.packs.packing import discard, pack
from stager.packs.usage import Budget, Usage
from stager.packs.verify import verify

N_FILES = 6

KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
from killed_packs import in_scratch
from stager.packs.packing import pack

phase, after, resume = sys.argv[4], int(sys.argv[5]), sys.argv[6] == "resume"

def kill(now, done, total):
    if now == phase and done * 100 >= total * after:
        os.kill(os.getpid(), signal.SIGKILL)

with in_scratch():
    pack(sys.argv[2], sys.argv[3], progress=kill, resume=resume, overwrite=sys.argv[7] == 'over')
"""


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """A directory of daily files of three symbols."""
    folder = tmp_path / "days"
    folder.mkdir()
    for day in range(N_FILES):
        steps = range(1440 * day, 1440 * day + 300)
        (folder / f"{day}.csv").write_text(csv_text(bar_table({"A": steps, "B": steps, "C": steps[:10]})))
    return folder


def small(monkeypatch: pytest.MonkeyPatch, held: int = 0) -> None:
    monkeypatch.setattr(Budget, "of", lambda memory, workers, files: Budget(1 << 30, 2, 1 << 30, held, 20_000))


def kill_in(
    phase: str, days: Path, target: Path, *, after: int = 50, resume: bool = False, overwrite: bool = False
) -> None:
    """Run a packing process that is killed in a phase when so many percent of it are done."""
    tests = str(Path(__file__).parents[1])
    arguments = [tests, str(days), str(target), phase, str(after), "resume" if resume else "anew"]
    arguments.append("over" if overwrite else "new")
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False).returncode == -signal.SIGKILL


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "segment-0").iterdir()}


def partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


@pytest.mark.parametrize("phase", ["parse", "sort", "write", "checksum"])
def test_killed_in_any_phase_it_goes_on(
    tmp_path: Path, days: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x.pack"
    kill_in(phase, days, target)
    assert not target.exists()
    assert partial(target).is_dir()
    small(monkeypatch)
    usage = Usage()
    found = pack(days, target, resume=True, usage=usage)
    if phase != "parse":
        assert usage.n_kept == N_FILES
    assert usage.read_again == []
    expected = pack(days, tmp_path / "whole.pack")
    assert found.fingerprint == expected.fingerprint
    assert files_of(target) == files_of(tmp_path / "whole.pack")
    for name in ("inputs", "decisions", "dropped", "warnings", "columns", "span", "n_symbols"):
        assert getattr(found.manifest, name) == getattr(expected.manifest, name)
    assert verify(target) == []
    assert sorted(os.listdir(target)) == ["manifest.json", "segment-0"]
    assert not partial(target).exists()


def test_what_was_found_in_inputs_that_are_kept_is_told(
    tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order, relation of prices, and bars that had not closed when their file was written."""
    target = tmp_path / "x.pack"
    low = np.arange(40) + np.where(np.arange(40) == 7, 5.0, -1.0)
    steps = range(1440 * N_FILES, 1440 * N_FILES + 40)
    table = bar_table({"D": steps[::-1]}, open=range(40), high=range(1, 41), low=low, close=range(40))
    (days / "wrong.csv").write_text(csv_text(table))
    os.utime(days / "wrong.csv", ns=(START + steps[-1] * MINUTE,) * 2)
    kill_in("sort", days, target)
    small(monkeypatch)
    usage = Usage()
    found = pack(days, target, resume=True, usage=usage).manifest
    assert usage.n_kept == N_FILES + 1
    expected = check(days)
    shown = [one.sentence for one in expected.findings if one.severity == "warning"]
    assert sorted(found.warnings) == sorted(shown)
    for word in ("low above open in 1", "first D at 2024-01-07 00:32Z", "had not closed when the file was written"):
        assert any(word in text for text in shown), word
    assert found.decisions == list(expected.bars.decisions)
    assert any(one.what == "order" and "39 rows of D" in one.source for one in found.decisions)


def test_killed_twice_it_still_goes_on(tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.pack"
    kill_in("write", days, target)
    kill_in("checksum", days, target, resume=True)
    small(monkeypatch)
    assert pack(days, target, resume=True).fingerprint == pack(days, tmp_path / "whole.pack").fingerprint


def test_without_a_word_it_is_refused_and_stays(tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.pack"
    kill_in("write", days, target)
    before = sorted(partial(target).rglob("*"))
    with pytest.raises(PackError, match=r"x\.pack\.partial: .* 6 inputs; go on with --resume, or .* --discard"):
        pack(days, target)
    with pytest.raises(PackError, match=r"x\.pack\.partial: was begun with other options; .* --discard"):
        pack(days, target, resume=True, read=ReadOptions(interval="1min"))
    assert sorted(partial(target).rglob("*")) == before
    small(monkeypatch)
    assert pack(days, target, resume=True).n_rows == 610 * N_FILES


def test_discarding_removes_it_and_nothing_else(tmp_path: Path, days: Path) -> None:
    target = tmp_path / "x.pack"
    with pytest.raises(PackError, match="no unfinished pack; nothing was removed"):
        discard(days, target)
    kill_in("write", days, target)
    assert discard(days, target) == partial(target)
    assert sorted(os.listdir(tmp_path)) == ["days"]
    (partial(target)).mkdir()
    (partial(target) / "precious.txt").write_text("mine")
    with pytest.raises(NotAPackError):
        discard(days, target)
    assert (partial(target) / "precious.txt").read_text() == "mine"


def test_what_else_writes_the_pack_leaves_it_alone(tmp_path: Path, days: Path) -> None:
    target = tmp_path / "x.pack"
    pack(bar_table({"OLD": range(5)}), target)
    kill_in("write", days, target, overwrite=True)
    for write in (lambda: append(target, bar_table({"OLD": range(9)})), lambda: pack(days, target, overwrite=True)):
        with pytest.raises(PackError, match=r"x\.pack\.partial: an unfinished .*--resume.*--discard"):
            write()
    assert (partial(target) / "journal.jsonl").exists()


def test_there_must_be_something_to_go_on_with(tmp_path: Path, days: Path) -> None:
    with pytest.raises(PackError, match="no unfinished pack to go on with; leave out --resume"):
        pack(days, tmp_path / "x.pack", resume=True)
    pack(days, tmp_path / "x.pack")
    with pytest.raises(PackExistsError):
        pack(days, tmp_path / "x.pack", resume=True)


def test_a_changed_input_is_read_again(tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.pack"
    kill_in("write", days, target)
    changed = days / "2.csv"
    text = changed.read_text()
    changed.write_text(text.replace("D,", "E,").replace("A,", "Q,", 1))
    (days / "4.csv").unlink()
    (days / "9.csv").write_text(csv_text(bar_table({"new": range(9 * 1440, 9 * 1440 + 7)})))
    small(monkeypatch)
    usage = Usage()
    found = pack(days, target, resume=True, usage=usage)
    assert usage.read_again == [str(changed)]
    assert usage.n_kept == N_FILES - 2
    assert found.fingerprint == pack(days, tmp_path / "whole.pack").fingerprint
    assert "new" in found.symbols
    assert "Q" in found.symbols


def test_one_of_the_same_size_and_another_time_too(tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.pack"
    kill_in("sort", days, target)
    file = days / "0.csv"
    file.write_text(file.read_text().replace("A,", "Z,"))
    small(monkeypatch)
    usage = Usage()
    assert "Z" in pack(days, target, resume=True, usage=usage).symbols
    assert usage.read_again == [str(file)]


def test_after_a_restart_of_the_machine_nothing_is_trusted(
    tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x.pack"
    kill_in("write", days, target)
    monkeypatch.setattr(scratch_module, "_boot", lambda: "another")
    small(monkeypatch)
    usage = Usage()
    found = pack(days, target, resume=True, usage=usage)
    assert usage.n_kept == 0
    assert len(usage.read_again) == N_FILES
    assert found.fingerprint == pack(days, tmp_path / "whole.pack").fingerprint


@pytest.mark.parametrize("damage", ["cut journal", "torn line", "cut scratch", "no scratch"])
def test_a_damaged_rest_is_never_mixed_in(
    tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    target = tmp_path / "x.pack"
    kill_in("sort", days, target)
    journal, scratch = partial(target) / "journal.jsonl", partial(target) / "scratch"
    lines = journal.read_bytes().splitlines(keepends=True)
    small(monkeypatch)
    expected = pack(days, tmp_path / "whole.pack").fingerprint
    if damage == "cut journal":
        journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    elif damage == "torn line":
        journal.write_bytes(lines[0] + b"{]\n" + b"".join(lines[1:]))
    elif damage == "cut scratch":
        os.truncate(scratch, scratch.stat().st_size - 1)
    else:
        scratch.unlink()
    usage = Usage()
    if damage == "cut journal":
        assert pack(days, target, resume=True, usage=usage).fingerprint == expected
        assert usage.n_kept == N_FILES - 1
        return
    before = sorted(partial(target).rglob("*"))
    with pytest.raises(PackError, match=r"x\.pack\.partial/.*--discard"):
        pack(days, target, resume=True)
    assert not target.exists()
    assert sorted(partial(target).rglob("*")) == before
    assert discard(days, target) == partial(target)


def test_rows_that_were_in_memory_only_are_read_again(
    tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of value was left, so nothing is in the way either."""
    target = tmp_path / "x.pack"

    def kill(phase: str, done: int, total: int) -> None:
        if phase == "write":
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        pack(days, target, progress=kill, memory_nbytes=1 << 30)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert partial(target).exists()
    usage = Usage()
    found = pack(days, target, resume=True, usage=usage)
    assert (usage.n_kept, usage.read_again) == (0, [])
    assert verify(target) == []
    assert found.n_rows == 610 * N_FILES


def test_ctrl_c_is_prompt_and_leaves_nothing(tmp_path: Path, days: Path) -> None:
    tests = str(Path(__file__).parents[1])
    code = KILLED.replace(
        "os.kill(os.getpid(), signal.SIGKILL)", "print('here', flush=True); import time; time.sleep(30)"
    )
    arguments = [tests, str(days), str(tmp_path / "x.pack"), "write", "50", "anew", "new"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert process.returncode != 0
    assert os.listdir(tmp_path) == ["days"]


def test_a_failure_removes_what_it_wrote_and_the_folders_it_made(tmp_path: Path, days: Path) -> None:
    (days / "3.csv").write_text("time,symbol,open,high,low,close\n2024-01-01,A,1,1,1,many\n")
    with pytest.raises(Exception, match=r"3\.csv:2"):
        pack(days, tmp_path / "deep" / "er" / "x.pack")
    assert os.listdir(tmp_path) == ["days"]
