"""The upload on a fake driver: every byte arrives, and nothing stays behind after whatever goes wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))

import itertools

from staging_fakes import FakeDriver, Gate, at, lanes_end, refuse, without_collector

from stager.cuda import device_memory, upload
from stager.cuda.pages import PAGE_NBYTES, cut
from stager.cuda.ring import RegistrationRefused
from stager.cuda.watch import Watch, forget
from stager.errors import StagingError, StagingMemoryError, StagingStalled

RING = 4 * PAGE_NBYTES
PIECE = 8 * PAGE_NBYTES
PATHS = {"ring": upload.RING_CORES, "registered": 2}
SIZES = sorted(
    {0, 1, 2 * PIECE + 1, 5 * PIECE, 7 * PIECE - 3}
    | {base + step for base in (PAGE_NBYTES, RING, PIECE) for step in (-1, 0, 1)}
)


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    monkeypatch.setattr(upload, "RING_NBYTES", RING)


@pytest.fixture(params=PATHS)
def n_cores(request):
    return PATHS[request.param]


def source_of(nbytes, offset=0):
    """Bytes that tell their place, `offset` bytes into an allocation."""
    whole = np.arange(nbytes + offset, dtype=np.uint32)
    whole = (whole * np.uint32(2654435761) >> np.uint32(13)).astype(np.uint8)
    return whole[offset:]


def load(driver, source, n_cores, *, watch=None, timeout=30.0, progress=None, **options):
    watch = watch or Watch(source.nbytes, timeout, progress)

    def copy(memory):
        return upload.copy_array(source, memory, driver, watch, n_cores=n_cores, piece_nbytes=PIECE, **options)

    return device_memory.load(driver, source.nbytes, watch, "try the remedy", copy)


class Held:
    """A source that can be watched by weak reference."""

    def __init__(self, nbytes):
        self.array = source_of(nbytes).view(type("Watched", (np.ndarray,), {}))
        self.ref = weakref.ref(self.array)


# ---------------------------------------------------------------------------------------------------- every byte


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_arrives(nbytes, n_cores):
    driver, source = FakeDriver(), source_of(nbytes)
    memory, path = load(driver, source, n_cores)
    np.testing.assert_array_equal(memory.data, source)
    assert path == ("nothing to copy" if nbytes == 0 else "pinned ring" if n_cores > 2 else "registered")
    assert driver.pageable_nbytes == 0
    driver.check(n_memories=1)
    assert memory.size == nbytes


@pytest.mark.parametrize("nbytes", [upload.N_LANES * 4 * 2**20 + 5, 4 * 2**20 - 1, 4 * 2**20, 4 * 2**20 + 1])
def test_every_byte_arrives_with_the_real_sizes(nbytes, monkeypatch, n_cores):
    monkeypatch.setattr(upload, "RING_NBYTES", 4 << 20)
    driver, source = FakeDriver(), source_of(nbytes)
    watch = Watch(nbytes, 30)
    memory, _ = device_memory.load(
        driver, nbytes, watch, "", lambda memory: upload.copy_array(source, memory, driver, watch, n_cores=n_cores)
    )
    assert np.array_equal(memory.data, source)
    driver.check(n_memories=1)


@settings(max_examples=120, deadline=None)
@given(
    nbytes=st.one_of(st.sampled_from(SIZES), st.integers(0, 6 * PIECE)),
    offset=st.one_of(st.integers(0, 64), st.integers(0, 3 * PAGE_NBYTES)),
    n_cores=st.integers(1, 9),
    first_refused=st.one_of(st.none(), st.integers(0, 12)),
    n_refused=st.one_of(st.none(), st.integers(1, 4)),
)
def test_any_size_alignment_and_path(nbytes, offset, n_cores, first_refused, n_refused):
    driver, source = FakeDriver(), source_of(nbytes, offset)
    if first_refused is not None:
        driver.before["register"] = refuse(first_refused, n_refused and first_refused + n_refused)
    memory, _ = load(driver, source, n_cores)
    assert np.array_equal(memory.data, source)
    assert driver.most_registered_nbytes <= max(2 * PIECE + 4 * RING, 2 * upload.N_LANES * RING)
    driver.check(n_memories=1)


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "?"])
@pytest.mark.parametrize("shape", [(), (3,), (1000, 5), (0, 5), (7, 0)])
def test_any_dtype_and_shape(dtype, shape, n_cores):
    source = np.ones(shape, dtype)
    driver = FakeDriver()
    memory, _ = load(driver, source, n_cores)
    assert memory.data.tobytes() == source.tobytes()
    driver.check(n_memories=1)


def test_a_read_only_source_is_registered_as_such():
    driver, source = FakeDriver(), source_of(3 * PIECE)
    source.flags.writeable = False
    load(driver, source, 2, read_only=True)
    assert driver.read_only
    assert all(driver.read_only)


def test_the_ring_is_never_registered_read_only():
    driver = FakeDriver()
    load(driver, source_of(3 * PIECE), upload.RING_CORES, read_only=True)
    assert driver.read_only
    assert not any(driver.read_only)


def test_the_ring_pins_two_buffers_a_lane_whatever_the_size():
    driver = FakeDriver()
    load(driver, source_of(100 * RING), 64)
    assert driver.most_registered_nbytes <= upload.N_LANES * 2 * RING


def test_read_ahead_is_asked_for_every_byte_once_in_order(n_cores):
    asked = []
    driver, source = FakeDriver(), source_of(5 * PIECE + 3)
    load(driver, source, n_cores, read_ahead=lambda first, stop: asked.append((first, stop)))
    assert asked[0][0] == 0
    assert asked[-1][1] == source.nbytes
    assert [stop for _, stop in asked[:-1]] == [first for first, _ in asked[1:]]


def test_filled_spans_arrive():
    source = source_of(10 * RING + 77)
    spans, first = [], 0
    for size in (1, RING, RING - 1, 7, RING, RING):
        spans.append((first, first + size))
        first += size
    driver, watch = FakeDriver(), Watch(first, 30)

    def fill(out, start):
        out[:] = source[start : start + len(out)]

    memory, path = device_memory.load(
        driver, first, watch, "", lambda memory: upload.copy_filled(spans, fill, memory, driver, watch)
    )
    assert np.array_equal(memory.data, source[:first])
    assert path == "pinned ring"
    assert watch.done_nbytes == first
    driver.check(n_memories=1)


# ---------------------------------------------------------------------------------------------------- cutting


@settings(max_examples=300, deadline=None)
@given(ptr=st.integers(0, 1 << 48), nbytes=st.integers(0, 40 * PAGE_NBYTES), pages=st.integers(1, 12))
def test_pieces_tile_exactly_and_share_no_page(ptr, nbytes, pages):
    pieces = cut(ptr, nbytes, pages * PAGE_NBYTES)
    assert [piece.first for piece in pieces] == ([0] + [piece.stop for piece in pieces])[: len(pieces)]
    assert (pieces[-1].stop if pieces else 0) == nbytes
    for piece in pieces:
        assert piece.first < piece.stop
        assert piece.page_ptr % PAGE_NBYTES == piece.page_nbytes % PAGE_NBYTES == 0
        assert piece.page_nbytes <= pages * PAGE_NBYTES
        # The bytes lie inside their own pages, and the pages hold no page without bytes.
        assert piece.page_ptr <= ptr + piece.first < piece.page_ptr + PAGE_NBYTES
        assert piece.page_ptr + piece.page_nbytes - PAGE_NBYTES < ptr + piece.stop
        assert ptr + piece.stop <= piece.page_ptr + piece.page_nbytes
    for one, other in itertools.pairwise(pieces):
        assert one.page_ptr + one.page_nbytes == other.page_ptr


# ------------------------------------------------------------------------------------------ refusal and failure

N_PIECES = 6


@pytest.mark.parametrize("k", range(N_PIECES))
def test_a_refused_piece_goes_through_the_ring_and_says_so(k):
    driver, source = FakeDriver(), source_of(N_PIECES * PIECE - PAGE_NBYTES)
    driver.before["register"] = refuse(k, k + 1)
    memory, path = load(driver, source, 2)
    assert np.array_equal(memory.data, source)
    assert path == "registered and pinned ring"
    assert driver.pageable_nbytes == 0
    driver.check(n_memories=1)


def test_where_nothing_can_be_pinned_the_bytes_still_arrive_and_the_path_says_so(n_cores):
    driver, source = FakeDriver(), source_of(N_PIECES * PIECE + 1)
    driver.before["register"] = refuse(0)
    memory, path = load(driver, source, n_cores)
    assert np.array_equal(memory.data, source)
    assert path == "pageable ring"
    assert driver.pageable_nbytes == source.nbytes
    driver.check(n_memories=1)


# Calls that surely happen: a lane that comes late finds no part left, and then needs no ring.
CALLS = [
    *((upload.RING_CORES, call, k) for call in ("copy", "wait") for k in range(5)),
    *((upload.RING_CORES, call, 0) for call in ("register", "unregister")),
    *((upload.RING_CORES, "lane", k) for k in range(upload.RING_CORES)),
    *((2, call, k) for call in ("register", "copy", "wait", "unregister") for k in range(5)),
    *((2, "lane", k) for k in range(2)),
]


@pytest.mark.parametrize(("n_cores", "call", "k"), CALLS)
def test_a_call_that_fails_leaves_nothing(n_cores, call, k):
    driver = FakeDriver()
    driver.before[call] = at(k, StagingError(f"{call} {k} failed"))

    def run():
        with pytest.raises(StagingError, match=f"{call} {k} failed") as caught:
            load(driver, source_of(20 * PIECE), n_cores)
        # Though the traceback is at hand.
        assert caught.tb is not None
        lanes_end()
        assert len(driver.memories) == 0

    without_collector(run)
    if call != "unregister":
        driver.check()
    else:
        # The driver keeps what it failed to unregister; everything else is unregistered.
        assert len(driver.registered) == 1


def test_a_failure_after_another_leaves_nothing(n_cores):
    driver = FakeDriver()

    def fail(number):
        if number >= 2:
            raise StagingError("all copies fail now")

    driver.before["copy"] = driver.before["wait"] = fail

    def run():
        with pytest.raises(StagingError, match="all copies fail now"):
            load(driver, source_of(20 * PIECE), n_cores)
        lanes_end()
        assert len(driver.memories) == 0

    without_collector(run)
    driver.check()


def test_a_fill_that_fails_leaves_nothing():
    driver, watch = FakeDriver(), Watch(10 * RING, 30)
    spans = [(first, first + RING) for first in range(0, 10 * RING, RING)]

    def fill(out, first):
        if first == 4 * RING:
            raise ValueError("a source went wrong")
        out[:] = 1

    def run():
        with pytest.raises(ValueError, match="a source went wrong"):
            device_memory.load(
                driver, 10 * RING, watch, "", lambda memory: upload.copy_filled(spans, fill, memory, driver, watch)
            )
        lanes_end()
        assert len(driver.memories) == 0

    without_collector(run)
    driver.check()


def test_too_little_memory_is_told_before_anything_is_allocated(n_cores):
    driver = FakeDriver(free=PIECE - 1)
    with pytest.raises(StagingMemoryError) as caught:
        load(driver, source_of(PIECE), n_cores)
    text = str(caught.value)
    assert f"{PIECE:,} bytes" in text
    assert "32.00 KiB are free" in text
    assert "try the remedy" in text
    assert driver.calls["allocate"] == 0
    driver.check()


def test_exactly_enough_memory_is_enough(n_cores):
    driver = FakeDriver(free=PIECE)
    memory, _ = load(driver, source_of(PIECE), n_cores)
    assert memory.size == PIECE


def test_an_allocation_that_fails_is_told_with_needed_free_and_remedy(n_cores):
    driver = FakeDriver()
    driver.before["allocate"] = at(0, MemoryError("in pieces"))
    with pytest.raises(StagingMemoryError, match=r"one piece.*1.00 TiB are free.*in pieces.*try the remedy") as caught:
        load(driver, source_of(PIECE), n_cores)
    assert isinstance(caught.value, MemoryError)
    assert driver.calls["copy"] == 0
    driver.check()


# ---------------------------------------------------------------------------------------------------- stalls


def blocked_load(driver, call, k, n_cores, timeout=0.3):
    """Stall in the k-th call of a kind; returns the error's text, the gate and a weak reference to the source."""
    held, gate = Held(12 * PIECE), Gate(k)
    driver.before[call] = gate
    started = time.monotonic()
    with pytest.raises(StagingStalled) as caught:
        load(driver, held.array, n_cores, timeout=timeout)
    assert time.monotonic() - started < 5
    assert gate.reached.is_set()
    assert isinstance(caught.value, TimeoutError)
    text, source = str(caught.value), held.ref
    # The error's traceback shows this function, whose variables it would keep.
    del caught, held
    return text, gate, source


