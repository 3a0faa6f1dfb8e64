"""The arena's contract on a fake slab: real CuPy arrays and pointers at made-up addresses."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
sys.path.append(str(Path(__file__).parent))

from arena_fakes import BASE, OUTSIDE, Slab, Stream, fake_cuda  # noqa: E402
from cupy.cuda.memory import OutOfMemoryError  # noqa: E402

from stager.cuda.arena import Arena, ArenaOutOfMemoryError  # noqa: E402
from stager.errors import ArenaError, ArenaEscapeError, ConfigError, DeviceError  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def driver():
    with fake_cuda() as driver:
        yield driver


def empty(nbytes):
    return cupy.empty(nbytes, np.uint8)


def place(array):
    return array.data.ptr - BASE


# Sizes and configuration


def test_blocks_are_aligned_and_rounded(driver):
    with Arena("1MiB") as arena:
        arrays = [empty(n) for n in (1, 511, 512, 513, 4000)]
        assert [place(a) for a in arrays] == [0, 512, 1024, 1536, 2560]
        assert arena.stats().used_nbytes == 512 * 3 + 1024 + 4096


def test_nothing_has_a_null_pointer(driver):
    with Arena("1MiB") as arena:
        array = empty(0)
        assert array.data.ptr == 0
        assert array[:0].shape == (0,)
        assert arena.stats().live_blocks == 0


@pytest.mark.parametrize("nbytes", [-1, -511, -512, -100_000])
def test_negative_sizes_are_refused(driver, nbytes):
    with Arena("1MiB"), pytest.raises(ValueError, match="negative"):
        cupy.cuda.alloc(nbytes)


@pytest.mark.parametrize("nbytes", [1.5, 512.0, "512", None])
def test_sizes_that_are_no_integers_are_refused(driver, nbytes):
    with Arena("1MiB"), pytest.raises(TypeError):
        cupy.cuda.alloc(nbytes)


def test_numpy_integers_are_integers(driver):
    with Arena("1MiB"):
        assert cupy.cuda.alloc(np.int64(100)).mem.size == 512


@pytest.mark.parametrize(("size", "nbytes"), [("512MiB", 512 * MIB), (5000, 4608), ("50%", 4 << 30), ("1kB", 512)])
def test_capacity(driver, size, nbytes):
    assert Arena(size).stats().capacity_nbytes == nbytes


@pytest.mark.parametrize("size", [0, -1, "", "lots", "120%", "0%", 511, "9GiB", True, "512 MIX"])
def test_an_unusable_capacity_is_an_error(driver, size):
    with pytest.raises(ConfigError):
        Arena(size)


def test_capacity_from_environment_and_file(driver, monkeypatch, tmp_path):
    monkeypatch.delenv("STAGER_ARENA_SIZE", raising=False)
    with pytest.raises(ConfigError, match="STAGER_ARENA_SIZE"):
        Arena()
    config = tmp_path / "stager.toml"
    config.write_text('[arena]\nsize = "2MiB"\noverflow = "raise"\n')
    assert Arena.from_config(config).stats().capacity_nbytes == 2 * MIB
    monkeypatch.setenv("STAGER_ARENA_SIZE", "3MiB")
    assert Arena().stats().capacity_nbytes == 3 * MIB
    assert Arena.from_config(config).stats().capacity_nbytes == 3 * MIB
    assert Arena("1MiB").stats().capacity_nbytes == MIB
    monkeypatch.setenv("STAGER_ARENA_SIZE", "plenty")
    with pytest.raises(ConfigError, match="plenty"):
        Arena()


def test_wrong_options_are_errors(driver, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="overflow"):
        Arena("1MiB", overflow="spill")
    with pytest.raises(ConfigError, match="on_escape"):
        Arena("1MiB", on_escape="shout")
    config = tmp_path / "stager.toml"
    config.write_text('[arena]\nsize = "2MiB"\nsise = 1\n')
    with pytest.raises(ConfigError, match="sise"):
        Arena.from_config(config)
    monkeypatch.setenv("STAGER_OVERFLOW_RETAIN", "-3")
    with pytest.raises(ConfigError, match="STAGER_OVERFLOW_RETAIN"):
        Arena("1MiB")


def test_a_slab_the_device_cannot_give(driver):
    driver.limit = MIB
    with pytest.raises(ArenaOutOfMemoryError, match="smaller"):
        Arena("2MiB")
    assert driver.calls["release_other_pools"] == 1


def test_free_threaded_python_is_refused(driver, monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(DeviceError, match="PYTHON_GIL"):
        Arena("1MiB")


# Reuse


def test_the_block_freed_last_is_used_first(driver):
    with Arena("1MiB"):
        first, second = empty(1000), empty(1000)
        at = place(second)
        del first
        del second
        assert place(empty(1000)) == at


def test_views_slices_and_cycles_hold_their_block(driver):
    with Arena("1MiB") as arena:
        base = empty(4096)
        view = base.view(np.float32)[3:]
        at = place(base)
        del base
        other = empty(4096)
        assert place(other) != at
        del view
        assert place(empty(4096)) == at

        class Knot:
            pass

        knot = Knot()
        knot.self, knot.array = knot, other
        del other, knot
        assert arena.stats().live_blocks == 1
        gc.collect()
        assert arena.stats().live_blocks == 0


def test_a_million_allocations_without_reset_stay_where_they_were(driver):
    with Arena("64MiB") as arena:
        malloc = cupy.cuda.get_allocator()
        for _ in range(250_000):
            a, b = malloc(48_000), malloc(MIB)
            c, d = malloc(1028), malloc(48_000)
            del a, b, c, d
        stats = arena.stats()
        assert stats.allocations == 1_000_000
        assert stats.overflows == stats.used_nbytes == 0
        assert stats.peak_nbytes == 2 * 48_128 + MIB + 1536


def test_survivors_cost_their_own_size(driver):
    sizes = [4, 700, 5_000]
    with Arena("128MiB") as arena:
        kept, bytes_kept = [], 0
        for _ in range(10_000):
            with arena.step():
                kept.extend(cupy.cuda.alloc(n) for n in sizes)
                bytes_kept += 512 + 1024 + 5120
                temporaries = [cupy.cuda.alloc(n) for n in (48_000, 48_000, 100_000)]
                del temporaries
        stats = arena.stats()
        assert stats.used_nbytes == bytes_kept
        assert stats.peak_nbytes == bytes_kept + 48_128 * 2 + 100_352
        assert stats.overflows == 0


def test_sizes_that_never_repeat(driver):
    draw = np.random.default_rng(3)
    sizes, victims = draw.integers(1, 2 * MIB, 100_000).tolist(), draw.integers(0, 20, 100_000).tolist()
    with Arena("64MiB") as arena:
        malloc = cupy.cuda.get_allocator()
        alive = [None] * 20
        lapse = []
        for part in range(0, 100_000, 10_000):
            began = time.process_time()
            for size, victim in zip(sizes[part : part + 10_000], victims[part : part + 10_000], strict=True):
                alive[victim] = None
                alive[victim] = malloc(size)
            lapse.append(time.process_time() - began)
        assert arena.stats().overflows == 0
        assert min(lapse[-4:]) < 1.6 * max(lapse[:4])


def test_a_full_arena_merges_before_it_overflows(driver):
    with Arena(8 * 512) as arena:
        small = [empty(1) for _ in range(8)]
        del small
        assert place(empty(8 * 512)) == 0
        assert (arena.stats().merges, arena.stats().overflows) == (1, 0)


# Installing


def test_the_allocator_from_before_comes_back(driver):
    def outer(nbytes):
        raise AssertionError

    arena = Arena("1MiB")
    with cupy.cuda.using_allocator(outer):
        with arena:
            with arena:
                empty(1)
            empty(1)
            with arena.pause():
                assert cupy.cuda.get_allocator() is outer
            with pytest.raises(ZeroDivisionError), arena:
                1 / 0  # noqa: B018
            empty(1)
        assert cupy.cuda.get_allocator() is outer
        with pytest.raises(KeyError), arena:
            raise KeyError
        assert cupy.cuda.get_allocator() is outer


def test_other_threads_are_not_affected(driver):
    seen = []
    with Arena("1MiB"):
        inside = cupy.cuda.get_allocator()
        thread = threading.Thread(target=lambda: seen.append(cupy.cuda.get_allocator()))
        thread.start()
        thread.join()
    assert seen[0] is not inside


def test_scopes_need_the_arena(driver):
    arena = Arena("1MiB")
    for scope in (arena.step(), arena.pause(), arena.measure(), arena.capture(Stream(7))):
        with pytest.raises(ArenaError, match="inside the arena"), scope:
            pass


def test_threads_share_an_arena(driver):
    arena = Arena("64MiB")
    errors = []

    def work(seed):
        draw = np.random.default_rng(seed)
        live = {}
        try:
            with arena:
                for size in draw.integers(1, 20_000, 3_000).tolist():
                    pointer = cupy.cuda.alloc(size)
                    live[pointer.ptr] = pointer
                    if len(live) > 10:
                        del live[next(iter(live))]
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
    stats = arena.stats()
    assert (stats.allocations, stats.used_nbytes, stats.live_blocks) == (12_000, 0, 0)
    arena.reset()
    assert arena.stats().peak_nbytes == 0


# Streams and devices


def test_another_stream_goes_to_overflow_and_is_reported_once(driver, caplog):
    other = Stream(0x99)
    with Arena("1MiB") as arena:
        here = empty(100)
        with other:
            there = [empty(100) for _ in range(3)]
        assert place(here) == 0
        assert all(a.data.ptr >= OUTSIDE and a.data.ptr < BASE for a in there)
        assert arena.stats().foreign_requests == 3
        assert place(empty(100)) == 512
    assert len(caplog.records) == 1
    assert "stream 153" in caplog.text
    del there
    arena.reset()
    assert set(driver.freed_on) == {other}
    assert not driver.outside


def test_another_device_goes_to_overflow_of_that_device(driver):
    with Arena("1MiB") as arena:
        driver.now_device = 1
        there = empty(100)
        assert there.data.device_id == 1
        assert [entry[2] for entry in driver.outside.values()] == [1]
        driver.now_device = 0
        assert empty(100).data.device_id == 0
        assert arena.stats().foreign_requests == 1


def test_an_equal_stream_object_is_the_same_stream(driver):
    with Arena("1MiB") as arena:
        empty(100)
        with Stream(0):
            assert place(empty(100)) == 0
        assert arena.stats().foreign_requests == 0


def test_an_empty_arena_moves_to_another_stream_in_order(driver):
    arena = Arena("1MiB")
    with arena:
        empty(100)
    stream = Stream(0x77)
    with stream, arena:
        kept = empty(100)
    assert driver.ordered == [(driver.null, stream)]
    assert place(kept) == 0
    with arena:
        assert empty(100).data.ptr < BASE  # kept may still be used on the other stream


def test_a_per_thread_default_stream_belongs_to_its_thread(driver):
    ptds = driver.now = Stream(2)
    arena = Arena("1MiB")
    places = []

    def other():
        with arena:
            kept = empty(100)
            places.append(kept.data.ptr)

    with arena:
        assert place(empty(100)) == 0
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert places[0] < BASE
    # The free must not be issued on this thread's stream of the same handle.
    assert arena.stats().overflow_live_blocks == 0
    arena.reset()
    assert ptds not in driver.freed_on
    assert driver.calls["free_after_device"] == 1


# Steps


def test_steps_tell_what_outlived_them(driver):
    with Arena("1MiB") as arena:
        kept = []
        for number in (1, 2, 3):
            with arena.step() as step:
                kept.append(empty(100))
                gone = empty(5000)
                del gone
            assert (step.number, step.live_blocks) == (number, 1)
        assert arena.stats().escaped_blocks == 2  # the third is judged when a fourth begins
        assert arena.stats().steps == 3
        kept.clear()
        assert step.live_blocks == 0


def test_steps_nest(driver):
    with Arena("1MiB") as arena, arena.step() as outer:
        a = empty(1)
        with arena.step() as inner:
            b, c = empty(1), empty(1)
            assert (outer.live_blocks, inner.live_blocks) == (1, 2)
        d = empty(1)
        assert (outer.live_blocks, inner.live_blocks) == (2, 2)
        del a, b, c, d
        assert (outer.live_blocks, inner.live_blocks) == (0, 0)


def test_steps_count_overflow_too(driver):
    with Arena(512, overflow="pool") as arena:
        held = empty(512)
        with arena.step() as step:
            outside = empty(512)
            assert step.live_blocks == 1
            del outside
        with arena.step():
            assert step.live_blocks == 0
        del held


def test_steps_belong_to_their_thread(driver):
    arena = Arena("1MiB")
    kept = []
    inside, done = threading.Event(), threading.Event()

    def other():
        with arena, arena.step():
            inside.set()
            assert done.wait(10)
            kept.append(empty(1))

    thread = threading.Thread(target=other)
    with arena, arena.step() as step:
        thread.start()
        assert inside.wait(10)
        mine = empty(1)
        done.set()
        thread.join()
        assert step.live_blocks == 1
        del mine
        assert step.live_blocks == 0


def test_escapes_raise_when_asked_and_never_mask_an_exception(driver, caplog):
    with Arena("1MiB", on_escape="raise", trace=True) as arena:
        with arena.step():
            kept = empty(600)
        with pytest.raises(ArenaEscapeError, match=r"1 blocks \(1.00 KiB\) outlived step 1.*test_arena.py:\d+"):
            arena.step().__enter__()
        assert kept.size == 600
        with arena.step():
            more = empty(600)
        try:
            raise KeyError  # on its way while the step is entered
        except KeyError:
            with arena.step():
                pass
        assert "outlived step 2" in caplog.text
        del more


def test_escapes_warn_once_an_epoch(driver, caplog):
    kept = []
    with Arena("1MiB", on_escape="warn") as arena:
        for _ in range(5):
            with arena.step():
                kept.append(empty(1))
        assert len(caplog.records) == 1
        arena.reset()
        with arena.step():
            pass
        assert len(caplog.records) == 2
        assert arena.stats().escaped_blocks == 1


def test_a_step_ends_where_it_began(driver):
    with Arena("1MiB") as arena:
        outer, inner = arena.step(), arena.step()
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(ArenaError, match="out of turn"):
            outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        outer.__exit__(None, None, None)
        with pytest.raises(ArenaError, match="once"):
            outer.__enter__()


# Capture


def test_capture_holds_what_it_gave_out_until_released(driver):
    stream = Stream(0x50)
    with stream, Arena("1MiB") as arena:
        before = empty(100)
        with arena.capture(stream) as c:
            assert stream.is_capturing
            inside = empty(100)
            c.inputs(before)
        assert c.graph is not None
        at = {place(before), place(inside)}
        del before, inside
        assert arena.stats().captured_blocks == arena.stats().live_blocks == 2
        assert place(empty(100)) not in at
        c.release()
        c.release()
        assert arena.stats().live_blocks == arena.stats().captured_blocks == 0
        assert place(empty(100)) in at


def test_overflow_while_capturing_is_refused(driver, caplog):
    stream = Stream(0x50)
    with stream, Arena("1MiB") as arena:
        outside = empty(2 * MIB)
        caplog.clear()
        arena.reset()
        with arena.capture(stream):
            with pytest.raises(OutOfMemoryError, match="run the step once"):
                empty(2 * MIB)
            del outside
            arena.reset()
            assert driver.calls["pool_free"] == 0  # queued until the capture is over
        arena.reset()
        assert driver.calls["pool_free"] == 1
        assert "capture-refused" in caplog.text


def test_a_capture_the_arena_does_not_know_of_is_refused(driver):
    stream = Stream(0x50)
    with stream, Arena("1MiB") as arena:
        stream.begin_capture()
        with pytest.raises(ArenaOutOfMemoryError, match=r"arena\.capture"):
            empty(100)
        with arena.capture(stream) as c:
            empty(100)
        assert stream.is_capturing  # whoever began it ends it
        assert c.graph is None


def test_capture_needs_the_arenas_stream(driver):
    with Arena("1MiB") as arena:
        with pytest.raises(ArenaError, match="bound to stream"), arena.capture(Stream(5)):
            pass
        assert driver.now is driver.null


def test_a_failed_capture_lets_go(driver):
    stream = Stream(0x50)
    with stream, Arena("1MiB") as arena:
        c = arena.capture(stream)
        with contextlib.suppress(KeyError), c:
            empty(100)
            raise KeyError
        assert c.graph is None
        assert arena.stats().live_blocks == 0
        assert not stream.is_capturing


# Pause, measure, poison


def test_measure_tells_a_capacity_that_fits(driver):
    def step():
        kept = [empty(n) for n in (100, 5000, 70_000)]
        for n in (3000, 3000, 90_000):
            empty(n)
        kept.pop()
        kept.append(empty(123_456))
        return kept

    with Arena(512) as arena:
        with arena.measure() as m:
            step()
        assert m.allocations == 7
        assert m.largest_nbytes == 123_904
        assert m.peak_nbytes <= m.capacity_nbytes
        assert arena.stats().overflows == 0
    assert not driver.outside
    with Arena(m.capacity_nbytes) as arena:
        step()
        assert (arena.stats().overflows, arena.stats().peak_nbytes) == (0, m.capacity_nbytes)
    with Arena(m.peak_nbytes - 512) as arena:
        step()
        assert arena.stats().overflows > 0


def test_measure_works_where_overflow_raises(driver):
    with Arena(512, overflow="raise") as arena:
        with arena.measure() as m:
            kept = empty(4096)
            assert cupy.cuda.get_allocator() is not None
        assert m.capacity_nbytes == 4096
        del kept


def test_poison_fills_what_is_given_out(driver, monkeypatch):
    monkeypatch.setenv("STAGER_ARENA_POISON", "1")
    with Arena("1MiB"):
        empty(1000)
        empty(1000)
    assert driver.filled == [(BASE, 1024), (BASE, 1024)]


# Errors, exit, fork


def test_exhaustion_carries_the_snapshot(driver):
    with Arena(4096, overflow="raise") as arena:
        kept = empty(4096)
        with pytest.raises(OutOfMemoryError, match="1 live blocks") as caught:
            empty(100)
        assert caught.value.stats.used_nbytes == 4096
        assert isinstance(caught.value, ArenaError)
        del kept
        empty(100)
        assert arena.stats().refused == 1


def test_statistics_ask_the_driver_nothing(driver):
    with Arena("1MiB") as arena:
        empty(4000)
        empty(2 * MIB)
        before = driver.calls.copy()
        for _ in range(10):
            arena.stats()
        assert driver.calls == before


def test_arrays_outlive_the_arena_and_the_slab_goes_with_the_last(driver):
    gc.collect()
    gc.disable()
    try:
        before = Slab.alive
        arena = Arena("1MiB")
        gone = weakref.ref(arena)
        with arena, arena.step():
            kept, more = empty(100), empty(2 * MIB)
        del arena
        assert gone() is None
        assert Slab.alive == before + 1
        view = kept[50:]
        del kept
        assert Slab.alive == before + 1
        del view
        assert Slab.alive == before
        assert driver.outside
        del more
        assert not driver.outside
        assert driver.calls["pool_destroy"] == 1
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_refused_and_its_destructors_rest(driver):
    with Arena("1MiB") as arena:
        kept, outside = empty(100), empty(2 * MIB)
        calls = driver.calls["all"]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                del kept, outside
                gc.collect()
                for method in (arena.step, arena.stats, arena.reset, arena.report, lambda: empty(100)):
                    with pytest.raises(ArenaError, match="fork"):
                        method()
                del arena
                gc.collect()
                code = 0 if driver.calls["all"] == calls else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert kept.size == 100
        assert outside.size == 2 * MIB
        assert arena.stats().live_blocks == 1


def test_arrays_alive_at_exit_do_no_harm(tmp_path):
    script = tmp_path / "exit.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from arena_fakes import *\n"
        "import cupy\n"
        "arena = fake_arena(FakeDriver(), '1MiB')\n"
        "arena.__enter__()\n"
        "kept, more = cupy.empty(100), cupy.empty(1 << 20)\n"
        "knot = []; knot.append((knot, cupy.empty(5)))\n"
        "step = arena.step(); step.__enter__(); last = cupy.empty(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", script, os.path.dirname(__file__)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "Exception" not in done.stderr
    assert done.stderr.count("\n") == 1  # the overflow line


def test_finalizers_that_allocate_inside_malloc(driver):
    """Garbage collection may run anywhere inside the allocator, and what it runs may allocate."""

    class Restless:
        def __del__(self):
            empty(3000)

    with Arena("1MiB") as arena:
        before = gc.get_threshold()
        gc.set_threshold(1)
        try:
            for number in range(300):
                knot = [Restless()]
                knot.append(knot)
                del knot
                empty(512 * (number % 50 + 1))
        finally:
            gc.set_threshold(*before)
        gc.collect()
        assert arena.stats().live_blocks == 0
        assert arena.stats().overflows == 0
