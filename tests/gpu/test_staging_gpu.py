"""Staging on a real GPU: every byte, one allocation, no memory left behind, captures left alone."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import stager
from stager import Stager, Target
from stager.batches import resident as resident_module
from stager.batches.smoke import made_up_bars
from stager.cuda import device_memory, upload
from stager.cuda.ring import RegistrationRefused
from stager.cuda.watch import Watch
from stager.errors import CaptureActiveError, ConfigError, StagingError, StagingMemoryError

try:
    import cupy
    from cupy.cuda import runtime

    from stager.cuda import staging
    from stager.cuda.driver import CudaDriver
except ImportError:  # the marker skips, or fails under --require-gpu
    pass

pytestmark = pytest.mark.gpu

MIB = 1 << 20
N_ROWS = 4_000_000
PLACES = ["device", "host"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """80 MB of rows: more than one registered piece."""
    return stager.pack(made_up_bars(N_ROWS), tmp_path_factory.mktemp("staging") / "bars.pack")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return stager.pack(made_up_bars(20_000), tmp_path_factory.mktemp("staging") / "small.pack")


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Contexts, modules and kernels of CuPy take memory once."""
    array = cupy.arange(1000, dtype=cupy.float32)
    assert bool((array == array).all())
    for place in PLACES:
        with Stager(made_up_bars(20_000), window=5, batch_size=10, device="cuda", placement=place) as st:
            next(st.batches())
    stager.stage_arrays([np.ones(5)], device="cuda").release()


def free_nbytes():
    gc.collect()
    cupy.cuda.Device(0).synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    return runtime.memGetInfo()[0]