@pytest.mark.parametrize(("call", "phase", "k"), [
    ("copy", "copy", 0), ("copy", "copy", 3), ("wait", "copy", 2), ("register", "register", 0), ("lane", "start", 0),
    ("unregister", "unregister", 0),
])  # fmt: skip
def test_a_call_that_blocks_stalls_and_keeps_what_it_uses(call, phase, k, n_cores):
    driver = FakeDriver()

    def run():
        text, gate, source = blocked_load(driver, call, k, n_cores)
        assert f"in phase {phase!r}" in text
        assert "bytes done" in text
        assert f"of {12 * PIECE:,}" in text
        assert "no progress for 0." in text
        # The blocked call may still read the source and write the memory.
        assert source() is not None
        assert len(driver.memories) == 1
        gate.opened.set()
        lanes_end()
        assert source() is None
        assert len(driver.memories) == 0

    without_collector(run)
    driver.check()


def test_an_allocation_that_blocks_stalls_and_is_freed_when_it_returns(n_cores):
    driver = FakeDriver()

    def run():
        text, gate, source = blocked_load(driver, "allocate", 0, n_cores)
        assert "in phase 'allocate'" in text
        gate.opened.set()
        lanes_end()
        assert source() is None
        assert len(driver.memories) == 0

    without_collector(run)
    driver.check()


