"""Host memory that is left, from made-up trees of /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stager
from stager.bars import memory
from stager.bars.memory import available_nbytes, check_host
from stager.batches.read_ahead import _is_cached, read_ahead
from stager.batches.smoke import made_up_bars
from stager.errors import StagingMemoryError

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def meminfo(gib: int) -> str:
    return f"MemTotal:       {64 << 20} kB\nMemFree:        12 kB\nMemAvailable:   {gib << 20} kB"


def group_v2(path: str, limit: object, used: int, inactive: int = 0, active: int = 0) -> dict[str, object]:
    stat = f"anon 5\nfile 999999999\nshmem 888888888\ninactive_file {inactive}\nactive_file {active}"
    return {f"{path}/memory.max": limit, f"{path}/memory.current": used, f"{path}/memory.stat": stat}


def group_v1(path: str, limit: int, used: int, inactive: int = 0) -> dict[str, object]:
    stat = f"cache 77\ninactive_file 1\nactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file 0"
    return {
        f"{path}/memory.limit_in_bytes": limit,
        f"{path}/memory.usage_in_bytes": used,
        f"{path}/memory.stat": stat,
    }


def test_without_control_groups_it_is_mem_available(tmp_path):
    assert available_nbytes(write(tmp_path, {"proc/meminfo": meminfo(40)})) == 40 * GIB


def test_without_anything_it_is_what_the_system_says(tmp_path):
    assert available_nbytes(tmp_path) > 0


def test_this_machine():
    assert 0 < available_nbytes() < 1 << 50


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        # the container's own group is the top of the mount
        ({"proc/self/cgroup": "0::/", **group_v2("sys/fs/cgroup", 10 * GIB, 4 * GIB)}, 6),
        (group_v2("sys/fs/cgroup", 10 * GIB, 4 * GIB), 6),
        # page cache can be dropped, shared memory can't
        (group_v2("sys/fs/cgroup", 10 * GIB, 8 * GIB, inactive=3 * GIB, active=1 * GIB), 6),
        (group_v2("sys/fs/cgroup", "max", 4 * GIB), 40),
        (group_v2("sys/fs/cgroup", 100 * GIB, 4 * GIB), 40),
        (group_v2("sys/fs/cgroup", 4 * GIB, 5 * GIB), 0),
        # a job of a scheduler: the limit lies on the way up
        (
            {
                "proc/self/cgroup": "0::/system.slice/job_7/step_0/task",
                **group_v2("sys/fs/cgroup/system.slice/job_7", 9 * GIB, 2 * GIB),
                **group_v2("sys/fs/cgroup/system.slice/job_7/step_0", "max", 2 * GIB),
                **group_v2("sys/fs/cgroup/system.slice/other", 1 * GIB, 0),
            },
            7,
        ),
        # the tightest of nested limits counts
        (
            {
                "proc/self/cgroup": "0::/a/b",
                **group_v2("sys/fs/cgroup/a", 9 * GIB, 6 * GIB),
                **group_v2("sys/fs/cgroup/a/b", 5 * GIB, 1 * GIB),
            },
            3,
        ),
        # version 1, beside other controllers
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/",
                **group_v1("sys/fs/cgroup/memory/docker/abc", 8 * GIB, 6 * GIB, inactive=1 * GIB),
            },
            3,
        ),
        # the host's path, not visible in the container: its own group is the top
        (
            {
                "proc/self/cgroup": "4:memory:/docker/abc",
                **group_v1("sys/fs/cgroup/memory", 8 * GIB, 6 * GIB, inactive=1 * GIB),
            },
            3,
        ),
        ({"proc/self/cgroup": "4:memory:/", **group_v1("sys/fs/cgroup/memory", UNLIMITED_V1, 6 * GIB)}, 40),
        ({"proc/self/cgroup": "4:memory:/", **group_v1("sys/fs/cgroup/memory", 8 * GIB, 0), "x": 1}, 8),
    ],
)
def test_control_groups_limit_it(tmp_path, files, gib):
    assert available_nbytes(write(tmp_path, {"proc/meminfo": meminfo(40), **files})) == gib * GIB


def test_garbage_is_not_counted(tmp_path):
    files = {"proc/meminfo": meminfo(40), **group_v2("sys/fs/cgroup", 10 * GIB, 4 * GIB)}
    files["sys/fs/cgroup/memory.stat"] = "one two three"
    assert available_nbytes(write(tmp_path, files)) == 40 * GIB


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("step", [1, 7, 10**9])
def test_every_byte_of_a_mapped_pack_may_be_asked_for_ahead(tmp_path, monkeypatch, step, is_cached):
    monkeypatch.setattr("stager.batches.read_ahead._is_cached", lambda address, nbytes: is_cached)
    monkeypatch.setattr("stager.batches.read_ahead._READ_AHEAD_NBYTES", 4096)
    monkeypatch.setattr("stager.batches.read_ahead._STEP_NBYTES", 8192)
    pack = stager.pack(made_up_bars(5000, 1), tmp_path / "bars.pack")
    ask, nbytes = read_ahead(pack), pack.rows.nbytes
    for first in range(0, nbytes, step * 1000):
        ask(first, min(first + step * 1000, nbytes))
    np.testing.assert_array_equal(np.diff(pack.rows[:, 3]), 1)


def test_pages_that_were_just_read_are_cached(tmp_path):
    rows = stager.pack(made_up_bars(5000, 1), tmp_path / "bars.pack").rows
    rows.sum()
    address = np.frombuffer(rows._mmap, np.uint8).ctypes.data
    assert _is_cached(address, len(rows._mmap))


def test_too_little_is_told_with_needed_and_available(monkeypatch):
    monkeypatch.setattr(memory, "available_nbytes", lambda: 3 * GIB)
    check_host(3 * GIB)
    with pytest.raises(StagingMemoryError, match=r"3\.00 GiB of host memory .* 3\.00 GiB are available; .*device"):
        check_host(3 * GIB + 1)
