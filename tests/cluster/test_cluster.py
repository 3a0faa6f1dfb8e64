"""Packing on a real Dask cluster: the same pack, whatever is lost on the way, or one clear error and nothing."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from bars_fixtures import bar_table, csv_text
from dask_fixtures import DaskProcesses, dask_cluster
from pack_contents import contents
from s3_fixtures import Put, put, server

pytest.importorskip("distributed")

from stager.bars.read import ReadOptions
from stager.bars.sources import BarFile
from stager.cluster import connection, tasks
from stager.cluster.packing import _for_workers, pack_on
from stager.cluster.shared import Place
from stager.errors import BarsError, ConfigError, NotAPackError, PackError, PackExistsError, StagerError
from stager.packs import placing
from stager.packs.packing import pack
from stager.packs.usage import Usage
from stager.packs.verify import verify

__all__ = ["put", "server"]

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskProcesses]:
    with dask_cluster(tmp_path_factory.mktemp("dask") / "there") as made:
        yield made


@pytest.fixture
def days(tmp_path: Path) -> Path:
    folder = tmp_path / "days"
    folder.mkdir()
    for day in range(6):
        steps = range(1440 * day, 1440 * day + 300)
        (folder / f"{day}.csv").write_text(csv_text(bar_table({"A": steps, "B": steps, "C": steps[:10]})))
    return folder


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symbols A and B are cut into several parts."""
    monkeypatch.setattr(placing, "_MOST_STORED_ROWS", 400)


def outcome(function: Any, path: Path) -> dict[str, Any] | str:
    try:
        function(path)
    except StagerError as error:
        assert not path.exists()
        assert not path.with_name(path.name + ".partial").exists()
        return f"{type(error).__name__}: {error}"
    assert verify(path) == []
    assert sorted(os.listdir(path)) == ["manifest.json", "segment-0"]
    return contents(path)


def same(cluster: DaskProcesses, source: Any, folder: Path, **options: Any) -> dict[str, Any] | str:
    """What a cluster makes of some input, which is what one process makes of it."""
    expected = outcome(lambda path: pack(source, path, **options), folder / "one.pack")
    found = outcome(lambda path: pack_on(cluster.address, source, path, **options), folder / "cluster.pack")
    if isinstance(expected, str):
        assert found == expected
    else:
        assert isinstance(found, dict), found
        assert {name for name in expected if found[name] != expected[name]} == set()
    return found


# -------------------------------------------------------------------------------- the same pack


@pytest.mark.parametrize("cut", [False, True])
def test_daily_files(cluster: DaskProcesses, days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool):
    if cut:
        monkeypatch.setattr(placing, "_MOST_STORED_ROWS", 400)
    assert isinstance(same(cluster, days, tmp_path), dict)


def test_what_it_took_and_how_far_it_is(cluster: DaskProcesses, days: Path, tmp_path: Path, small_parts: None):
    usage, told = Usage(), []
    pack_on(cluster.address, days, tmp_path / "x.pack", usage=usage, memory_nbytes=1 << 30,
            progress=lambda *each: told.append(each))  # fmt: skip
    assert (usage.n_processes, usage.n_workers, usage.memory_nbytes) == (2, 2, 1 << 30)
    assert 1 << 20 < usage.anonymous_nbytes < 1 << 30
    assert usage.scratch_nbytes > 6 * 610 * 48
    assert list(dict.fromkeys(phase for phase, _, _ in told)) == ["parse", "sort", "write", "checksum"]
    for phase in ("parse", "sort", "write", "checksum"):
        done = [done for each, done, _ in told if each == phase]
        assert done == sorted(done)
        assert done[-1] == next(total for each, _, total in told if each == phase)


