"""Groups on a real GPU: what is served while it is held, on which stream, to which framework, and from which memory."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from bars_fixtures import bar_table
from cut_windows import Cut

import stager
from stager import Normalize, Select, Stager, Target
from stager.batches.smoke import made_up_bars
from stager.cuda.watch import Watch
from stager.errors import CaptureActiveError, SampleError
from stager.samples.normalize import apply, cast
from stager.samples.order import Order
from stager.samples.schedule import Schedule

try:
    import cupy
    import torch

    from stager.cuda import GraphBatch, groups, kernels, staging
    from stager.cuda.gather import WindowGather
except ImportError:  # the marker skips, or fails under --require-gpu
    pass

pytestmark = pytest.mark.gpu

STEPS = {"B": [*range(400), *range(403, 750)], "A": range(300), "C": [*range(5), *range(7, 600)]}
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""


@pytest.fixture(scope="module")
def spin():
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))
    cupy.cuda.Device(0).synchronize()
    return lambda cycles=100_000_000: kernel((1,), (1,), (np.int64(cycles),))


@pytest.fixture
def small_groups(monkeypatch):
    """A batch or two a group, so that slots go round."""
    monkeypatch.setattr(groups, "_FIRST_NBYTES", 1)
    monkeypatch.setattr(groups, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(groups, "_MOST_NBYTES", 150_000)


def stager_of(table, **options):
    return Stager(table, **{"window": 32, "batch_size": 50, "device": "cuda", "target": Target(horizon=1)} | options)


def n_slots(st):
    slots = st._gather._groups._slots
    return len(slots._idle) + len(slots._returned)


# -------------------------------------------------------------------------------- windows of any shape


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("window", "n_columns"),
    [(2, 1), (2, 512), (3, 5), (64, 5), (64, 7), (64, 8), (65, 5), (100, 33), (4096, 1), (4096, 5), (4096, 512)],
)
def test_windows_of_any_shape_fill_their_place_and_nothing_else(window, n_columns, dtype):
    rng = np.random.default_rng(window * n_columns)
    n_rows = window + 777
    host = rng.normal(100, 1, (n_rows, n_columns)).astype(np.float32)
    rows, memory, _ = staging.to_device(host, staging.prepare(0, Watch(0, 60)), Watch(1, 60), n_cores=8)
    count = max(1, min(300, (64 << 20) // (window * n_columns * 4)))
    windows = np.lib.stride_tricks.sliding_window_view(host, window, axis=0).transpose(0, 2, 1)
    schedule = Schedule(Order(778, 1), count)
    chosen = schedule.sample_ids(0, 1)
    methods = rng.choice([0, 1, 3, 4], n_columns).astype(np.int32)
    fitted = np.stack([np.full(n_columns, 90.0), np.full(n_columns, 2.0)])
    for columns, scaled in ((None, False), (None, True), (rng.permutation(n_columns)[: n_columns // 2 + 1], True)):
        served = np.arange(n_columns) if columns is None else columns
        index = SimpleNamespace(
            window=window, length=window, dilation=1,
            span_rows=np.array([window - 1]), span_ids=np.array([0, 778]), y=None, columns=columns,
            methods=methods[served] if scaled else None, close_column=n_columns - 1, close_columns=None,
            fitted=fitted[:, served],
        )  # fmt: skip
        one = WindowGather(rows, index, 60, None, dtype)
        nbytes, scratch_nbytes = count * one.fields[0].nbytes, one.scratch_nbytes(count)
        guard = 512
        place = cupy.full(nbytes + scratch_nbytes + 4 * guard, 0xA5, cupy.uint8)
        x = place.data.ptr + guard
        scratch = -(-(x + nbytes + guard) // 256) * 256
        one.fill([x], scratch, schedule, 0, 1, count)
        found = place.get()
        right = windows[chosen][:, :, served].copy()
        if scaled:
            apply(right, methods[served], host[chosen + window - 1, n_columns - 1 :], fitted[:, served])
        right = cast(np.ascontiguousarray(right), dtype)
        served_bits = found[guard : guard + nbytes].view(np.uint16)
        np.testing.assert_array_equal(served_bits, right.reshape(-1).view(np.uint16))
        assert (found[:guard] == 0xA5).all()
        assert (found[guard + nbytes : scratch - place.data.ptr] == 0xA5).all()
        assert (found[scratch - place.data.ptr + scratch_nbytes :] == 0xA5).all()
        one.close()
    del rows, memory


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("normalize", ["none", "last", Normalize("zscore", "zscore", "none")])
def test_casts_are_the_same_bits_everywhere(dtype, normalize, place):
    table = bar_table(STEPS, volume=np.random.default_rng(1).random(1645))
    options = {"dtype": dtype, "normalize": normalize, "select": Select(columns=["close", "volume", "open"])}
    if normalize == "last":
        options["normalize"] = Normalize("last", "none", "none")
    with stager_of(table, device="cpu", **options) as one, stager_of(table, placement=place, **options) as other:
        for mine, theirs in zip(one.batches(1), other.batches(1), strict=True):
            np.testing.assert_array_equal(theirs.x.get().view(np.uint16), mine.x.view(np.uint16))
            np.testing.assert_array_equal(theirs.y.get(), mine.y)
        del mine, theirs


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("options", [{}, {"normalize": "zscore"}, {"dtype": "bfloat16"}, {"target": None}])
@pytest.mark.parametrize(("window", "dilation"), [(1, 5), (7, 2), (16, 5), (8, 9)])
def test_rows_of_windows_lie_apart_everywhere(window, dilation, options, place):
    options = {"window": window, "dilation": dilation, **options}
    table = bar_table(STEPS)
    with stager_of(table, device="cpu", **options) as one, stager_of(table, placement=place, **options) as other:
        for mine, theirs in zip(one.batches(1, to="torch"), other.batches(1, to="torch"), strict=True):
            assert torch.equal(mine.x, theirs.x.cpu())
        view = other.view(1, 0, 3)
        np.testing.assert_array_equal(view.get(), one.view(1, 0, 3))
        del mine, theirs, view


# -------------------------------------------------------------------------------- frameworks


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("to", ["torch", "jax", "numpy"])
def test_every_framework_gets_the_same_bits(to, dtype):
    if to == "jax":
        jax = pytest.importorskip("jax")
    table = bar_table(STEPS)
    with stager_of(table, dtype=dtype) as st:
        for mine, theirs in zip(st.batches(2), st.batches(2, to=to), strict=True):
            if to == "torch":
                assert (theirs.x.dtype, theirs.x.is_cuda) == (getattr(torch, dtype), True)
                assert theirs.y.dtype == torch.float32
                x, y = theirs.x.cpu().view(torch.uint8).numpy(), theirs.y.cpu().numpy()
            elif to == "jax":
                assert theirs.x.dtype == getattr(jax.numpy, dtype)
                assert next(iter(theirs.x.devices())).platform in ("gpu", "cuda")
                x, y = np.asarray(theirs.x), np.asarray(theirs.y)
            else:
                assert isinstance(theirs.x, np.ndarray)
                x, y = theirs.x, theirs.y
            np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), mine.x.get().view(np.uint8))
            np.testing.assert_array_equal(y, mine.y.get())
        del mine, theirs


def test_torch_tensors_lie_in_the_group_and_stand_alone():
    with stager_of(bar_table(STEPS)) as st:
        batches = list(st.batches(0, to="torch"))
        pointers = [batch.x.data_ptr() for batch in batches]
        assert np.diff(pointers).min() > 0
        assert len(set(np.diff(pointers)[:-1])) == 1
        one, other = batches[0].x, batches[1].x
        assert not one._is_view()
        weight = torch.ones(5, device="cuda", requires_grad=True)
        loss = (one @ weight).sum()
        other.mul_(2)  # has a version of its own, so this does not spoil the graph of the loss
        loss.backward()
        np.testing.assert_allclose(weight.grad.cpu(), one.sum((0, 1)).cpu(), rtol=1e-4)
        one.requires_grad_()
        del batches, one, other, loss


def test_what_autograd_saved_keeps_the_slot(small_groups):
    """Nothing but the graph of a loss refers to a batch's tensor."""
    table = bar_table(STEPS)
    cut = Cut(table, STEPS, 32)
    weight = torch.ones(5, device="cuda", dtype=torch.float32, requires_grad=True)
    with stager_of(table, target=None) as st:
        losses = [(batch.sample_ids, (batch.x @ weight).sum()) for batch in st.batches(1, to="torch")]
        for ids, loss in losses:
            (grad,) = torch.autograd.grad(loss, weight)
            np.testing.assert_allclose(grad.cpu(), cut.x[ids].sum((0, 1), dtype=np.float64), rtol=1e-4)
        del losses, loss, grad


