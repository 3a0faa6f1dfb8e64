"""Overflow: its own pool, its order, what it does when the device is full."""

import contextlib
import gc
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
sys.path.append(str(Path(__file__).parent))

from arena_fakes import TOTAL, Stream, fake_cuda  # noqa: E402
from cupy.cuda.memory import OutOfMemoryError  # noqa: E402

from stager.cuda.arena import Arena  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def driver():
    with fake_cuda() as driver:
        yield driver


def empty(nbytes):
    return cupy.empty(nbytes, np.uint8)


def test_the_pool_is_made_at_once_and_keeps_as_much_as_the_capacity(driver, monkeypatch):
    arena = Arena("3MiB")
    assert list(driver.pools.values()) == [(0, 3 * MIB)]
    del arena
    monkeypatch.setenv("STAGER_OVERFLOW_RETAIN", "25%")
    arena = Arena("3MiB")
    assert list(driver.pools.values()) == [(0, TOTAL // 4)]
    del arena
    assert not driver.pools


def test_memory_is_freed_on_the_stream_that_allocated_it(driver):
    with Arena("1MiB") as arena:
        with Stream(0x99) as _, arena.pause():
            pass
        stream = Stream(0x99)
        with stream:
            there = empty(100)
        held = stream
        del stream
        del there  # dropped under another stream
        arena.reset()
        assert driver.freed_on == [held]


def test_destructors_make_no_driver_call(driver):
    with Arena(512) as arena:
        arrays = [empty(1000) for _ in range(10)]
        before = driver.calls.copy()
        del arrays
        gc.collect()
        assert driver.calls == before
        empty(1000)
        assert driver.calls["pool_free"] == 10
        assert arena.stats().overflow_live_blocks == 0


def test_a_full_device_is_an_error_with_the_snapshot_and_the_next_step_works(driver):
    with Arena("1MiB") as arena:
        driver.limit = 4 * MIB
        held = [empty(2 * MIB)]
        with pytest.raises(OutOfMemoryError, match="2,097,152 of 8,589,934,592 bytes are free") as caught:
            empty(3 * MIB)
        assert caught.value.stats.overflow_live_nbytes == 2 * MIB
        assert driver.calls["synchronize"] == driver.calls["pool_trim"] == driver.calls["release_other_pools"] == 1
        held.clear()
        with arena.step():
            empty(3 * MIB)
            empty(1000)
        assert arena.stats().refused == 1
    assert not driver.outside


def test_garbage_is_collected_before_giving_up(driver):
    class Knot:
        pass

    with Arena("1MiB"):
        driver.limit = 4 * MIB
        knot = Knot()
        knot.self, knot.array = knot, empty(3 * MIB)
        gc.disable()
        try:
            del knot
            assert empty(3 * MIB).size == 3 * MIB
        finally:
            gc.enable()


def test_every_driver_call_may_fail(driver):
    for k in range(1, 12):
        with Arena("1MiB") as arena:
            driver.fail_at = driver.calls["all"] + k
            arrays = []
            for _ in range(6):
                with contextlib.suppress(OutOfMemoryError):
                    arrays.append(empty(2 * MIB))
                arrays = arrays[-2:]
            del arrays
            driver.fail_at = None
            arena.reset()
            assert arena.stats().overflow_live_nbytes == 0
            assert not driver.outside


def test_a_stream_destroyed_by_its_owner(driver):
    with Arena("1MiB") as arena:
        with Stream(0x99):
            there = empty(100)
        del there
        driver.fail_at = driver.calls["all"] + 1  # the free on that stream
        arena.reset()
        assert driver.calls["free_after_device"] == 1
        assert not driver.outside


def test_another_threads_own_stream_is_freed_by_that_thread(driver):
    arena = Arena("1MiB")
    driver.now = Stream(2)
    box, allocated, dropped, drained = [], threading.Event(), threading.Event(), threading.Event()

    def other():
        with arena:
            box.append(empty(2 * MIB))
            allocated.set()
            assert dropped.wait(10)
            with arena.step():  # drains, in the thread the stream belongs to
                pass
            drained.set()

    with arena:
        thread = threading.Thread(target=other)
        thread.start()
        assert allocated.wait(10)
        box.clear()
        arena.reset()
        assert driver.calls["pool_free"] == 0
        dropped.set()
        assert drained.wait(10)
        thread.join()
    assert driver.calls["pool_free"] == 1
    assert driver.calls["free_after_device"] == 0


def test_threads_overflow_at_once(driver):
    arena = Arena("64KiB")
    errors = []

    def work(seed):
        draw = np.random.default_rng(seed)
        try:
            with arena:
                live = []
                for size in draw.integers(1, 30_000, 1_000).tolist():
                    live.append(empty(size))
                    live = live[-8:]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    arena.reset()
    assert (arena.stats().overflow_live_blocks, arena.stats().overflow_live_nbytes) == (0, 0)
    assert not driver.outside