def test_a_blocked_call_that_fails_in_the_end_leaves_nothing(n_cores):
    driver = FakeDriver()

    def run():
        held, gate = Held(12 * PIECE), Gate(2)

        def block_and_fail(number):
            gate(number)
            if number == 2:
                raise StagingError("failed after all")

        driver.before["copy"] = block_and_fail
        with pytest.raises(StagingStalled) as caught:
            load(driver, held.array, n_cores, timeout=0.2)
        source = held.ref
        del held, caught
        gate.opened.set()
        lanes_end()
        assert source() is None
        assert len(driver.memories) == 0

    without_collector(run)
    driver.check()


def test_slow_but_moving_is_not_stalled(n_cores):
    driver, source = FakeDriver(), source_of(10 * PIECE)
    driver.before["copy"] = lambda number: time.sleep(0.1)
    started = time.monotonic()
    memory, _ = load(driver, source, n_cores, timeout=0.3)
    assert time.monotonic() - started > 0.35
    assert np.array_equal(memory.data, source)
    driver.check(n_memories=1)


def test_one_moving_lane_does_not_hide_a_blocked_one_for_ever(n_cores):
    driver, gate = FakeDriver(), Gate(0)
    driver.before["copy"] = lambda number: gate(number) if number == 0 else time.sleep(0.02)
    with pytest.raises(StagingStalled):
        load(driver, source_of(12 * PIECE), n_cores, timeout=0.3)
    gate.opened.set()
    lanes_end()
    driver.check()