# -------------------------------------------------------------------------------- holding


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("to", [None, "torch", "jax"])
@pytest.mark.parametrize("every", [1, 2, 7])
def test_what_is_kept_is_never_overwritten(small_groups, every, to, reuse):
    if to == "jax":
        pytest.importorskip("jax")
    table = bar_table(STEPS)
    cut = Cut(table, STEPS, 32)
    with stager_of(table, target=None) as st:
        kept = []
        for epoch in range(4):
            for batch in st.batches(epoch, to=to, reuse=reuse):
                if batch.number % every == 0:
                    kept.append((batch.sample_ids, batch.x if batch.number % 2 else batch.x[1:]))
        del batch
        for ids, x in kept:
            x = np.asarray(x.get() if to is None else x.cpu() if to == "torch" else x)
            np.testing.assert_array_equal(x, cut.x[ids][-len(x) :])
        del kept, x


def test_a_kept_batch_holds_itself_not_its_group():
    """One batch of every epoch is kept: each would hold hundreds of others."""
    table = made_up_bars(200_000)
    with stager_of(table, window=64, batch_size=256) as st:
        list(st.batches(0, start=len(st) - 1))
        free = cupy.cuda.runtime.memGetInfo()[0]
        kept = []
        for epoch in range(40):
            for batch in st.batches(epoch):
                if batch.number == 5:
                    kept.append((batch.sample_ids, batch.x, batch.x[0, 0, 0].get()))
        taken = free - cupy.cuda.runtime.memGetInfo()[0]
        epoch_nbytes = st.n_samples * st.plan.batch_nbytes // 256
        assert taken < 8 * epoch_nbytes, "three groups that go round, three that are held, and one more"
        for _, x, then in kept:
            assert x[0, 0, 0].get() == then
        del kept, batch, x


