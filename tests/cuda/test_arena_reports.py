"""What the arena says: one workload for each verdict, one line an epoch, the picture."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
sys.path.append(str(Path(__file__).parent))

from arena_fakes import Stream, fake_cuda  # noqa: E402

from stager.config import parse_nbytes  # noqa: E402
from stager.cuda.arena import Arena  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
FIELDS = (
    "path requested aligned capacity used peak allocations largest hits misses merges steps live_blocks live_bytes "
    "free_bytes largest_free device_free"
)


@pytest.fixture
def driver():
    with fake_cuda() as driver:
        yield driver


def activations(n, nbytes):
    return [cupy.empty(nbytes, np.uint8) for _ in range(n)]


def verdict(caplog):
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("stager.arena", logging.WARNING)
    text = record.getMessage()
    assert "\n" not in text
    found = dict(re.findall(r"(\w+)=(\S+)", text.partition(" verdict: ")[0]))
    assert list(found) == FIELDS.split()
    return found, text.partition(" verdict: ")[2]


def test_one_runaway_request(driver, caplog):
    with Arena("1MiB") as arena:
        for _ in range(10):
            with arena.step():
                activations(10, 48_000)
        cupy.empty(3 * MIB, np.uint8)
    fields, words = verdict(caplog)
    assert words.startswith("one runaway request: 3.00 MiB")
    assert "largest before was 47.00 KiB" in words
    assert (fields["requested"], fields["used"], fields["steps"]) == (str(3 * MIB), "0", "10")


def test_memory_held_by_live_arrays(driver, caplog):
    held = []
    with Arena("1MiB", trace=True) as arena:
        while not caplog.records:
            with arena.step():
                held.extend(activations(3, 48_000))
    fields, words = verdict(caplog)
    n = len(held) - 3  # those of earlier steps
    assert words.startswith(f"memory is held by live arrays: {n} of earlier steps hold ")
    assert re.search(r"largest holders: .*test_arena_reports.py:\d+ \(\d+ blocks", words)
    assert int(fields["live_blocks"]) in (n, n + 1, n + 2)


def test_memory_held_by_live_arrays_where_nothing_is_a_step(driver, caplog):
    with Arena("1MiB"):
        held = activations(30, 48_000)
    fields, words = verdict(caplog)
    assert words.startswith(f"memory is held by live arrays: {fields['live_blocks']} hold")
    assert "trace=True" in words
    assert len(held) == 30


def test_fragmented(driver, caplog):
    with Arena("1MiB") as arena:
        all_of_it = activations(16, 64 * KIB)
        del all_of_it[::2]
        with arena.step():
            activations(1, 100 * KIB)
    fields, words = verdict(caplog)
    assert words.startswith("fragmented: 512.00 KiB are free in 8 pieces, but the largest has 64.00 KiB")
    assert (fields["free_bytes"], fields["largest_free"]) == (str(512 * KIB), str(64 * KIB))


def test_truly_too_small_tells_the_size_that_fits(driver, caplog):
    def step():
        kept = activations(20, 48_000)
        kept += activations(2, 100_000)
        return kept

    with Arena("1MiB") as arena:
        for _ in range(3):
            with arena.step():
                step()
    _, words = verdict(caplog)
    assert words.startswith("the working set is larger than the arena: this step has")
    at_least = parse_nbytes(re.search(r"at least (\w+) would fit", words)[1])
    assert at_least >= MIB
    fits = parse_nbytes(re.search(r"a capacity of (\w+) would have held", arena.report())[1])
    caplog.clear()
    with Arena(fits) as arena:
        for _ in range(3):
            with arena.step():
                step()
        assert arena.stats().overflows == 0
    assert not caplog.records


def test_one_line_an_epoch(driver, caplog):
    with Arena("1MiB") as arena:
        for epoch in (1, 2, 3):
            for _ in range(5):
                activations(30, 48_000)
            assert len(caplog.records) == epoch
            assert arena.stats().overflows == 5 * 9
            arena.reset()
            assert arena.stats().overflows == arena.stats().allocations == 0
            assert arena.stats().epoch == epoch


def test_reset_frees_nothing_that_lives(driver):
    with Arena("1MiB") as arena:
        kept = activations(3, 1000)
        arena.reset()
        stats = arena.stats()
        assert (stats.live_blocks, stats.used_nbytes, stats.peak_nbytes) == (3, 3072, 3072)
        assert len({array.data.ptr for array in kept + activations(3, 1000)}) == 6


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


SPILL = (
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "import logging, cupy\n"
    "from arena_fakes import *\n"
    "{}\n"
    "with fake_arena(FakeDriver(), 512):\n"
    "    for _ in range(3): cupy.empty(1000)\n"
)


def test_without_logging_the_line_reaches_stderr():
    done = run(SPILL.format(""))
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("arena overflow: path=pool requested=8000 aligned=8192 capacity=512 ")


def test_with_logging_the_line_goes_to_the_logger_only():
    done = run(SPILL.format("logging.basicConfig(stream=sys.stdout, format='%(name)s %(levelname)s %(message)s')"))
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith("stager.arena WARNING arena overflow: ")


def test_overflow_returns_to_zero(driver):
    with Arena("1MiB") as arena:
        held = activations(40, 48_000)
        assert arena.stats().overflow_live_nbytes == 19 * 48_128
        del held
        stats = arena.stats()
        assert (stats.overflow_live_nbytes, stats.overflow_peak_nbytes) == (0, 19 * 48_128)
        with arena.step():
            pass
        assert not driver.outside


def test_the_picture(driver):
    with Arena("1MiB", trace=True) as arena:
        kept = activations(8, 64 * KIB)
        del kept[0]
        text = arena.report()
    lines = text.splitlines()
    assert lines[0].startswith("arena of 1.00 MiB: 448.00 KiB live in 7 blocks, 576.00 KiB free")
    strip = lines[1][3:75]
    assert len(strip) == 72
    assert strip[:4] == "...."
    assert strip[5:35] == "#" * 30
    assert strip[37:] == "." * 35
    row = next(line for line in lines if line.split()[:2] == ["64.00", "KiB"])
    assert row.split()[2:] == ["7", "448.00", "KiB", "1", "64.00", "KiB"]
    assert "test_arena_reports.py" in lines[-1]


def test_a_request_of_another_stream_has_its_own_line(driver, caplog):
    with Arena("1MiB"):
        with Stream(0x60):
            activations(2, 100)
        activations(1, 2 * MIB)
    first, second = (record.getMessage() for record in caplog.records)
    assert "comes from stream 96" in first
    assert "runaway" in second