def test_a_finished_upload_does_not_wait_for_a_tick(n_cores):
    driver, source = FakeDriver(), source_of(PIECE)
    started = time.perf_counter()
    for _ in range(20):
        load(driver, source, n_cores)
    assert time.perf_counter() - started < 20 * 0.045


# ---------------------------------------------------------------------------------------------------- progress


def test_progress_comes_on_the_callers_thread_rises_and_reaches_the_total(n_cores):
    seen = []
    driver, source = FakeDriver(), source_of(10 * PIECE)
    driver.before["copy"] = lambda number: time.sleep(0.03)
    load(driver, source, n_cores, progress=lambda *told: seen.append((threading.current_thread(), *told)))
    assert {thread for thread, *_ in seen} == {threading.current_thread()}
    done = [nbytes for _, _, nbytes, _ in seen]
    assert done == sorted(done)
    assert done[0] < source.nbytes
    assert done[-1] == source.nbytes
    assert {total for *_, total in seen} == {source.nbytes}
    assert {phase for _, phase, *_ in seen} & {"copy", "pack", "register"}


def test_progress_reaches_the_total_also_when_it_is_quick(n_cores):
    for nbytes in (1, RING, 3 * PIECE):
        seen = []
        load(FakeDriver(), source_of(nbytes), n_cores, progress=lambda *told, seen=seen: seen.append(told))
        assert seen[-1][1:] == (nbytes, nbytes)