def test_batches_that_are_all_kept_are_not_copied(small_groups):
    with stager_of(bar_table(STEPS)) as st:
        kept = list(st.batches(0))
        memories = {batch.x.data.mem for batch in kept}
        assert len(memories) < len(kept)
        assert all(batch.x.data.mem is batch.y.data.mem for batch in kept)
        del kept, memories


def test_three_slots_go_round():
    table = made_up_bars(100_000)
    with stager_of(table, window=64, batch_size=256) as st:
        for epoch in range(3):
            for _batch in st.batches(epoch):
                pass
        del _batch
        for epoch in range(3):
            for _batch in st.batches(epoch):
                pass
        assert n_slots(st) <= 3
        for fold in st.split(stager.WalkForward(3)):
            for part in (fold.train, fold.test):
                for _batch in part.batches(0):
                    pass
        assert n_slots(st) <= 4
        del _batch


def test_the_same_arrays_come_again_when_asked_for(small_groups):
    table = made_up_bars(20_000)
    with stager_of(table, window=64, batch_size=256) as st:
        seen, n = set(), 0
        for epoch in range(6):
            for batch in st.batches(epoch, reuse=True):
                seen.add(id(batch.x))
                n += 1
        assert len(seen) < n / 3
        right = [batch.x.get() for batch in st.batches(9)]
        for batch, x in zip(st.batches(9, reuse=True), right, strict=True):
            np.testing.assert_array_equal(batch.x.get(), x)
        del batch