def same(device_array, host_array):
    """Every value, compared on the device."""
    assert device_array.shape == host_array.shape
    assert device_array.dtype == host_array.dtype
    step = max(1, 16 * MIB // max(1, host_array[:1].nbytes))
    return all(
        bool((device_array[first : first + step] == cupy.asarray(host_array[first : first + step])).all())
        for first in range(0, len(host_array), step)
    )


@pytest.fixture
def allocations(monkeypatch):
    """Sizes of the cudaMalloc calls made outside CuPy's pools."""
    sizes = []
    real = cupy.cuda.Memory

    def counted(nbytes):
        sizes.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(cupy.cuda, "Memory", counted)
    return sizes


def whole_pages(nbytes):
    # What the driver takes for a large allocation; another process opens nothing else fast.
    return -(-nbytes // (2 * MIB)) * 2 * MIB


# -------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("n_cores", [1, 2, 3, 8, 64])
def test_both_paths_bring_every_row_in_one_allocation(pack, monkeypatch, allocations, n_cores):
    monkeypatch.setattr(resident_module, "thread_count", lambda: n_cores)
    with stager.stage(pack, device="cuda") as resident:
        assert resident.path == ("registered" if n_cores < upload.RING_CORES else "pinned ring")
        assert resident.placement == "device"
        assert resident.n_allocations == 1
        assert allocations == [whole_pages(pack.rows.nbytes)]
        assert resident.rows.data.ptr % 256 == 0
        assert resident.rows.flags.c_contiguous
        assert same(resident.rows, np.asarray(pack.rows))


def test_the_allocation_has_the_exact_size(pack):
    before = free_nbytes()
    with stager.stage(pack, device="cuda") as resident:
        taken = before - free_nbytes()
        assert resident.nbytes <= taken <= resident.nbytes + 4 * MIB


def test_in_place_nothing_is_allocated(pack, allocations):
    with stager.stage(pack, device="cuda", placement="host") as resident:
        assert resident.path == "registered in place"
        assert resident.n_allocations == 0
        assert allocations == []
        assert resident.rows.data.ptr == np.asarray(pack.rows).ctypes.data
        assert same(resident.rows, np.asarray(pack.rows))
    # Unregistered: it can be registered again.
    stager.stage(pack, device="cuda", placement="host").close()


@pytest.mark.parametrize("place", PLACES)
def test_bars_in_memory_are_staged_without_a_pack(place):
    table = made_up_bars(20_000)
    others = [stager.stage(table, device="cuda", placement=place) for _ in range(3)]
    for resident in others:
        assert same(resident.rows, np.asarray(resident.pack.rows))
    for resident in others:
        resident.close()


@pytest.mark.parametrize("n_cores", [2, 8])
@pytest.mark.parametrize("offset", [0, 1, 4, 4095])
def test_odd_sizes_and_alignments(n_cores, offset):
    driver = CudaDriver(0)
    source = np.random.default_rng(offset).integers(0, 256, 40 * MIB, np.uint8)
    for nbytes in (0, 1, 4095, 4096, 4097, upload.RING_NBYTES - 1, upload.RING_NBYTES + 1, 37 * MIB + 5):
        part = source[offset : offset + nbytes]
        watch = Watch(nbytes, 60)
        memory, _ = device_memory.load(
            driver,
            nbytes,
            watch,
            "",
            lambda memory, part=part, watch=watch: upload.copy_array(
                part, memory, driver, watch, n_cores=n_cores, piece_nbytes=4 * MIB
            ),
        )
        if nbytes:
            array = staging.array_at(memory, 0, part.shape, part.dtype)
            assert same(array, part)
        assert watch.done_nbytes == nbytes


def test_refused_registrations_fall_back_to_the_ring(pack, monkeypatch):
    real, calls = CudaDriver.register, []

    def refuse_mappings(self, ptr, nbytes, read_only):
        calls.append(read_only)
        if read_only:
            raise RegistrationRefused("a test refuses")
        real(self, ptr, nbytes, read_only)

    monkeypatch.setattr(CudaDriver, "register", refuse_mappings)
    monkeypatch.setattr(resident_module, "thread_count", lambda: 2)
    with stager.stage(pack, device="cuda") as resident:
        assert resident.path == "pinned ring"
        assert same(resident.rows, np.asarray(pack.rows))
    assert any(calls)


def test_where_nothing_can_be_pinned_rows_still_arrive(pack, monkeypatch):
    def refuse(self, ptr, nbytes, read_only):
        raise RegistrationRefused("a test refuses")

    monkeypatch.setattr(CudaDriver, "register", refuse)
    for n_cores in (2, 8):
        monkeypatch.setattr(resident_module, "thread_count", lambda n_cores=n_cores: n_cores)
        with stager.stage(pack, device="cuda") as resident:
            assert resident.path == "pageable ring"
            assert same(resident.rows, np.asarray(pack.rows))
    with pytest.raises(StagingError, match="placement='device'"):
        stager.stage(pack, device="cuda", placement="host")


@pytest.mark.parametrize("n_cores", [2, 8])
def test_a_cold_file_is_staged_right(tmp_path, monkeypatch, n_cores):
    monkeypatch.setattr(resident_module, "thread_count", lambda: n_cores)
    path = stager.pack(made_up_bars(500_000), tmp_path / "cold.pack").path
    file = path / "segment-0" / "rows.npy"
    expected = np.load(file)
    for place in PLACES:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        with stager.stage(path, device="cuda", placement=place) as resident:
            assert same(resident.rows, expected)


def test_progress_is_told_on_this_thread(pack):
    seen = []
    stager.stage(pack, device="cuda", progress=lambda *told: seen.append((threading.get_ident(), *told))).close()
    assert {thread for thread, *_ in seen} == {threading.get_ident()}
    done = [nbytes for _, _, nbytes, _ in seen]
    assert done == sorted(done)
    assert seen[-1][2:] == (pack.rows.nbytes, pack.rows.nbytes)


# -------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("place", PLACES)
def test_packs_staged_and_closed_in_a_row_end_at_the_baseline(pack, place):
    def once():
        st = Stager(pack, window=30, target=Target(horizon=2), batch_size=4096, device="cuda", placement=place)
        for number, _batch in enumerate(st.batches()):
            if number == 20:
                break
        del _batch
        st.close()
        return st

    kept = [once()]
    baseline = free_nbytes()
    for _ in range(5):
        # The closed Stagers are still referred to: close() gives the memory back, not the garbage collector.
        kept.append(once())
        gc.disable()
        try:
            assert baseline - runtime.memGetInfo()[0] <= 4 * MIB
        finally:
            gc.enable()
    assert baseline - free_nbytes() <= 2 * MIB


def test_too_much_is_refused_before_anything_is_allocated(pack, allocations, monkeypatch):
    before = free_nbytes()
    huge = np.broadcast_to(np.float32(1), (runtime.memGetInfo()[1],))
    with pytest.raises(StagingMemoryError, match=r"bytes\) are needed on the GPU, .* are free; free some"):
        stager.stage_arrays([huge], device="cuda")
    monkeypatch.setattr(CudaDriver, "free_nbytes", lambda self: pack.rows.nbytes - 1)
    with pytest.raises(StagingMemoryError, match=f"{pack.rows.nbytes:,} bytes.*placement='host'"):
        stager.stage(pack, device="cuda", placement="device")
    assert allocations == []
    assert before - free_nbytes() <= MIB


def test_rows_that_do_not_fit_go_elsewhere_by_themselves_and_it_is_told(pack, monkeypatch):
    monkeypatch.setattr(CudaDriver, "free_nbytes", lambda self: pack.rows.nbytes - 1)
    # As on a machine of one GPU.
    monkeypatch.setattr(CudaDriver, "peers", lambda self: [])
    with stager.stage(pack, device="cuda") as resident:
        assert resident.placement == "host"
        assert re.fullmatch(r"registered in place; .* do not fit the .* free on the GPU, which reads no other GPU",
                            resident.path)  # fmt: skip
        assert same(resident.rows, np.asarray(pack.rows))
    with pytest.raises(StagingError, match=r"reads no other GPU's memory .*use placement='host'"):
        stager.stage(pack, device="cuda", placement="spread")


def test_an_allocation_that_the_driver_refuses_is_a_memory_error(pack, monkeypatch):
    total = runtime.memGetInfo()[1]
    monkeypatch.setattr(CudaDriver, "free_nbytes", lambda self: 1 << 50)
    with pytest.raises(StagingMemoryError, match="in one piece"):
        stager.stage_arrays([np.broadcast_to(np.float32(1), (total,))], device="cuda")
    # The error is not sticky.
    stager.stage(pack, device="cuda").close()


def test_too_much_host_memory_is_refused(pack, monkeypatch):
    monkeypatch.setattr("stager.bars.memory.available_nbytes", lambda: pack.rows.nbytes - 1)
    with pytest.raises(StagingMemoryError, match="would be pinned"):
        stager.stage(pack, device="cuda", placement="host")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n_cores", [2, 8])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_stopping_on_the_way_leaves_nothing(pack, monkeypatch, place, n_cores, kind):
    monkeypatch.setattr(resident_module, "thread_count", lambda: n_cores)
    before = free_nbytes()

    def stop(phase, done, total):
        if done:
            raise kind("stopped")

    with pytest.raises(kind) as caught:
        stager.stage(pack, device="cuda", placement=place, progress=stop)
    assert before - runtime.memGetInfo()[0] <= 2 * MIB
    assert caught.tb is not None
    # Nothing is registered, either.
    stager.stage(pack, device="cuda", placement="host").close()


@pytest.mark.parametrize("call", ["register", "unregister"])
@pytest.mark.parametrize("n_cores", [2, 8])
def test_a_call_that_fails_leaves_nothing(pack, monkeypatch, call, n_cores):
    monkeypatch.setattr(resident_module, "thread_count", lambda: n_cores)
    before = free_nbytes()
    real = getattr(CudaDriver, call)

    def fail(self, *args):
        if call == "unregister":
            real(self, *args)
        raise StagingError(f"{call} failed")

    with monkeypatch.context() as patch:
        patch.setattr(CudaDriver, call, fail)
        with pytest.raises(StagingError, match=f"{call} failed"):
            stager.stage(pack, device="cuda")
    assert before - runtime.memGetInfo()[0] <= 2 * MIB
    stager.stage(pack, device="cuda", placement="host").close()


def test_views_keep_the_rows_until_they_die(pack):
    for place in PLACES:
        before = free_nbytes()
        st = Stager(pack, window=8, batch_size=4, device="cuda", placement=place)
        view, other = st.view(0, 0, 0), st.resident.rows[10:20, 1]
        then = view.get()
        with pytest.warns(ResourceWarning, match="2 views of the closed rows"):
            st.close()
        del other
        if place == "device":
            assert before - runtime.memGetInfo()[0] >= pack.rows.nbytes - 4 * MIB
        np.testing.assert_array_equal(view.get(), then)
        del view
        assert before - free_nbytes() <= 4 * MIB
        stager.stage(pack, device="cuda", placement="host").close()


def test_the_users_allocator_is_left_alone(small):
    calls = []
    pool = cupy.cuda.MemoryPool()

    def counted(nbytes):
        calls.append(nbytes)
        return pool.malloc(nbytes)

    for place in PLACES:
        with cupy.cuda.using_allocator(counted):
            st = Stager(small, window=16, target=Target(horizon=1), batch_size=64, device="cuda", placement=place)
            for batch in st.batches():
                assert batch.x.shape[1:] == (16, 5)
            del batch
            st.view(0, 0, 0)
            views = stager.stage_arrays([np.ones(300), np.zeros(7, np.int8)], device="cuda")
            _ = views[0], views[1]
            del _
            views.release()
            st.close()
            assert calls == []
            # The allocator is still the user's.
            cupy.empty(10)
            assert len(calls) == 1
            calls.clear()


def test_the_users_arena_is_left_alone(small):
    with stager.Arena(1 << 20) as arena:
        before = arena.stats()
        with Stager(small, window=16, batch_size=64, device="cuda") as st:
            for batch in st.batches():
                assert len(batch)
            del batch
        assert arena.stats() == before


def test_leaving_things_open_at_exit_is_quiet(small):
    code = f"""
import numpy as np, stager
kept = [stager.stage({str(small.path)!r}, device="cuda", placement=place) for place in ("device", "host")]
kept += [stager.Stager(one, window=4, batch_size=16) for one in kept]
batches = kept[-1].batches()
kept.append((next(batches), batches, kept[0].rows[5:9]))
kept.append(stager.stage_arrays([np.ones(5)], device="cuda"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# -------------------------------------------------------------------------------- captures


def captured(stream, mode, meanwhile, current=True):
    """Capture ``b = 2 * a`` on `stream`, calling `meanwhile` in between; check that the graph is right."""
    a, b = cupy.arange(1000, dtype=cupy.float32), cupy.empty(1000, cupy.float32)
    cupy.multiply(a, 2, out=b)
    cupy.add(b, 1, out=b)
    b[...] = 0
    # What the garbage collector would free meanwhile would break the capture.
    gc.collect()
    cupy.cuda.Device(0).synchronize()
    with stream:
        stream.begin_capture(mode)
        cupy.multiply(a, 2, out=b)
        if current:
            meanwhile()
    if not current:
        meanwhile()
    with stream:
        cupy.add(b, 1, out=b)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert bool((b == 2 * a + 1).all())


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_staging_is_refused_while_the_current_stream_captures(small, mode):
    def stage():
        for place in PLACES:
            with pytest.raises(CaptureActiveError, match="the current stream is capturing"):
                stager.stage(small, device="cuda", placement=place)
        with pytest.raises(CaptureActiveError):
            stager.stage_arrays([np.ones(5)], device="cuda")

    captured(cupy.cuda.Stream(non_blocking=True), mode, stage)
    stager.stage(small, device="cuda").close()


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_staging_is_refused_while_the_legacy_stream_would_be_captured(small, mode):
    def stage():
        with pytest.raises(CaptureActiveError, match="stream is capturing"):
            stager.stage(small, device="cuda")

    captured(cupy.cuda.Stream(), mode, stage, current=False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n_cores", [2, 8])
def test_staging_works_while_another_thread_captures_in_global_mode(small, monkeypatch, place, n_cores):
    monkeypatch.setattr(resident_module, "thread_count", lambda: n_cores)
    capturing, staged, errors = threading.Event(), threading.Event(), []

    def capture():
        def wait():
            capturing.set()
            assert staged.wait(60)

        try:
            with cupy.cuda.Device(0):
                captured(cupy.cuda.Stream(non_blocking=True), 0, wait)
        except BaseException as error:
            errors.append(error)
        finally:
            capturing.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert capturing.wait(60)
    try:
        resident = stager.stage(small, device="cuda", placement=place)
        st = Stager(resident, window=4, batch_size=8)
    finally:
        staged.set()
        thread.join()
    assert errors == []
    assert same(resident.rows, np.asarray(small.rows))
    assert next(st.batches()).x.shape == (8, 4, 5)
    st.close()
    resident.close()


# -------------------------------------------------------------------------------- arrays


def test_arrays_of_any_kind_come_back():
    rng = np.random.default_rng(0)
    base = rng.random((40, 30)).astype(np.float32)
    arrays = [
        *(rng.integers(0, 2, shape).astype(dtype) for dtype in "?bBhHiIlLefd" for shape in ((), (1,), (7, 3), (0, 5))),
        base,
        np.asfortranarray(base),
        base[::3, ::-2],
        base.T,
        base,
        np.zeros((0,), np.float64),
        rng.random(3 * MIB),
    ]
    for align in (8, 16, 256):
        with stager.stage_arrays(arrays, align=align, device="cuda") as views:
            assert len(views) == len(arrays)
            for k, array in enumerate(arrays):
                assert views[k].dtype == array.dtype
                assert views[k].shape == array.shape
                assert views[k].data.ptr % align == 0
                np.testing.assert_array_equal(views[k].get(), array)
            assert views.path == "pinned ring"


def test_no_arrays_and_empty_ones():
    for arrays in ([], [np.empty((0, 5), np.float32)] * 3):
        with stager.stage_arrays(arrays, device="cuda") as views:
            assert [view.shape for view in views] == [array.shape for array in arrays]


def test_106_652_arrays_in_one_allocation(allocations):
    block = np.random.default_rng(0).random((106_652, 60, 5), np.float32)
    views = stager.stage_arrays(list(block), device="cuda")
    assert allocations == [whole_pages(block.nbytes)]
    start = views[0].data.ptr
    for k, view in enumerate(views):
        assert view.data.ptr == start + 1200 * k
        assert view.shape == (60, 5)
        assert view.dtype == np.float32
    del view
    whole = cupy.ndarray(block.shape, cupy.float32, views[0].data)
    assert same(whole, block)
    expected = cupy.asarray(block)
    equal = cupy.ones((), bool)
    for k in range(0, len(views), 7):
        equal &= (views[k] == expected[k]).all()
    assert bool(equal)
    del whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        views.release()


def test_released_arrays_stay_under_their_views():
    arrays = [np.full(100_000, k, np.float32) for k in range(20)]
    before = free_nbytes()
    views = stager.stage_arrays(arrays, device="cuda")
    kept = views[7]
    with pytest.warns(ResourceWarning, match="1 views of the released arrays"):
        views.release()
    np.testing.assert_array_equal(kept.get(), arrays[7])
    del kept
    assert before - free_nbytes() <= 2 * MIB


def test_a_wrong_array_is_refused_before_anything_is_allocated(allocations):
    with pytest.raises(ConfigError, match="array 1 "):
        stager.stage_arrays([np.ones(3), np.array([None])], device="cuda")
    assert allocations == []


def test_the_first_batch_does_not_wait_for_a_compiler(small):
    code = f"""
import time, cupy, stager
st = stager.Stager({str(small.path)!r}, window=8, batch_size=64, device="cuda")
def never(*args, **options):
    raise AssertionError("compiled after staging")
cupy.RawModule = never
batch = next(st.batches())
cupy.cuda.Device(0).synchronize()
st.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_stage_is_prompt(pack):
    started = time.perf_counter()
    for _ in range(5):
        stager.stage(pack, device="cuda").close()
    assert time.perf_counter() - started < 5


def test_the_package_needs_no_gpu_to_be_imported():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    code = "import stager, numpy; stager.stage_arrays([numpy.ones(2)]).release()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(stager.__file__).is_file()