def test_an_error_of_the_progress_stops_the_upload_and_leaves_nothing(n_cores):
    driver = FakeDriver()
    driver.before["copy"] = lambda number: time.sleep(0.03)

    def progress(phase, done, total):
        if done:
            raise ValueError("the bar broke")

    with pytest.raises(ValueError, match="the bar broke"):
        load(driver, source_of(30 * PIECE), n_cores, progress=progress)
    lanes_end()
    assert driver.calls["copy"] < 30
    driver.check()


# ---------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("how", ["signal", "blocked"])
def test_an_interrupt_is_prompt_and_leaves_nothing(n_cores, how):
    driver, gate = FakeDriver(), Gate(4)
    driver.before["copy"] = gate if how == "blocked" else lambda number: time.sleep(0.05)
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, interrupt)

    def run():
        held = Held(400 * PIECE)
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt) as caught:
                load(driver, held.array, n_cores)
            elapsed = time.monotonic() - sent[0]
            assert how == "blocked" or len(driver.memories) == 0
            del caught
        finally:
            timer.join()
            gate.opened.set()
            lanes_end()
        assert elapsed < 1
        source = held.ref
        del held
        assert source() is None
        assert len(driver.memories) == 0

    without_collector(run)
    driver.check()


SCRIPT = """
import sys, time
sys.path[:0] = [sys.argv[1]]
import numpy as np
from staging_fakes import FakeDriver
from stager.cuda import device_memory, upload
from stager.cuda.watch import Watch
driver = FakeDriver()
driver.before["copy"] = lambda number: (number == 0 and print("copying", flush=True), time.sleep(0.05))
source = np.ones(1 << 28, np.uint8)
watch = Watch(source.nbytes, 60)
try:
    device_memory.load(driver, source.nbytes, watch, "", lambda memory: upload.copy_array(
        source, memory, driver, watch, n_cores=int(sys.argv[2]), piece_nbytes=1 << 20))
except KeyboardInterrupt:
    print("registered", len(driver.registered), "allocated", len(driver.memories), driver.faults, flush=True)
"""


def test_ctrl_c_in_a_process_of_its_own(n_cores):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(n_cores)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "copying\n"
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.stdout.readline() == "registered 0 allocated 0 []\n"
        assert time.monotonic() - started < 1
    assert process.returncode == 0


# ---------------------------------------------------------------------------------------------------- Watch


def test_the_first_error_stops_the_others():
    watch = Watch(1, 30)
    stopped = threading.Event()

    def fail():
        raise ValueError("first")

    def wait():
        while not watch.cancelled:
            time.sleep(0.001)
        stopped.set()

    with pytest.raises(ValueError, match="first") as caught:
        watch.run([fail, wait, wait])
    assert stopped.is_set()
    # An error nobody expected says where in the thread it came from.
    assert "in fail" in caught.value.__notes__[0]