@pytest.mark.parametrize("hold", ["view", "dlpack", "pointer", "array"])
def test_reused_arrays_that_something_refers_to_are_not_reused(small_groups, hold):
    table = bar_table(STEPS)
    with stager_of(table) as st:
        for epoch in range(2):
            list(st.batches(epoch, reuse=True))
        right, held = [], []
        for batch in st.batches(5, reuse=True):
            right.append(batch.x.get())
            x = batch.x
            held.append({"view": x.reshape(-1), "dlpack": None, "pointer": x.data, "array": x}[hold])
            if hold == "dlpack":
                held[-1] = torch.from_dlpack(x)
            del x
        list(st.batches(6, reuse=True))
        for thing, x in zip(held, right, strict=True):
            if hold == "pointer":
                thing = cupy.ndarray(x.shape, x.dtype, thing)
            found = thing.cpu().numpy() if hold == "dlpack" else thing.get()
            np.testing.assert_array_equal(found.reshape(-1), x.reshape(-1))
        del held, thing, batch


# -------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("to", [None, "torch"])
@pytest.mark.parametrize("named", [False, True])
def test_a_slow_side_stream_reads_what_it_was_handed(small_groups, spin, named, to):
    """Work on a side stream is queued behind a delay, and the batch is dropped at once."""
    table = bar_table(STEPS)
    cut = Cut(table, STEPS, 32)
    with stager_of(table, target=None) as st:
        side = cupy.cuda.Stream(non_blocking=True) if to is None else torch.cuda.Stream()
        for epoch in range(2):
            sums = []
            batches = st.batches(epoch, to=to, stream=side if named else None)
            for _ in range(len(st)):
                if named:
                    batch = next(batches)
                if to is None:
                    with side:
                        if not named:
                            batch = next(batches)
                        spin(3_000_000)
                        sums.append((batch.sample_ids, batch.x[:, :, 3].sum(axis=1, dtype=cupy.float64)))
                else:
                    with torch.cuda.stream(side):
                        if not named:
                            batch = next(batches)
                        with cupy.cuda.Stream.from_external(side):
                            spin(3_000_000)
                        sums.append((batch.sample_ids, batch.x[:, :, 3].double().sum(dim=1)))
                batch = None
            side.synchronize()
            for ids, closes in sums:
                found = closes.get() if to is None else closes.cpu().numpy()
                np.testing.assert_array_equal(found, cut.x[ids][:, :, 3].sum(axis=1, dtype=np.float64))


def test_a_stream_that_is_none_is_refused():
    with stager_of(bar_table(STEPS)) as st, pytest.raises(SampleError, match="give a CUDA stream"):
        st.batches(0, stream="side")


def test_batches_are_refused_while_the_stream_captures():
    with stager_of(bar_table(STEPS)) as st:
        list(st.batches(0))
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                with pytest.raises(CaptureActiveError, match="GraphBatch"):
                    next(st.batches(0))
            finally:
                stream.end_capture()
        assert len(list(st.batches(0))) == len(st)


def test_a_capture_by_another_thread_is_not_broken():
    with stager_of(bar_table(STEPS)) as st:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with cupy.cuda.Stream(non_blocking=True):
                served = [batch.x.copy() for batch in st.batches(0)]
            graph = stream.end_capture()
        assert graph is not None
        assert len(served) == len(st)


# -------------------------------------------------------------------------------- memory and time


def test_threads_serve_from_the_same_rows():
    table = bar_table(STEPS)
    cut = Cut(table, STEPS, 32)
    with stager_of(table, target=None, normalize="none") as st:

        def serve(epoch):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for batch in st.batches(epoch, start=epoch % 3):
                    found = batch.x.get()
                    stream.synchronize()
                    np.testing.assert_array_equal(found, cut.x[batch.sample_ids])
            return epoch

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(serve, range(24))) == list(range(24))