def test_files_of_all_kinds_by_relative_paths(
    cluster: DaskProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    """Out of order, with duplicates, a further column, a symbol in the path, compressed, and Parquet."""
    here = tmp_path / "symbol=OUTSIDE"
    (here / "data" / "symbol=XYZ").mkdir(parents=True)
    monkeypatch.chdir(here)
    for number, name in enumerate(("one", "two", "three")):
        steps = [*range(500 * number, 500 * number + 500)][::-1]
        table = bar_table({"BIG": [*steps, steps[0]], f"S{number}": steps[:50]})
        table = table.append_column("trades", table["volume"])
        text = csv_text(table)
        (here / "data" / f"{name}.csv").write_text(text)
        if number == 1:
            (here / "data" / f"{name}.csv").unlink()
            with gzip.open(here / "data" / f"{name}.csv.gz", "wt") as stream:
                stream.write(text)
        if number == 2:
            (here / "data" / f"{name}.csv").unlink()
            pq.write_table(table, here / "data" / f"{name}.parquet")
    one = bar_table({"": range(40)}).drop_columns(["symbol"])
    one = one.append_column("trades", one["volume"])
    pacsv.write_csv(one, here / "data" / "symbol=XYZ" / "four.csv")
    files = ["data/one.csv", "data/two.csv.gz", "data/three.parquet", "data/symbol=XYZ/four.csv"]
    found = same(cluster, files, tmp_path, read=ReadOptions(duplicates="last"))
    assert isinstance(found, dict), found
    assert [one["name"] for one in found["inputs"]] == files
    assert found["n_symbols"] == 5
    assert {one["name"] for one in found["columns"]} >= {"trades", "volume"}


def test_objects_of_a_store(put: Put, tmp_path: Path) -> None:
    uris = []
    for day in range(3):
        steps = range(1440 * day, 1440 * day + 200)
        uris.append(put(f"packed/{day}.csv", csv_text(bar_table({"A": steps, "B": steps})).encode()))
    # Workers find the store as this process does, by the environment.
    with dask_cluster(tmp_path / "there") as cluster:
        found = same(cluster, uris, tmp_path)
        assert isinstance(found, dict), found
        assert [one["name"] for one in found["inputs"]] == uris
        put("packed/9.csv", b"nothing")
        assert "s3://market/packed/9.csv" in same(cluster, "s3://market/packed/", tmp_path / "damaged")


def test_a_client_of_ones_own(cluster: DaskProcesses, days: Path, tmp_path: Path) -> None:
    from distributed import Client

    with Client(cluster.address, set_as_default=False) as client:
        for name in ("one.pack", "two.pack"):
            pack_on(client, days, tmp_path / name)
        assert client.status == "running"
    with pytest.raises(ConfigError, match="a Client that is closed"):
        pack_on(client, days, tmp_path / "three.pack")
    assert contents(tmp_path / "one.pack") == contents(tmp_path / "two.pack")


def test_dates_and_clocks_and_a_name_that_tells_the_symbol(cluster: DaskProcesses, tmp_path: Path) -> None:
    head = "time,open,high,low,close,volume\n"
    (tmp_path / "A.csv").write_text(head + "".join(f"2024-01-{day:02},1,2,1,2,5\n" for day in range(1, 20)))
    assert isinstance(same(cluster, tmp_path / "A.csv", tmp_path), dict)
    (tmp_path / "B.csv").write_text(head + "".join(f"2024-01-01 00:{m:02},1,2,1,2,5\n" for m in range(1, 20)))
    both = [tmp_path / "A.csv", tmp_path / "B.csv"]
    assert "symbol" in same(cluster, both, tmp_path / "refused")
    # Dates among clocks are read again, as instants of the zone.
    options = ReadOptions(symbol="X", zone="America/New_York")
    assert isinstance(same(cluster, both, tmp_path / "zone", read=options), dict)


@pytest.mark.parametrize(
    "text",
    [
        "time,symbol,open,high,low,close,volume\n2024-01-01T00:00:00Z,A,1,1,1,many,1\n",
        "time,symbol,open,high,low,close\n2024-01-01T00:00:00Z,A,1,1,1,1\n",
        "time,open\n",
        "",
    ],
)
def test_a_damaged_file_is_one_error_that_names_it(cluster: DaskProcesses, days: Path, tmp_path: Path, text: str):
    (days / "3.csv").write_text(text)
    assert re.match(rf"BarsError: {re.escape(str(days / '3.csv'))}", str(same(cluster, days, tmp_path)))


def test_a_cut_archive(cluster: DaskProcesses, days: Path, tmp_path: Path) -> None:
    raw = gzip.compress((days / "3.csv").read_bytes())
    (days / "3.csv").unlink()
    (days / "3.csv.gz").write_bytes(raw[: len(raw) // 2])
    assert "3.csv.gz" in same(cluster, days, tmp_path)


def test_rows_that_differ(cluster: DaskProcesses, days: Path, tmp_path: Path, small_parts: None) -> None:
    text = (days / "2.csv").read_text()
    (days / "9.csv").write_text(text.replace(",1", ",2", 3))
    assert "rows of the same time" in same(cluster, days, tmp_path)
    assert isinstance(same(cluster, days, tmp_path / "last", read=ReadOptions(duplicates="last")), dict)


def test_the_old_pack_stays_until_the_new_one_is(cluster: DaskProcesses, days: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.pack"
    old = pack(bar_table({"OLD": range(5)}), target).fingerprint
    with pytest.raises(PackExistsError, match="--force"):
        pack_on(cluster.address, days, target)
    good = (days / "3.csv").read_text()
    (days / "3.csv").write_text("nothing")
    with pytest.raises(BarsError):
        pack_on(cluster.address, days, target, overwrite=True)
    assert verify(target) == []
    assert json.loads((target / "manifest.json").read_text())["fingerprint"] == old
    (days / "3.csv").write_text(good)
    assert pack_on(cluster.address, days, target, overwrite=True).n_rows == 6 * 610
    (tmp_path / "mine").mkdir()
    with pytest.raises(NotAPackError):
        pack_on(cluster.address, days, tmp_path / "mine", overwrite=True)


# -------------------------------------------------------------------------------- what is lost


@pytest.mark.parametrize("at", ["take", "look", "write", "digest", "again", "checksum"])
def test_a_worker_killed_in_any_phase(days: Path, tmp_path: Path, small_parts: None, at: str) -> None:
    once = tmp_path / "once"
    faults = {"STAGER_FAULT": "die", "STAGER_FAULT_AT": at, "STAGER_FAULT_ONCE": str(once)}
    with dask_cluster(tmp_path / "there", 3, **faults) as cluster:
        pack_on(cluster.address, days, tmp_path / "x.pack")
        assert once.exists()
        assert [process.poll() for process in cluster.processes].count(-9) == 1
    assert verify(tmp_path / "x.pack") == []
    pack(days, tmp_path / "one.pack")
    assert contents(tmp_path / "x.pack") == contents(tmp_path / "one.pack")


@pytest.mark.parametrize(("at", "starts_again"), [("take", True), ("write", False), ("checksum", True)])
def test_a_scheduler_that_is_lost(days: Path, tmp_path: Path, small_parts: None, at: str, starts_again: bool) -> None:
    once = tmp_path / "once"
    faults = {"STAGER_FAULT": "sleep", "STAGER_FAULT_AT": at, "STAGER_FAULT_ONCE": str(once)}
    with dask_cluster(tmp_path / "there", 1, **faults) as cluster:

        def lose() -> None:
            while not once.exists():
                time.sleep(0.02)
            cluster.processes[0].kill()
            cluster.processes[0].wait()
            if starts_again:
                cluster.start_scheduler()

        killer = threading.Thread(target=lose)
        killer.start()
        started = time.monotonic()
        with pytest.raises(PackError, match=r"the scheduler at tcp://127\.0\.0\.1:\d+ is gone, .* Pack again"):
            pack_on(cluster.address, days, tmp_path / "x.pack")
        assert time.monotonic() - started < 60
        killer.join()
    assert sorted(os.listdir(tmp_path)) == ["days", "once", "there"]


def test_all_workers_lost(days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PATIENCE_SECONDS", 3.0)
    faults = {"STAGER_FAULT": "die", "STAGER_FAULT_AT": "take", "STAGER_FAULT_ONCE": str(tmp_path / "once")}
    with (
        dask_cluster(tmp_path / "there", 1, **faults) as cluster,
        pytest.raises(PackError, match=r"no worker of the cluster at tcp://.* for 3 s; start some with `dask worker"),
    ):
        pack_on(cluster.address, days, tmp_path / "x.pack")
    assert sorted(os.listdir(tmp_path)) == ["days", "once", "there"]


def test_workers_that_die_on_a_file(days: Path, tmp_path: Path) -> None:
    once = tmp_path / "once"
    faults = {"STAGER_FAULT": "die", "STAGER_FAULT_AT": "take", "STAGER_FAULT_ONCE": str(once)}
    allowed = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    with (
        dask_cluster(tmp_path / "there", 2, **faults, **allowed) as cluster,
        pytest.raises(PackError, match=r"days/\d\.csv: 1 workers died on it, .*give workers more"),
    ):
        pack_on(cluster.address, days, tmp_path / "x.pack")
    assert sorted(os.listdir(tmp_path)) == ["days", "once", "there"]


# -------------------------------------------------------------------------------- what workers don't see


def test_a_worker_that_does_not_see_the_pack(days: Path, tmp_path: Path) -> None:
    with (
        dask_cluster(tmp_path / "there", 1, STAGER_FAULT_MARK="elsewhere") as cluster,
        pytest.raises(PackError, match=r"the worker at tcp://.* does not see .*/x\.pack\.partial/shared .*-o DIR"),
    ):
        pack_on(cluster.address, days, tmp_path / "x.pack")
    assert sorted(os.listdir(tmp_path)) == ["days", "there"]


def test_a_worker_that_does_not_see_an_input(days: Path, tmp_path: Path) -> None:
    lost = str(days / "4.csv")
    with (
        dask_cluster(tmp_path / "there", 1, STAGER_FAULT_LOSE=lost) as cluster,
        pytest.raises(BarsError, match=r"days/4\.csv: the worker at tcp://.* sees no such file, .*all workers share"),
    ):
        pack_on(cluster.address, days, tmp_path / "x.pack")
    assert "x.pack" not in os.listdir(tmp_path)
    file = _for_workers(BarFile("0.csv", 3, str(days / "0.csv")))
    with pytest.raises(BarsError, match=r"0\.csv: the worker at there sees a file of [\d,]+ bytes, and it has 3 bytes"):
        tasks._check_seen(file, "there")


def test_memory_that_a_worker_has_not(cluster: DaskProcesses, days: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"memory is 1\.9.* GiB, and Dask lets the worker at tcp://.* take 2.* GiB"):
        pack_on(cluster.address, days, tmp_path / "x.pack", memory_nbytes=2_000 << 20)
    with pytest.raises(PackError, match=r"the worker at tcp://.*: memory is .*, and the process itself takes"):
        pack_on(cluster.address, days, tmp_path / "x.pack", memory_nbytes=20 << 20)


def test_refusals(days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 1.0)
    for address in ("tcp://127.0.0.1:1", "nonsense://x", "tcp://"):
        with pytest.raises(PackError, match=r"no scheduler answers at .*; start one with `dask scheduler`"):
            pack_on(address, days, tmp_path / "x.pack")
    with pytest.raises(PackError, match="write it to Parquet"):
        pack_on("local", bar_table({"A": range(5)}), tmp_path / "x.pack")
    with pytest.raises(ConfigError, match="cluster is 3; give an address"):
        pack_on(3, days, tmp_path / "x.pack")
    with pytest.raises(ConfigError, match="workers is the number of processes with cluster='local'"):
        pack_on("tcp://127.0.0.1:1", days, tmp_path / "x.pack", workers=2)
    assert os.listdir(tmp_path) == ["days"]


def test_the_mark_tells_one_directory_from_another(tmp_path: Path) -> None:
    place = Place(tmp_path, "this", tmp_path / "x.pack", None)
    with pytest.raises(PackError, match=r"No such file"):
        place.check("there")
    (tmp_path / "mark").write_text("that")
    with pytest.raises(PackError, match=r"the worker at there does not see .*\(that\)"):
        place.check("there")
    (tmp_path / "mark").write_text("this")
    place.check("there")


# -------------------------------------------------------------------------------- the command


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "stager.cli", "pack", *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command(cluster: DaskProcesses, days: Path, tmp_path: Path) -> None:
    result = command("days", "-o", "x.pack", "--cluster", cluster.address, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"(\w+: [\d.]+ \w+ of [\d.]+ \w+ \(\d+%\)\n)*", result.stderr)
    assert re.search(r"took +[\d.]+ MiB of memory at most, of [\d.]+ [GM]iB in each of 2 processes", result.stdout)
    local = command("days", "-o", "y.pack", "--cluster", "local", "--workers", 2, "--json", cwd=tmp_path)
    assert local.returncode == 0, local.stderr
    assert re.fullmatch(r"(\w+: [\d.]+ \w+ of [\d.]+ \w+ \(\d+%\)\n)*", local.stderr)
    assert contents(tmp_path / "x.pack") == contents(tmp_path / "y.pack")
    (days / "3.csv").write_text("nothing")
    result = command("days", "-o", "z.pack", "--cluster", cluster.address, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"Error: days/3\.csv:1: .+\n", result.stderr)
    for words, text in ((("--resume",), "nothing is kept for --resume"), (("--workers", 2), "is for this machine")):
        result = command("days", "-o", "z.pack", "--cluster", cluster.address, *words, cwd=tmp_path)
        assert result.returncode == 2
        assert text in " ".join(result.stderr.split())


def test_what_a_killed_command_left_is_cleared_by_the_next(days: Path, tmp_path: Path) -> None:
    once = tmp_path / "once"
    faults = {"STAGER_FAULT": "sleep", "STAGER_FAULT_AT": "write", "STAGER_FAULT_ONCE": str(once)}
    with dask_cluster(tmp_path / "there", 1, **faults) as cluster:
        words = [sys.executable, "-m", "stager.cli", "pack", "days", "-o", "x.pack", "--cluster", cluster.address]
        process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not once.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()
        process.communicate()
    assert (tmp_path / "x.pack.partial" / "shared" / "mark").exists()
    assert pack(days, tmp_path / "x.pack").n_rows == 6 * 610
    assert not (tmp_path / "x.pack.partial").exists()
