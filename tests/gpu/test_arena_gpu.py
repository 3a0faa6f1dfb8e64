"""The arena on a GPU: contents, order of streams, graphs, pressure, and what outlives what."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402
from cupy.cuda.memory import OutOfMemoryError  # noqa: E402

from stager.cuda.arena import Arena, ArenaOutOfMemoryError  # noqa: E402
from stager.errors import ArenaError, ArenaEscapeError  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def delay(milliseconds=30.0):
    """Keep the current stream busy."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }', "spin"
    )
    kernel((1,), (1,), (int(milliseconds * 1_500_000),))


def run(code, *, env=None, arguments=()):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])} | (env or {}),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done


# Contents


@pytest.mark.parametrize("poison", ["0", "1"])
def test_contents_stay_what_was_written(poison, monkeypatch):
    monkeypatch.setenv("STAGER_ARENA_POISON", poison)
    draw = np.random.default_rng(1)
    sizes = draw.choice([4, 100, 513, 4096, 48_000, 262_144], 6_000)
    live = []
    with Arena("16MiB") as arena:
        for number, size in enumerate(sizes.tolist()):
            array = cupy.full(size // 4, number, cupy.int32)
            live.append((number, array if number % 3 else array[size // 8 :]))
            if len(live) > 40:
                expected, old = live.pop(int(draw.integers(len(live))))
                assert bool((old == expected).all())
        for expected, old in live:
            assert bool((old == expected).all())
        del live, array, old
        stats = arena.stats()
        assert (stats.used_nbytes, stats.overflow_live_nbytes) == (0, 0)


def test_poison_is_not_a_number_in_every_float(monkeypatch):
    monkeypatch.setenv("STAGER_ARENA_POISON", "1")
    with Arena("16MiB"):
        for kind in (np.float16, np.float32, np.float64):
            cupy.zeros(1000, kind)
            assert bool(cupy.isnan(cupy.empty(1000, kind)).all())


def test_survivors_cost_their_own_size():
    kept = []
    with Arena("64MiB") as arena:
        for number in range(10_000):
            with arena.step():
                kept.append(cupy.full(1, number, cupy.float32))
                for _ in range(2):
                    cupy.empty(48_000, cupy.uint8)
        stats = arena.stats()
        assert stats.overflows == 0
        assert stats.used_nbytes == 10_000 * 512
        assert stats.peak_nbytes == 10_000 * 512 + 48_128
    assert float(cupy.concatenate(kept[::1000]).sum()) == sum(range(0, 10_000, 1000))


def test_a_network_gives_the_same_numbers_as_with_cupys_pool():
    def train():
        rng = cupy.random.RandomState(3)
        w1, w2 = rng.standard_normal((20, 300), cupy.float32), rng.standard_normal((300, 1), cupy.float32)
        x, y = rng.standard_normal((64, 20), cupy.float32), rng.standard_normal((64, 1), cupy.float32)
        for _ in range(200):
            hidden = cupy.tanh(x @ w1)
            error = hidden @ w2 - y
            g2 = hidden.T @ error
            g1 = x.T @ ((error @ w2.T) * (1 - hidden * hidden))
            w1 -= 1e-5 * g1
            w2 -= 1e-5 * g2
        return w1.get(), w2.get()

    expected = train()
    with Arena("64MiB") as arena:
        got = train()
        assert arena.stats().overflows == 0
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_array_equal(a, b)


# Order of streams


def test_reuse_on_one_stream_is_ordered():
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, Arena("64MiB") as arena:
        for number in range(20):
            source = cupy.full(MIB, number, cupy.int32)
            if number % 5 == 0:
                delay(5)
            result = source.copy()
            place = source.data.ptr
            del source
            other = cupy.full(MIB, -1, cupy.int32)
            assert other.data.ptr == place
            del other
            assert bool((result == number).all())
        assert arena.stats().overflows == 0


def test_an_arena_moved_to_another_stream_waits_for_the_first():
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    result = cupy.zeros(MIB, cupy.int32)
    runtime.deviceSynchronize()
    arena = Arena("64MiB")
    with first, arena:
        source = cupy.full(MIB, 5, cupy.int32)
        place = source.data.ptr
        delay()
        cupy.copyto(result, source)
        del source
    with second, arena:
        other = cupy.full(MIB, 9, cupy.int32)
        assert other.data.ptr == place
    runtime.deviceSynchronize()
    assert bool((result == 5).all())


def test_other_streams_get_memory_of_their_own():
    bound, other, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    result = cupy.zeros((20, MIB), cupy.int32)
    runtime.deviceSynchronize()
    with bound, Arena("64MiB") as arena:
        mine = cupy.full(MIB, 1, cupy.int32)
        for number in range(20):
            with other:
                source = cupy.full(MIB, number, cupy.int32)
                delay(2)
                cupy.copyto(result[number], source)
                del source
            with third:
                cupy.full(MIB, -1, cupy.int32)
        assert arena.stats().foreign_requests == 40
        assert arena.stats().overflow_live_nbytes == 0
        runtime.deviceSynchronize()
        assert bool((result == cupy.arange(20, dtype=cupy.int32)[:, None]).all())
        assert bool((mine == 1).all())


def test_threads_at_once():
    arena = Arena("256MiB")
    errors = []

    def work(seed):
        try:
            with arena:
                for number in range(300):
                    array = cupy.full(10_000 + seed, seed * 1000 + number, cupy.int32)
                    total = array * 2
                    assert int(total.min()) == int(total.max()) == 2 * (seed * 1000 + number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert arena.stats().used_nbytes == 0


def test_per_thread_default_streams():
    run(
        """
import threading, cupy
from stager.cuda.arena import Arena
assert cupy.cuda.get_current_stream().ptr == 2
shared, errors = Arena("64MiB"), []
def work(seed):
    try:
        own = Arena("16MiB")
        for number in range(200):
            with own:
                a = cupy.full(50_000, seed, cupy.int32); b = a + 1; del a
                c = cupy.full(50_000, -1, cupy.int32)
                assert bool((b == seed + 1).all()); del b, c
            with shared:
                a = cupy.full(50_000, seed, cupy.int32); b = a + 1; del a
                c = cupy.full(50_000, -1, cupy.int32)
                assert bool((b == seed + 1).all()); del b, c
        assert own.stats().overflows == own.stats().foreign_requests == 0
    except BaseException as error:
        errors.append(error)
with shared:
    cupy.full(10, 1)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]; [t.join() for t in threads]
assert not errors, errors
assert shared.stats().foreign_requests > 0
shared.reset()
assert shared.stats().overflow_live_nbytes == 0
""",
        env={"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"},
    )


def test_another_device():
    if runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with Arena("16MiB") as arena:
        here = cupy.full(1000, 1)
        with cupy.cuda.Device(1):
            there = cupy.full(1000, 2)
            assert there.device.id == 1
            assert float(there.sum()) == 2000
        assert arena.stats().foreign_requests == 1
        del there
        arena.reset()
        assert float(here.sum()) == 1000


# Graphs


@pytest.mark.parametrize("mode", ["Relaxed", "ThreadLocal", "Global"])
def test_a_captured_step_replays_after_the_arena_moved_on(mode):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, Arena("64MiB") as arena:
        x = cupy.zeros(100_000, cupy.float32)

        def step(x):
            return cupy.tanh(x * 2) + x

        step(x)
        stream.synchronize()
        stream.begin_capture(getattr(runtime, f"streamCaptureMode{mode}"))
        with arena.capture(stream) as c:
            c.inputs(x)
            y = step(x)
            arena.stats()
        graph = stream.end_capture()
        assert c.graph is None
        for number in range(1000):
            junk = [cupy.full(100_000, -1, cupy.float32) for _ in range(3)]
            x.fill(number / 1000)
            graph.launch(stream)
            del junk
            if number % 100 == 0:
                expected = np.tanh(np.float32(number / 1000) * 2) + np.float32(number / 1000)
                np.testing.assert_allclose(y.get(), expected, rtol=1e-6)
        held = arena.stats().captured_blocks
        assert held >= 3
        stream.synchronize()
        del graph, y, x
        c.release()
        assert (arena.stats().captured_blocks, arena.stats().live_blocks) == (0, 0)


def test_the_scope_captures_by_itself():
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, Arena("64MiB") as arena:
        x = cupy.full(1000, 3, cupy.float32)
        x * 2
        with arena.capture(stream) as c:
            c.inputs(x)
            y = x * 2
        x.fill(5)
        c.graph.launch(stream)
        stream.synchronize()
        assert float(y[0]) == 10


def test_overflow_and_frees_during_capture():
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, Arena("4MiB") as arena:
        outside = cupy.full(8 * MIB, 1, cupy.uint8)
        small = cupy.full(1000, 1, cupy.float32)
        small * 2
        with arena.capture(stream) as c:
            c.inputs(small)
            with pytest.raises(OutOfMemoryError, match="captured"):
                cupy.empty(8 * MIB, cupy.uint8)
            del outside  # may not be freed now
            result = small * 2
        assert arena.stats().overflow_live_nbytes == 0
        arena.reset()
        c.graph.launch(stream)
        stream.synchronize()
        assert float(result[0]) == 2


def test_a_capture_the_arena_does_not_know_of_is_refused():
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, Arena("4MiB"):
        stream.begin_capture()
        try:
            with pytest.raises(ArenaOutOfMemoryError, match=r"arena\.capture"):
                cupy.empty(100)
        finally:
            stream.end_capture()


def test_other_streams_overflow_while_a_global_capture_runs_elsewhere():
    capturing, working = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    arena = Arena(64 * KIB)
    with working, arena:
        cupy.full(64 * KIB, 1, cupy.uint8)
        outside = cupy.full(MIB, 1, cupy.uint8)
        del outside
        capturing.begin_capture(runtime.streamCaptureModeGlobal)
        outside = cupy.full(2 * MIB, 2, cupy.uint8)
        arena.stats()
        del outside
        outside = cupy.full(2 * MIB, 3, cupy.uint8)
        with capturing:
            pass
        capturing.end_capture()
        assert bool((outside == 3).all())


# Pressure


@pytest.mark.timeout(900)
def test_overflow_survives_a_full_device():
    arena = Arena("64MiB")
    draw = np.random.default_rng(5)
    cupy.get_default_memory_pool().free_all_blocks()
    baseline = runtime.memGetInfo()[0]
    ballast = runtime.malloc(baseline - GIB)
    try:
        with arena:
            whole = cupy.full(64 * MIB, 1, cupy.uint8)
            sizes = np.exp(draw.uniform(np.log(1_000), np.log(16 * MIB), 100_000)).astype(int).tolist()
            victims = draw.integers(0, 24, 100_000).tolist()
            live = [None] * 24
            began, slowest = time.perf_counter(), 0.0
            for number, (size, victim) in enumerate(zip(sizes, victims, strict=True)):
                before = time.perf_counter()
                live[victim] = None
                live[victim] = cupy.empty(size, cupy.uint8)
                if number % 10 == 0:
                    live[victim].fill(number % 251)
                    assert int(live[victim][-1]) == number % 251
                slowest = max(slowest, time.perf_counter() - before)
            assert time.perf_counter() - began < 300
            assert slowest < 5
            assert arena.stats().overflows == 100_000
            with pytest.raises(OutOfMemoryError, match="device has no room") as caught:
                cupy.empty(4 * GIB, cupy.uint8)
            assert caught.value.stats.capacity_nbytes == 64 * MIB
            live.clear()
            with arena.step():
                assert float(cupy.full(MIB, 2, cupy.float32).sum()) == 2 * MIB
            assert arena.stats().overflow_live_nbytes == 0
            assert bool((whole == 1).all())
            del whole
        arena._pool.overflow.trim()
        runtime.deviceSynchronize()
        arena._pool.overflow.trim()
    finally:
        runtime.free(ballast)
    assert abs(runtime.memGetInfo()[0] - baseline) < 64 * MIB


def test_overflow_leaves_the_devices_own_pool_alone():
    pool = runtime.deviceGetDefaultMemPool(0)

    def state():
        return (
            runtime.deviceGetMemPool(0),
            runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrReleaseThreshold),
            runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrReservedMemCurrent),
        )

    before = state()
    with Arena("1MiB"):
        cupy.full(8 * MIB, 1, cupy.uint8)
    assert state() == before


def test_statistics_ask_the_driver_nothing():
    class Counting:
        def __init__(self, driver):
            self.driver, self.calls = driver, 0

        def __getattr__(self, name):
            self.calls += 1
            return getattr(self.driver, name)

    with Arena("1MiB") as arena:
        kept = cupy.full(2 * MIB, 1, cupy.uint8)
        pool = arena._pool
        counting = pool.driver = pool.overflow._driver = Counting(pool.driver)
        arena.stats()
        assert counting.calls == 0
        assert kept.size == 2 * MIB


# What outlives what


def test_plans_generators_tracebacks_cycles_stay_valid():
    cupy.fft.config.get_plan_cache().clear()
    host = np.random.default_rng(2).standard_normal(4096).astype(np.float32)
    expected = np.fft.rfft(host)
    with Arena("64MiB") as arena:
        with arena.step():
            generator = cupy.random.default_rng(7)
            first = generator.standard_normal(1000)
            cupy.fft.rfft(cupy.asarray(host))
            knot = [cupy.full(1000, 3, cupy.float32)]
            knot.append(knot)
            try:
                array = cupy.full(1000, 4, cupy.float32)
                raise KeyError(array)
            except KeyError as error:
                caught = error
            del array
        for _ in range(50):
            with arena.step():
                for size in (1000, 4096, 48_000, 100_000):
                    cupy.full(size, -1, cupy.float32)
        np.testing.assert_allclose(cupy.fft.rfft(cupy.asarray(host)).get(), expected, rtol=1e-3, atol=1e-3)
        assert bool((knot[0] == 3).all())
        assert bool((caught.args[0] == 4).all())
        del caught
    second = generator.standard_normal(1000)
    twin = cupy.random.default_rng(7)
    np.testing.assert_array_equal(twin.standard_normal(1000).get(), first.get())
    np.testing.assert_array_equal(twin.standard_normal(1000).get(), second.get())
    cupy.fft.config.get_plan_cache().clear()
    del first, second, generator
    knot = None
    gc.collect()
    assert arena.stats().live_blocks == 0


def test_torch_holds_what_it_was_given():
    torch = pytest.importorskip("torch")
    arena = Arena("16MiB")
    with arena:
        array = cupy.arange(1000, dtype=cupy.float32)
        tensor = torch.from_dlpack(array)
        del array
        assert arena.stats().live_blocks == 1
        for _ in range(10):
            cupy.full(1000, -1, cupy.float32)
    outside = arena
    del arena
    assert float(tensor.sum()) == 499_500
    assert outside.stats().live_blocks == 1
    del tensor
    assert outside.stats().live_blocks == 0


def test_arrays_outlive_their_arena_and_the_memory_returns():
    cupy.get_default_memory_pool().free_all_blocks()
    gc.collect()
    before = runtime.memGetInfo()[0]
    arena = Arena("256MiB")
    with arena:
        kept, outside = cupy.arange(1000), cupy.full(300 * MIB, 2, cupy.uint8)
    del arena
    assert before - runtime.memGetInfo()[0] >= 256 * MIB
    assert int(kept.sum()) == 499_500
    assert bool((outside == 2).all())
    cupy.get_default_memory_pool().free_all_blocks()
    del kept, outside
    runtime.deviceSynchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    assert before - runtime.memGetInfo()[0] < 64 * MIB


def test_arrays_alive_at_exit():
    done = run(
        """
import cupy
from stager.cuda.arena import Arena
arena = Arena("16MiB"); arena.__enter__()
kept, outside = cupy.arange(1000), cupy.zeros(32 << 20, cupy.uint8)
knot = []; knot.append((knot, cupy.arange(10)))
step = arena.step(); step.__enter__(); last = cupy.ones(7)
stream = cupy.cuda.Stream()
with stream: other = cupy.ones(7)
"""
    )
    assert "Exception" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_forked_child():
    run(
        """
import os, gc, cupy, warnings
warnings.simplefilter("ignore")
from stager.cuda.arena import Arena
from stager.errors import ArenaError
arena = Arena("16MiB")
with arena:
    kept, outside = cupy.arange(1000), cupy.zeros(32 << 20, cupy.uint8)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for method in (arena.stats, arena.step, arena.reset, lambda: cupy.cuda.alloc(100)):
                try:
                    method()
                except ArenaError:
                    continue
                os._exit(3)
            del kept, outside, arena, method
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(kept.sum()) == 499500 and not outside.any()
"""
    )


# CuPy under failure


def _operations():
    rng = np.random.default_rng(4)
    a = rng.permutation(50_000).astype(np.float32)
    m = rng.standard_normal((200, 200)).astype(np.float32)
    return (
        {
            "sort": (lambda: cupy.sort(device_a), np.sort(a)),
            "argsort": (lambda: cupy.argsort(device_a), np.argsort(a)),
            "sort of rows": (lambda: cupy.sort(device_m, axis=0), np.sort(m, axis=0)),
            "fft": (lambda: cupy.fft.fft(device_m), np.fft.fft(m)),
            "sum": (lambda: device_a.sum(), a.sum()),
            "sum of rows": (lambda: device_m.sum(axis=0), m.sum(axis=0)),
            "argmax": (lambda: device_a.argmax(), a.argmax()),
            "cumsum": (lambda: cupy.cumsum(device_m), np.cumsum(m)),
            "matmul": (lambda: device_m @ device_m, m @ m),
            "unique": (lambda: cupy.unique(device_a), np.unique(a)),
        },
        a,
        m,
    )


OPERATIONS, _A, _M = _operations()
device_a = device_m = None


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_cupy_is_right_or_out_of_memory_whichever_allocation_fails(name):
    global device_a, device_m
    device_a, device_m = cupy.asarray(_A), cupy.asarray(_M)
    operation, expected = OPERATIONS[name]
    scale = float(np.abs(expected).max())
    with Arena("64MiB", overflow="raise") as arena:
        malloc = cupy.cuda.get_allocator()
        for k in range(100):
            calls = 0

            def failing(nbytes, k=k):
                nonlocal calls
                calls += 1
                if calls == k + 1:
                    raise ArenaOutOfMemoryError("this one fails", arena.stats(), nbytes)
                return malloc(nbytes)

            cupy.fft.config.get_plan_cache().clear()
            with cupy.cuda.using_allocator(failing), contextlib.suppress(MemoryError):
                np.testing.assert_allclose(operation().get(), expected, rtol=1e-3, atol=1e-4 * scale)
            if calls <= k:
                break
        assert 0 < k < 99
        assert np.array_equal(cupy.asnumpy(device_a), _A)
    device_a = device_m = None


def test_a_full_arena_that_raises_is_a_memory_error_for_cupy():
    with Arena("1MiB", overflow="raise") as arena:
        kept = cupy.zeros(MIB - 512, cupy.uint8)
        with pytest.raises(MemoryError, match="live blocks"):
            cupy.sort(cupy.arange(100_000))
        del kept
        assert int(cupy.sort(cupy.arange(10)[::-1])[0]) == 0
        assert arena.stats().refused >= 1


# Steps, reports, the trainer


def test_escapes():
    with Arena("16MiB", on_escape="raise", trace=True) as arena:
        with arena.step():
            kept = cupy.zeros(1000, cupy.float32)
        with pytest.raises(ArenaEscapeError, match=r"test_arena_gpu\.py"):
            arena.step().__enter__()
        assert float(kept.sum()) == 0
    with pytest.raises(ArenaError):
        arena.pause().__enter__()


def test_measure_tells_a_capacity_that_fits():
    def step():
        x = cupy.ones((500, 500), cupy.float32)
        for _ in range(5):
            x = cupy.tanh(x @ x / 500)
        return cupy.sort(x.ravel())

    with Arena("1MiB") as arena, arena.measure() as m:
        expected = step().get()
    with Arena(m.capacity_nbytes) as arena:
        np.testing.assert_array_equal(step().get(), expected)
        assert (arena.stats().overflows, arena.stats().peak_nbytes) == (0, m.capacity_nbytes)


def crossasset(tmp_path, *arguments):
    output = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "crossasset.py", "--output", output, "--arena", "64MiB", *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done


def test_the_trainer_small(tmp_path):
    results, done = crossasset(tmp_path, "--bars", "3000", "--folds", "2")
    assert results["arena"]["overflows"] == results["arena"]["foreign_requests"] == 0
    first, second = (fold["peak_nbytes"] for fold in results["folds"])
    assert second - first <= 512 * results["steps"]
    assert "arena overflow" not in done.stderr


def test_the_trainer_that_holds_everything_says_so(tmp_path):
    results, done = crossasset(tmp_path, "--bars", "3000", "--folds", "2", "--hold-everything")
    assert results["arena"]["overflows"] > 0
    (line,) = (line for line in done.stderr.splitlines() if "arena overflow" in line)
    assert "verdict: memory is held by live arrays: " in line


@pytest.mark.timeout(900)
def test_the_trainer_in_full(tmp_path):
    results, _ = crossasset(tmp_path)
    arena = results["arena"]
    assert arena["allocations"] > 1_000_000
    assert arena["epoch"] == arena["overflows"] == arena["foreign_requests"] == 0
    peaks = [fold["peak_nbytes"] for fold in results["folds"]]
    assert max(peaks) - min(peaks) <= 512 * results["steps"]
    assert np.mean([fold["accuracy"] for fold in results["folds"]]) > 0.55