def test_nothing_comes_from_the_users_arena():
    with stager_of(bar_table(STEPS)) as st, stager.Arena(1 << 20) as arena:
        assert len(list(st.batches(0))) == len(st)
        assert arena.stats().allocations == 0


def test_the_first_batch_comes_soon():
    table = made_up_bars(300_000)
    with stager.stage(table, device="cuda") as resident:
        with Stager(resident, window=64, batch_size=256) as warm:
            next(warm.batches(0))
        seconds = []
        for seed in range(5):
            with Stager(resident, window=64, batch_size=256, seed=seed) as st:
                started = time.perf_counter()
                next(st.batches(0)).x.data.mem  # noqa: B018
                cupy.cuda.get_current_stream().synchronize()
                seconds.append(time.perf_counter() - started)
        assert sorted(seconds)[2] < 0.005


def test_memory_returns_to_the_baseline():
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(3):
        with stager_of(made_up_bars(100_000), window=64, batch_size=512) as st:
            for _batch in st.batches(0):
                pass
            del _batch
        del st
        gc.collect()
    assert free - cupy.cuda.runtime.memGetInfo()[0] <= 4 << 20


# -------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("to", [None, "torch"])
@pytest.mark.parametrize(
    "options", [{}, {"normalize": "zscore"}, {"dtype": "float16"}, {"target": None}, {"dilation": 3}]
)
def test_a_graph_serves_batch_after_batch(options, to):
    with stager_of(bar_table(STEPS), last="drop", **options) as st:
        batch = GraphBatch(st, to=to, epochs=4)
        total = cupy.zeros(3)
        if to is None:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                batch.advance()
                graph = stream.end_capture()
            replay, wait = partial(graph.launch, stream), stream.synchronize
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                batch.advance()
            replay, wait = graph.replay, torch.cuda.synchronize
        assert batch.position() == (0, 0)
        for start in ((0, 0), (2, 3), (1, len(st) - 1)):
            batch.seek(*start)
            for epoch in range(start[0], start[0] + 2):
                for right in st.batches(epoch, start=start[1] if epoch == start[0] else 0):
                    assert batch.position() == (epoch, right.number)
                    replay()
                    wait()
                    x = batch.x.get() if to is None else batch.x.cpu().numpy()
                    np.testing.assert_array_equal(x, right.x.get())
                    if right.y is not None:
                        y = batch.y.get() if to is None else batch.y.cpu().numpy()
                        np.testing.assert_array_equal(y, right.y.get())
                    valid = batch.valid.get() if to is None else batch.valid.cpu().numpy()
                    assert valid.all()
        assert batch.position() == (3, 0)
        for _ in range(2 * len(st) + 1):
            replay()
        wait()
        with pytest.raises(SampleError, match="past epoch"):
            batch.position()
        x = batch.x.get() if to is None else batch.x.cpu().numpy()
        assert np.isnan(x).all()
        del total, right, batch, graph, replay


def test_graphs_refuse_what_they_cannot_serve():
    table = bar_table(STEPS)
    with stager_of(table) as st, pytest.raises(SampleError, match="last='drop'"):
        GraphBatch(st)
    with stager_of(table, shuffle="time") as st, pytest.raises(SampleError, match="decision instants"):
        GraphBatch(st)
    with stager_of(table, device="cpu", last="drop") as st, pytest.raises(SampleError, match="on the host"):
        GraphBatch(st)
    with stager_of(table, last="drop") as st:
        with pytest.raises(SampleError, match="no batch"):
            GraphBatch(st).seek(0, len(st))
        with pytest.raises(SampleError, match="epochs"):
            GraphBatch(st, epochs=0)


def test_all_kernels_are_compiled_while_staging():
    assert {"resolve", "resolve_next", "serve_bfloat16", "window_stats"} <= set(kernels.compiled(0))