def test_results_come_in_the_order_of_the_jobs():
    watch = Watch(1, 30)
    assert watch.run([lambda i=i: (time.sleep(0.01 * (4 - i)), i)[1] for i in range(5)]) == list(range(5))


def test_forget_frees_what_a_kept_error_held():
    class Large:
        pass

    refs = []

    def fail():
        large = Large()
        refs.append(weakref.ref(large))
        try:
            raise OSError("inner")
        except OSError as error:
            raise ValueError("outer") from error

    def run():
        with pytest.raises(ValueError, match="outer") as caught:
            fail()
        assert refs[0]() is not None
        forget(caught.value)
        assert refs[0]() is None

    without_collector(run)


# ---------------------------------------------------------------------------------------------------- Registration


def register(driver, source, *, timeout=30.0, **options):
    registration = upload.Registration(source, driver)
    registration.register(Watch(source.nbytes, timeout), read_only=False, piece_nbytes=PIECE, **options)
    return registration


@pytest.mark.parametrize("offset", [0, 1, 4095])
@pytest.mark.parametrize("nbytes", [1, PIECE, 5 * PIECE + 1])
def test_a_registration_covers_all_and_ends_with_its_last_reference(nbytes, offset):
    driver, source = FakeDriver(), source_of(nbytes, offset)
    registration = register(driver, source)
    covered = sum(driver.registered.values())
    assert nbytes <= covered < nbytes + 2 * PAGE_NBYTES
    assert min(driver.registered) <= source.ctypes.data
    assert source.ctypes.data + nbytes <= max(ptr + size for ptr, size in driver.registered.items())
    other = registration
    del registration
    assert driver.registered
    driver.before["unregister"] = lambda number: order.append("unregister")
    driver.before["synchronize"] = lambda number: order.append("synchronize")
    order = []
    del other
    assert order[0] == "synchronize"
    assert set(order[1:]) == {"unregister"}
    driver.check()


def test_a_registration_holds_its_memory():
    driver, held = FakeDriver(), Held(PIECE)
    registration = register(driver, held.array)
    del held.array
    assert held.ref() is not None
    del registration
    assert held.ref() is None


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("error", [RegistrationRefused("no more"), StagingError("broken")])
def test_a_registration_that_fails_at_any_piece_leaves_nothing(k, error):
    driver = FakeDriver()
    driver.before["register"] = at(k, error)
    registration = upload.Registration(source_of(6 * PIECE - PAGE_NBYTES), driver)
    with pytest.raises(StagingError, match=r"no more|broken") as caught:
        registration.register(Watch(1, 30), read_only=False, piece_nbytes=PIECE)
    if isinstance(error, RegistrationRefused):
        assert "placement='device'" in str(caught.value)
    lanes_end()
    driver.check()


def test_a_registration_that_blocks_is_told_and_cleaned_up_when_it_returns():
    driver, gate, held = FakeDriver(), Gate(2), Held(8 * PIECE)
    driver.before["register"] = gate

    def run():
        with pytest.raises(StagingStalled, match="phase 'register'") as caught:
            register(driver, held.array, timeout=0.2)
        forget(caught.value)
        del held.array
        assert held.ref() is not None
        gate.opened.set()
        lanes_end()
        assert held.ref() is None

    without_collector(run)
    driver.check()


def test_an_interrupted_registration_leaves_nothing():
    driver = FakeDriver()
    driver.before["register"] = lambda number: time.sleep(0.05)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            register(driver, source_of(200 * PIECE))
    finally:
        timer.join()
    lanes_end()
    gc.collect()
    driver.check()


def test_a_registration_is_released_whole_although_a_call_fails():
    driver = FakeDriver()
    registration = register(driver, source_of(4 * PIECE))
    n = len(driver.registered)
    driver.before["unregister"] = at(0, StagingError("one failed"))
    with contextlib.suppress(StagingError):
        registration.release()
    assert driver.calls["unregister"] == n
    assert len(driver.registered) == 1


def test_a_released_registration_is_not_released_again():
    driver = FakeDriver()
    registration = register(driver, source_of(4 * PIECE))
    registration.release()
    registration.release()
    del registration
    driver.check()
