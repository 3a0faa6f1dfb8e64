"""Batches on a real GPU: the same bits as on NumPy, whatever the shape, the placement and the stream."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from bars_fixtures import bar_table
from cut_windows import Cut
from real_windows import COLUMNS, FILES, FOLDER, Windows

import stager
from stager import ReadOptions, Select, Stager, Target
from stager.batches.smoke import made_up_bars
from stager.cuda.watch import Watch
from stager.errors import ClosedError
from stager.samples.order import Order
from stager.samples.schedule import Schedule

try:
    import cupy

    from stager.cuda import groups, kernels, staging
    from stager.cuda import order as order_table
    from stager.cuda.gather import WindowGather
    from stager.cuda.groups import Groups
except ImportError:  # the marker skips, or fails under --require-gpu
    pass

pytestmark = pytest.mark.gpu

PLACES = ["device", "host"]


def bits(array):
    host = array if isinstance(array, np.ndarray) else array.get()
    return host.view(np.uint32)


# -------------------------------------------------------------------------------- the gather


PLAIN = {"columns": None, "methods": None, "close_column": 0, "close_columns": None, "fitted": None, "dilation": 1}


def gather_of(rows, index):
    return Groups([WindowGather(rows, index, 60)], 0)


def made_up_index(n_rows, window, rng):
    """Spans of decision rows between gaps, and a target for each row."""
    rows = np.flatnonzero(rng.random(n_rows) < 0.9)
    rows = rows[rows >= window - 1]
    edges = np.flatnonzero(np.diff(rows, prepend=-5) != 1)
    y = rng.random(n_rows, np.float32)
    y[::17] = np.nan
    return rows, SimpleNamespace(
        window=window,
        length=window,
        span_rows=rows[edges],
        span_ids=np.append(edges, len(rows)).astype(np.int64),
        y=y,
        **PLAIN,
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n_columns", range(1, 10))
def test_every_width_and_window_is_gathered_bit_for_bit(n_columns, place):
    rng = np.random.default_rng(n_columns)
    host = rng.integers(0, 1 << 32, (3000, n_columns), np.uint32).view(np.float32)
    driver = staging.prepare(0, Watch(0, 60))
    if place == "host":
        rows, memory, _ = staging.in_place(host, driver, Watch(host.nbytes, 60), read_only=False)
    else:
        rows, memory, _ = staging.to_device(host, driver, Watch(host.nbytes, 60), n_cores=8)
    for window in (1, 2, 7, 64, 300):
        decisions, index = made_up_index(len(host), window, rng)
        windows = np.lib.stride_tricks.sliding_window_view(host, window, axis=0).transpose(0, 2, 1)
        one = gather_of(rows, index)
        for shuffle in ("full", False):
            order = Order(len(decisions), 5, window, shuffle)
            first = 0
            for x, y in one.batches(Schedule(order, 1000), 0, -(-len(decisions) // 1000)):
                chosen = decisions[order.sample_ids(first, len(x))]
                assert x.shape == (len(chosen), window, n_columns)
                np.testing.assert_array_equal(bits(x), windows[chosen - window + 1].copy().view(np.uint32))
                np.testing.assert_array_equal(bits(y), index.y[chosen].view(np.uint32))
                first += len(x)
            assert first == len(decisions)
        one.close()
    del rows, memory


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n_targets", [1, 2, 3, 4, 17])
def test_every_number_of_targets_is_gathered_bit_for_bit(n_targets, place):
    rng = np.random.default_rng(n_targets)
    host = rng.standard_normal((3000, 5)).astype(np.float32)
    driver = staging.prepare(0, Watch(0, 60))
    if place == "host":
        rows, memory, _ = staging.in_place(host, driver, Watch(host.nbytes, 60), read_only=False)
    else:
        rows, memory, _ = staging.to_device(host, driver, Watch(host.nbytes, 60), n_cores=8)
    decisions, index = made_up_index(len(host), 7, rng)
    # Any bits: NaN of a target that a sample lacks comes as it is.
    index.y = rng.integers(0, 1 << 32, (len(host), n_targets), np.uint32).view(np.float32)
    one, order, first = gather_of(rows, index), Order(len(decisions), 5, 1), 0
    for x, y in one.batches(Schedule(order, 333), 0, -(-len(decisions) // 333)):
        chosen = decisions[order.sample_ids(first, len(x))]
        assert y.shape == (len(chosen), n_targets)
        np.testing.assert_array_equal(bits(y), index.y[chosen].view(np.uint32))
        np.testing.assert_array_equal(bits(x[:, -1]), host[chosen].view(np.uint32))
        first += len(x)
    assert first == len(decisions)
    one.close()
    del rows, memory


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("columns", [[0], [4, 1], [3, 3, 0, 2, 1, 4], list(range(6, -1, -1))])
def test_chosen_columns_are_gathered_bit_for_bit(columns, place):
    rng = np.random.default_rng(len(columns))
    host = rng.integers(0, 1 << 32, (3000, 7), np.uint32).view(np.float32)
    driver = staging.prepare(0, Watch(0, 60))
    if place == "host":
        rows, memory, _ = staging.in_place(host, driver, Watch(host.nbytes, 60), read_only=False)
    else:
        rows, memory, _ = staging.to_device(host, driver, Watch(host.nbytes, 60), n_cores=8)
    for window in (1, 2, 63, 700):
        decisions, index = made_up_index(len(host), window, rng)
        index.columns = np.array(columns)
        windows = np.lib.stride_tricks.sliding_window_view(host, window, axis=0).transpose(0, 2, 1)
        one, order, first = gather_of(rows, index), Order(len(decisions), 5, 1), 0
        for x, _ in one.batches(Schedule(order, 777), 0, -(-len(decisions) // 777)):
            chosen = decisions[order.sample_ids(first, len(x))]
            right = np.take(windows[chosen - window + 1].copy().view(np.uint32), columns, axis=2)
            np.testing.assert_array_equal(bits(x), right)
            first += len(x)
        assert first == len(decisions)
        one.close()
    del rows, memory


def test_all_widths_of_copies_occur():
    host = np.zeros((100, 4), np.float32)
    driver = staging.prepare(0, Watch(0, 60))
    vectors = set()
    for n_columns, window in ((1, 3), (2, 3), (4, 3), (3, 4)):
        rows, _, _ = staging.to_device(host[:, :n_columns].copy(), driver, Watch(1, 60), n_cores=8)
        index = SimpleNamespace(
            window=window, length=window, span_rows=np.array([2]), span_ids=np.array([0, 98]), y=None, **PLAIN
        )
        one = WindowGather(rows, index, 60)
        vectors |= {name for name, kernel in kernels.compiled(0).items() if kernel is one._kernel}
        one.close()
    assert vectors == {"copy_windows_4", "copy_windows_8", "copy_windows_16", "copy_windows_shifted"}


def test_groups_cut_an_epoch_anywhere(monkeypatch):
    host = np.arange(5000, dtype=np.float32).reshape(-1, 1)
    driver = staging.prepare(0, Watch(0, 60))
    rows, _, _ = staging.to_device(host, driver, Watch(1, 60), n_cores=8)
    index = SimpleNamespace(window=1, length=1, span_rows=np.array([0]), span_ids=np.array([0, 5000]), y=None, **PLAIN)
    one, order = gather_of(rows, index), Order(5000, 1)
    right = order.sample_ids(0, 5000)
    for group_nbytes in (1, 400, 4096, 1 << 20):
        monkeypatch.setattr(groups, "_FIRST_NBYTES", min(group_nbytes, 400))
        monkeypatch.setattr(one._gatherer, "group_nbytes", group_nbytes)
        for first, stop, batch_size in ((0, 50, 100), (1, 79, 64), (1600, 1667, 3), (10, 10, 4)):
            batches = list(one.batches(Schedule(order, batch_size), first, stop))
            start, end = first * batch_size, min(stop * batch_size, 5000)
            assert [len(x) for (x,) in batches] == [min(batch_size, end - k) for k in range(start, end, batch_size)]
            served = [x.get().reshape(-1) for (x,) in batches]
            np.testing.assert_array_equal(np.concatenate([np.empty(0), *served]), right[start:end])
    one.close()


# -------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 1000, 4095, 4096, 4097, 65_537, 3_000_000])
def test_the_order_on_the_device_is_numpys(n):
    """Rows that hold their own number: an epoch is the order itself."""
    host = np.arange(n, dtype=np.float32).reshape(-1, 1)
    driver = staging.prepare(0, Watch(0, 60))
    rows, _, _ = staging.to_device(host, driver, Watch(host.nbytes, 60), n_cores=8)
    index = SimpleNamespace(window=1, length=1, span_rows=np.array([0]), span_ids=np.array([0, n]), y=None, **PLAIN)
    one = gather_of(rows, index)
    for seed, epoch in ((0, 0), (7, 3), ((1 << 64) - 1, (1 << 63) - 1)):
        order = Order(n, seed, epoch)
        batches = one.batches(Schedule(order, 1 << 20), 0, -(-n // (1 << 20)))
        served = np.concatenate([x.get().reshape(-1) for (x,) in batches])
        np.testing.assert_array_equal(served.astype(np.int64), order.sample_ids(0, n))
    one.close()


def resolved(order, first, count, span_rows, span_ids, bases, base_rows, window=1, row_nbytes=1):
    """What the kernel resolve answers to a fabricated table of spans."""
    addresses = cupy.zeros(count, cupy.uint64)
    tables = [cupy.asarray(table) for table in (span_ids, span_rows, np.array(bases, np.uint64))]
    samples = np.zeros((), kernels.SAMPLES)
    for name, table in zip(("span_ids", "span_rows", "bases"), tables, strict=True):
        samples[name] = table.data.ptr
    samples["n_spans"], samples["base_rows"] = len(span_rows), base_rows
    samples["row_nbytes"], samples["reach"] = row_nbytes, window
    kernels.compiled(0)["resolve"](
        (-(-count // 256),),
        (256,),
        (
            order_table.order_parameters(order), samples, np.int64(first), np.int64(count),
            np.uint64(0), np.uint64(0), np.int64(0), addresses, np.uint64(0),
        ),
    )  # fmt: skip
    return addresses.get()


@pytest.mark.parametrize("n", [5, 4096, (1 << 31) - 1, (1 << 32) + 15, (1 << 40) - 87, 1 << 40, 10**15 + 3])
@pytest.mark.parametrize("shuffle", ["full", False])
def test_the_order_of_huge_epochs(n, shuffle):
    for seed in (0, 12345):
        order = Order(n, seed, 2, shuffle)
        count = min(n, 5000)
        for first in {0, (n - count) // 3, n - count}:
            addresses = resolved(order, first, count, np.array([0]), np.array([0, n]), [0], 1 << 62)
            np.testing.assert_array_equal(addresses.astype(np.int64), order.sample_ids(first, count))


def test_spans_and_base_pointers_are_resolved():
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 1 << 30, 1000)
    span_ids = np.concatenate([[0], np.cumsum(counts)])
    span_rows = span_ids[:-1] + np.cumsum(rng.integers(1, 1000, 1000)) + 64
    n, row_nbytes, window = int(span_ids[-1]), 20, 64
    base_rows = int(span_rows[-1] + counts[-1]) // 5
    bases = [(k + 1) << 50 for k in range(7)]
    order = Order(n, 9)
    for first in (0, n - 20_000):
        ids = order.sample_ids(first, 20_000)
        spans = np.searchsorted(span_ids, ids, side="right") - 1
        starts = span_rows[spans] + ids - span_ids[spans] - window + 1
        right = np.array(bases, np.int64)[starts // base_rows] + starts % base_rows * row_nbytes
        addresses = resolved(order, first, 20_000, span_rows, span_ids, bases, base_rows, window, row_nbytes)
        np.testing.assert_array_equal(addresses.astype(np.int64), right)
        assert len(set(starts // base_rows)) > 1


# -------------------------------------------------------------------------------- the facade

STEPS = {"B": [*range(400), *range(403, 750)], "A": range(300), "C": [*range(5), *range(7, 600)]}


@pytest.mark.parametrize("extra", range(4))
@pytest.mark.parametrize(("window", "batch_size"), [(1, 1), (2, 64), (7, 100), (64, 33), (150, 1000)])
def test_cpu_device_and_host_serve_the_same_bits(extra, window, batch_size):
    rng = np.random.default_rng(extra)
    n = sum(map(len, STEPS.values()))
    table = bar_table(STEPS, **{f"extra{k}": rng.standard_normal(n) for k in range(extra)})
    target = Target(horizon=3, kind="log_return")
    cut = Cut(table, STEPS, window, 4)
    places = [("cpu", "auto"), ("cuda", "device"), ("cuda", "host")]
    for shuffle in ("full", False):
        options = {"window": window, "batch_size": batch_size, "seed": 4, "shuffle": shuffle, "target": target}
        stagers = [Stager(table, device=device, placement=place, **options) for device, place in places]
        for epoch in (0, 1):
            # Of batches of one sample, the last four hundred tell as much as all.
            start = max(0, len(stagers[0]) - 400)
            for one, *others in zip(*(st.batches(epoch, start=start) for st in stagers), strict=True):
                np.testing.assert_array_equal(one.x, cut.x[one.sample_ids])
                for other in others:
                    assert isinstance(other.x, cupy.ndarray)
                    np.testing.assert_array_equal(bits(other.x), bits(one.x))
                    np.testing.assert_array_equal(bits(other.y), bits(one.y))
                    np.testing.assert_array_equal(other.sample_ids, one.sample_ids)
                    np.testing.assert_array_equal(other.times, one.times)
                    assert other.symbols == one.symbols
        del one, others, other
        for st in stagers:
            st.close()


@pytest.mark.parametrize("batch_size", [1, 33, 1000])
def test_several_targets_are_the_same_bits_everywhere(batch_size):
    targets = [
        Target(horizon=1, kind="log_return"),
        Target(horizon=50, kind="direction"),
        Target(horizon=5, scale="rank"),
        Target(horizon=5, scale="volatility"),
    ]
    options = {"window": 16, "batch_size": batch_size, "target": targets}
    places = [("cpu", "auto"), ("cuda", "device"), ("cuda", "host")]
    stagers = [Stager(bar_table(STEPS), device=device, placement=place, **options) for device, place in places]
    start = max(0, len(stagers[0]) - 400)
    for one, *others in zip(*(st.batches(1, start=start) for st in stagers), strict=True):
        assert one.y.shape == (len(one), 4)
        for other in others:
            np.testing.assert_array_equal(bits(other.x), bits(one.x))
            np.testing.assert_array_equal(bits(other.y), bits(one.y))
            np.testing.assert_array_equal(other.y_valid, one.y_valid)
            np.testing.assert_array_equal(~cupy.isnan(other.y).get(), one.y_valid)
            np.testing.assert_array_equal(other.label_times, one.label_times)
    del one, others, other
    for st in stagers:
        st.close()


@pytest.mark.parametrize("stride", [1, 3, 50])
@pytest.mark.parametrize("columns", [None, ["close"], ["volume", "low", "open"]])
def test_strides_and_columns_are_the_same_bits_everywhere(stride, columns):
    select = Select(stride=stride, columns=columns, max_gap=2)
    options = {"window": 16, "batch_size": 64, "target": Target(horizon=2), "select": select}
    places = [("cpu", "auto"), ("cuda", "device"), ("cuda", "host")]
    stagers = [Stager(bar_table(STEPS), device=device, placement=place, **options) for device, place in places]
    for one, *others in zip(*(st.batches(1) for st in stagers), strict=True):
        assert one.x.shape == (len(one), 16, 5 if columns is None else len(columns))
        for other in others:
            np.testing.assert_array_equal(bits(other.x), bits(one.x))
            np.testing.assert_array_equal(bits(other.y), bits(one.y))
    del one, others, other
    for st in stagers:
        st.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("columns", [None, ["volume", "low", "extra"]])
@pytest.mark.parametrize("window", [1, 2, 64, 301])
@pytest.mark.parametrize(
    "normalize",
    ["last", "zscore", stager.Normalize("last", "zscore", "log1p"), stager.Normalize("none", "log1p", "none")],
)
def test_windows_are_normalised_alike_everywhere(normalize, window, columns, place):
    """All but the logarithm bit for bit."""
    rng = np.random.default_rng(window)
    n = sum(map(len, STEPS.values()))
    close = 60_000 + rng.normal(size=n).cumsum()
    close[100:250] = 60_000.0  # flat windows
    extra = rng.normal(size=n) * 10.0 ** rng.integers(-30, 30, n)
    table = bar_table(
        STEPS,
        close=close,
        low=close - 1,
        high=close + 2,
        open=close,
        volume=rng.integers(0, 1 << 40, n) * 1.0,
        extra=extra,
    )
    options = {"window": window, "batch_size": 77, "normalize": normalize, "select": Select(columns=columns)}
    with (
        Stager(table, device="cpu", **options) as one,
        Stager(table, device="cuda", placement=place, **options) as other,
    ):
        logs = one._index.methods == 2
        for mine, theirs in zip(one.batches(1), other.batches(1), strict=True):
            x = theirs.x.get()
            np.testing.assert_array_equal(bits(x[:, :, ~logs]), bits(mine.x[:, :, ~logs]))
            np.testing.assert_array_max_ulp(x[:, :, logs], mine.x[:, :, logs], maxulp=4)
        del mine, theirs


@pytest.mark.parametrize("place", PLACES)
def test_views_are_the_rows_themselves(place):
    table = bar_table(STEPS)
    cut = Cut(table, STEPS, 7)
    st = Stager(table, window=7, batch_size=50, device="cuda", placement=place)
    rows = st.resident.rows
    for batch in st.batches(3, start=len(st) - 3):
        for sample in (0, len(batch) // 2, len(batch) - 1):
            view = st.view(3, batch.number, sample)
            decision = cut.decisions[batch.sample_ids[sample]]
            assert view.data.ptr == rows.data.ptr + (decision - 6) * 20
            assert view.data.mem is rows.data.mem
            assert view.shape == (7, 5)
            np.testing.assert_array_equal(view.get(), batch.x[sample].get())
    del view, batch, rows
    st.close()


@pytest.mark.parametrize("place", PLACES)
def test_batches_may_be_kept_and_written_to(place):
    st = Stager(made_up_bars(20_000), window=16, batch_size=64, device="cuda", placement=place)
    rows = st.resident.rows.get()
    kept = [(batch.x, batch.x.get()) for batch in st.batches(0)]
    for k, batch in enumerate(st.batches(1)):
        batch.x[...] = -k
    for x, then in kept:
        np.testing.assert_array_equal(x.get(), then)
    np.testing.assert_array_equal(st.resident.rows.get(), rows)
    del kept, x, batch
    st.close()


@pytest.mark.parametrize("place", PLACES)
def test_iterators_and_early_exits(place):
    with Stager(made_up_bars(20_000), window=4, batch_size=500, device="cuda", placement=place) as st:
        alone = [batch.x.get() for batch in st.batches(0)]
        next(st.batches(0))
        for batch, other in zip(st.batches(0, start=2), st.batches(0), strict=False):
            np.testing.assert_array_equal(batch.x.get(), alone[batch.number])
            np.testing.assert_array_equal(other.x.get(), alone[other.number])
        del batch, other


@pytest.mark.parametrize("place", PLACES)
def test_two_stagers_over_one_resident(place):
    table = bar_table(STEPS)
    with stager.stage(table, device="cuda", placement=place) as resident:
        for window in (3, 50):
            cut = Cut(table, STEPS, window)
            with Stager(resident, window=window, batch_size=128) as st:
                for batch in st.batches(2):
                    np.testing.assert_array_equal(batch.x.get(), cut.x[batch.sample_ids])
                del batch
        assert not resident.closed


# -------------------------------------------------------------------------------- streams

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""
CYCLES = 600_000_000


@pytest.fixture(scope="module")
def spin():
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))
    cupy.cuda.Device(0).synchronize()
    return lambda: kernel((1,), (1,), (np.int64(CYCLES),))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("borrowed", [False, True])
def test_close_waits_for_queued_reads(place, borrowed, spin):
    table = bar_table(STEPS)
    cut = Cut(table, STEPS, 64)
    resident = stager.stage(table, device="cuda", placement=place)
    st = Stager(resident, window=64, batch_size=256)
    # Memory for the batches is there before the delay begins.
    ready = [batch.x for batch in st.batches(0)]
    del ready
    stream = st._gather._groups._gatherer.stream
    with stream:
        spin()
    queued = list(st.batches(1))
    assert not stream.done
    started = time.perf_counter()
    (resident if borrowed else st).close()
    assert time.perf_counter() - started > 0.05
    assert stream.done
    resident.close()
    for batch in queued:
        np.testing.assert_array_equal(batch.x.get(), cut.x[batch.sample_ids])
    with pytest.raises(ClosedError):
        st.batches()


@pytest.mark.parametrize("place", PLACES)
def test_batches_of_side_streams_are_right_where_they_are_consumed(place, spin):
    table = bar_table(STEPS)
    cut = Cut(table, STEPS, 32)
    with Stager(table, window=32, batch_size=50, device="cuda", placement=place) as st:
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        sums = [[] for _ in streams]
        iterators = [st.batches(epoch) for epoch in range(len(streams))]
        for stream in streams:
            with stream:
                spin()
        for _ in range(len(st)):
            for stream, batches, total in zip(streams, iterators, sums, strict=True):
                with stream:
                    batch = next(batches)
                    total.append((batch.sample_ids, batch.x[:, :, 3].sum(axis=1, dtype=cupy.float64)))
                    del batch
        for stream, total in zip(streams, sums, strict=True):
            stream.synchronize()
            for ids, closes in total:
                np.testing.assert_array_equal(closes.get(), cut.x[ids][:, :, 3].sum(axis=1, dtype=np.float64))


# -------------------------------------------------------------------------------- real files


@pytest.mark.skipif(FOLDER is None, reason="STAGER_REAL_DATA is not set")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FILES)
def test_an_epoch_over_a_real_file(name, place, tmp_path):
    windows = Windows(name, 30)
    pack = stager.pack(windows.path, tmp_path / "real.pack", read=ReadOptions(**windows.options))
    columns = [pack.columns.index(column) for column in COLUMNS]
    target = Target(horizon=1, delay=0)
    options = {"window": 30, "target": target, "batch_size": 256, "seed": 5}
    with Stager(pack, device="cuda", placement=place, **options) as st:
        seen = np.zeros(st.n_samples, int)
        assert st.n_samples == len(windows.x)
        for batch in st.batches(1):
            ids = batch.sample_ids
            seen[ids] += 1
            np.testing.assert_array_equal(batch.x.get()[:, :, columns], windows.x[ids])
            np.testing.assert_array_equal(batch.y.get(), windows.y[ids])
            np.testing.assert_array_equal(batch.times, windows.times[ids])
        del batch
        assert (seen == 1).all()
