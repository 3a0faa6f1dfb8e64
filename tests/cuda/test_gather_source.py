"""The kernels as plain C++, thread after thread, against NumPy: no GPU is needed."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stager.samples.normalize import LOG1P, apply, cast
from stager.samples.order import Order
from stager.samples.sampling import Draws, WeightedOrder
from stager.samples.schedule import Schedule

pytest.importorskip("cupy")
from stager.cuda import order as order_table
from stager.cuda.kernels import COLUMN, CURSOR, NEXT, SAMPLES, kernel_source
from stager.cuda.spread import Layout

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

HERE = Path(__file__).parent
I64, I32, U64 = ctypes.c_int64, ctypes.c_int, ctypes.c_uint64
NO_BLOCKS = ctypes.c_void_p(), ctypes.c_void_p(), I64(0)


class Place(ctypes.Structure):
    _fields_ = (("x", I32), ("y", I32))


class SamplesParameters(ctypes.Structure):
    _fields_ = tuple((name, I64) for name in SAMPLES.names)


class NextParameters(ctypes.Structure):
    _fields_ = (*((name, I64) for name in NEXT.names[:-1]), ("samples", SamplesParameters))


class OrderParameters(ctypes.Structure):
    _fields_ = (("bytes", U64 * (order_table.ORDER.itemsize // 8)),)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    library = tmp_path_factory.mktemp("gather") / "gather.so"
    source = library.with_suffix(".cpp")
    source.write_text(kernel_source(), encoding="utf-8")
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-include", HERE / "host_cuda.h",
         source, "-o", library],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def launch(library: Any, name: str, grid: int, block: tuple[int, int], *arguments: Any, pieces: int = 1) -> None:
    """Run a kernel, one thread after another."""
    places = {part: Place.in_dll(library, part) for part in ("blockIdx", "threadIdx", "blockDim", "gridDim")}
    places["gridDim"].x, places["gridDim"].y = grid, pieces
    places["blockDim"].x, places["blockDim"].y = block
    function = getattr(library, name)
    function.restype = None
    for block_x, block_y, thread_y, thread_x in product(*map(range, (grid, pieces, block[1], block[0]))):
        places["blockIdx"].x, places["blockIdx"].y = block_x, block_y
        places["threadIdx"].x, places["threadIdx"].y = thread_x, thread_y
        function(*arguments)


def at(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def structure(kind: Any, **fields: Any) -> Any:
    """A struct of numbers, addresses of arrays, and other structs."""
    held = {name: value.ctypes.data if isinstance(value, np.ndarray) else value for name, value in fields.items()}
    return kind(**held)


def samples_of(span_rows: np.ndarray, span_ids: np.ndarray, bases: np.ndarray, **more: Any) -> Any:
    fields = {"base_rows": 1 << 62, "row_nbytes": 1, "reach": 1, "target": 0, "n_targets": 0}
    return structure(
        SamplesParameters, span_rows=span_rows, span_ids=span_ids, n_spans=len(span_rows), bases=bases, **fields | more
    )


def spans_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    edges = np.flatnonzero(np.diff(rows, prepend=-5) != 1)
    return rows[edges], np.append(edges, len(rows)).astype(np.int64)


@pytest.mark.parametrize("shuffle", ["full", False])
@pytest.mark.parametrize("n_targets", [0, 1, 3])
def test_samples_are_resolved_with_their_targets(kernels, shuffle, n_targets):
    rng = np.random.default_rng(n_targets)
    window, row_nbytes, n_rows = 5, 20, 9000
    rows = np.flatnonzero(rng.random(n_rows) < 0.8)
    rows = rows[rows >= window - 1]
    span_rows, span_ids = spans_of(rows)
    order = Order(len(rows), 3, 2, shuffle)
    parameters = OrderParameters.from_buffer_copy(order_table.order_parameters(order).tobytes())
    bases = np.array([1 << 40, 1 << 41, 1 << 42], np.uint64)
    target = rng.integers(0, 1 << 32, (n_rows, max(1, n_targets)), np.uint32).view(np.float32)
    samples = samples_of(
        span_rows, span_ids, bases, base_rows=4000, row_nbytes=row_nbytes, reach=window, target=target,
        n_targets=n_targets,
    )  # fmt: skip
    for first, count in ((0, 700), (len(rows) - 300, 300)):
        addresses, y = np.zeros(count, np.uint64), np.zeros((count, max(1, n_targets)), np.float32)
        launch(
            kernels, "resolve", 2, (16, 1), parameters, samples, I64(first), I64(count), *NO_BLOCKS,
            at(addresses), at(y) if n_targets else ctypes.c_void_p(),
        )  # fmt: skip
        decisions = rows[order.sample_ids(first, count)]
        starts = decisions - window + 1
        np.testing.assert_array_equal(addresses, bases[starts // 4000] + (starts % 4000 * row_nbytes).astype(np.uint64))
        if n_targets:
            np.testing.assert_array_equal(y.view(np.uint32), target[decisions].view(np.uint32))


def resolved(library: Any, schedule: Schedule, first: int, stop: int, table: np.ndarray | None = None) -> np.ndarray:
    """The samples of batches as the kernel resolve finds them, of rows that all end one, of one byte each."""
    count = int(schedule.offsets(first, stop)[-1])
    parameters = order_table.order_parameters(
        schedule.order, schedule.batch_size, schedule.stride, 0 if table is None else table.ctypes.data
    )
    addresses = np.zeros(count, np.uint64)
    nought = np.zeros(2, np.int64)
    launch(
        library, "resolve", 2, (16, 1), OrderParameters.from_buffer_copy(parameters.tobytes()),
        samples_of(nought[:1], nought, nought), I64(schedule.first_position(first)), I64(count), *NO_BLOCKS,
        at(addresses), ctypes.c_void_p(),
    )  # fmt: skip
    return addresses.astype(np.int64)


def orders_of(n: int) -> list[Order]:
    blocks = {1, 2, 7, 100, 4096, n // 3 + 1, n, n + 1}
    return [Order(n, 3, 2), Order(n, 3, 2, False), *(Order(n, 3, 2, "block", block) for block in sorted(blocks))]


@pytest.mark.parametrize("n", [1, 2, 3, 50, 1000, 4095, 4096, 5000])
def test_orders_are_numpys(kernels, n):
    for order in orders_of(n):
        ids = resolved(kernels, Schedule(order, n), 0, 1)
        np.testing.assert_array_equal(ids, order.sample_ids(0, n))


@pytest.mark.parametrize("n", [(1 << 31) + 11, (1 << 32) + 15, (1 << 40) - 87, 1 << 40, (1 << 62)])
def test_orders_of_huge_epochs_are_numpys(kernels, n):
    for order in orders_of(n):
        # With the places around the shorter block.
        places = {0, n // 2048, (n - 1) // 1024}
        if order.shuffle == "block":
            places.add(order.how.place * order.how.size // 1024)
        for batch in sorted(places):
            schedule = Schedule(order, 1024)
            ids = schedule.sample_ids(batch, batch + 1)
            np.testing.assert_array_equal(resolved(kernels, schedule, batch, batch + 1), ids)


@pytest.mark.parametrize("n", [1, 2, 50, 5000])
def test_draws_are_numpys(kernels, n):
    draws = Draws(np.random.default_rng(n).gamma(0.3, size=n))
    for seed, epoch in ((0, 0), (7, 3), ((1 << 64) - 1, (1 << 63) - 1)):
        order = WeightedOrder(draws, seed, epoch)
        ids = resolved(kernels, Schedule(order, n), 0, 1, draws.table)
        np.testing.assert_array_equal(ids, order.sample_ids(0, n))


@pytest.mark.parametrize("how", ["full", "block", False, "weighted"])
@pytest.mark.parametrize(
    ("n", "batch_size", "n_ranks"), [(1000, 7, 3), (1000, 1000, 2), (5, 4, 3), (64, 8, 8), (3, 50, 1)]
)
def test_ranks_and_padding_are_resolved(kernels, how, n, batch_size, n_ranks):
    draws = Draws(np.arange(n) + 1.0)
    order = WeightedOrder(draws, 1, 2) if how == "weighted" else Order(n, 1, 2, how, 16)
    n_batches = -(-n // (batch_size * n_ranks))
    for rank in range(n_ranks):
        schedule = Schedule(order, batch_size, None, batch_size * n_ranks, rank * batch_size, pad=True)
        for first, stop in ((0, n_batches), (n_batches // 2, n_batches), (n_batches - 1, n_batches)):
            ids = resolved(kernels, schedule, first, stop, draws.table)
            np.testing.assert_array_equal(ids, schedule.sample_ids(first, stop))


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
@pytest.mark.parametrize("shuffle", ["full", False])
def test_samples_of_whole_instants_are_resolved(kernels, shuffle, batch_size):
    rng = np.random.default_rng(batch_size)
    counts = rng.integers(1, 9, 200)
    instants = np.append(0, np.cumsum(counts))
    rows = rng.permutation(3000)[: instants[-1]]
    span_rows, span_ids = spans_of(rows)
    schedule, nought = Schedule(Order(200, 3, 2, shuffle), batch_size, instants), np.zeros(1, np.uint64)
    n_batches = -(-200 // batch_size)
    for first, stop in ((0, n_batches), (n_batches // 2, n_batches), (n_batches - 1, n_batches)):
        places, samples = schedule.blocks(first, stop)
        ids = schedule.sample_ids(first, stop)
        addresses = np.zeros(len(ids), np.uint64)
        launch(
            kernels, "resolve", 2, (16, 1),
            OrderParameters.from_buffer_copy(order_table.order_parameters(schedule.order).tobytes()),
            samples_of(span_rows, span_ids, nought), I64(first * batch_size), I64(len(ids)),
            at(places), at(samples), I64(len(places)), at(addresses), ctypes.c_void_p(),
        )  # fmt: skip
        np.testing.assert_array_equal(addresses.astype(np.int64), rows[ids])


@pytest.mark.parametrize("kind", ["resolve_next", "next_windows_4"])
@pytest.mark.parametrize("n_targets", [0, 1, 3])
@pytest.mark.parametrize(("n_batches", "stride", "offset"), [(4, 64, 0), (3, 100, 36), (7, 300, 100)])
@pytest.mark.parametrize("how", ["full", "block", "weighted"])
def test_a_cursor_goes_through_epochs_by_itself(kernels, how, n_batches, stride, offset, n_targets, kind):
    """Also past the end of an epoch, as padding, and past the last order that is there."""
    rng = np.random.default_rng(n_batches)
    window, count, n_rows, n_epochs = 5, 64, 2000, 3
    rows = np.flatnonzero(rng.random(n_rows) < 0.2)
    rows = rows[rows >= window - 1]
    span_rows, span_ids = spans_of(rows)
    draws = Draws(rng.random(len(rows)))
    orders = [
        WeightedOrder(draws, 3, epoch) if how == "weighted" else Order(len(rows), 3, epoch, how, 16)
        for epoch in range(n_epochs)
    ]
    table = np.stack([order_table.order_parameters(order, table=draws.table.ctypes.data) for order in orders])
    target = rng.random((n_rows, max(1, n_targets))).astype(np.float32)
    nothing = np.full(8 * window, 0xFF, np.uint8)
    bars = rng.random((n_rows, 2)).astype(np.float32)
    bases = np.array([bars.ctypes.data], np.uint64)
    samples = samples_of(span_rows, span_ids, bases, row_nbytes=8, reach=window, target=target, n_targets=n_targets)
    cursor = np.zeros(1, CURSOR)
    cursor["batch"] = 1
    for step in range(1, n_batches * n_epochs + 2):
        epoch, batch = divmod(step, n_batches)
        assert (cursor["epoch"], cursor["batch"], cursor["n_done"]) == (epoch, batch, 0)
        addresses, valid = np.zeros(count, np.uint64), np.full(count, 7, np.uint8)
        x = np.zeros((count, window, 2), np.float32)
        y = np.zeros((count, max(1, n_targets)), np.float32)
        following = structure(
            NextParameters, cursor=cursor, orders=table, n_orders=n_epochs, n_batches=n_batches, stride=stride,
            offset=offset, count=count, nothing=nothing, y=y, valid=valid, samples=samples,
        )  # fmt: skip
        if kind == "resolve_next":
            launch(kernels, kind, 5, (1, 1), following, at(addresses))
        else:
            launch(kernels, kind, count, (1, 1), following, at(x), I32(x[0].size))
        if epoch == n_epochs:
            assert not valid.any()
            assert np.isnan(x).all() if kind != "resolve_next" else (addresses == nothing.ctypes.data).all()
            assert not n_targets or np.isnan(y).all()
            continue
        positions = batch * stride + offset + np.arange(count)
        np.testing.assert_array_equal(valid, positions < len(rows))
        ids = orders[epoch].sample_ids(0, len(rows))[positions % len(rows)]
        if kind == "resolve_next":
            np.testing.assert_array_equal(addresses, bases[0] + ((rows[ids] - window + 1) * 8).astype(np.uint64))
        else:
            np.testing.assert_array_equal(x, bars[rows[ids][:, None] + np.arange(1 - window, 1)])
        if n_targets:
            np.testing.assert_array_equal(y, target[rows[ids]])


def windows_of(n_columns: int, window: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, the addresses of some windows, and the windows."""
    rng = np.random.default_rng(n_columns * 1000 + window)
    rows = rng.normal(60_000, 1, (500, n_columns)).astype(np.float32)
    rows[100:200] = rows[100]
    starts = rng.integers(0, len(rows) - window + 1, n)
    starts[0] = 120
    addresses = (rows.ctypes.data + starts * 4 * n_columns).astype(np.uint64)
    return rows, addresses, rows[starts[:, None] + np.arange(window)]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("vector", "n_columns"), [(4, 4), (4, 8), (2, 2), (2, 6), (1, 1), (1, 5)])
def test_windows_are_copied(kernels, vector, n_columns, pieces):
    for window, lanes in ((1, 8), (7, 8), (64, 16)):
        rows, addresses, right = windows_of(n_columns, window, 21)
        assert rows.ctypes.data % (4 * vector) == 0
        # Aligned as a GPU's memory is.
        memory = np.zeros(right.size + 4, np.float32)
        skip = -memory.ctypes.data % 16 // 4
        x = memory[skip : skip + right.size]
        launch(
            kernels, f"copy_windows_{4 * vector}", 2, (lanes, 3), at(addresses), at(x), I64(21),
            I32(window * n_columns // vector), pieces=pieces,
        )  # fmt: skip
        np.testing.assert_array_equal(x.reshape(right.shape), right)


def guarded(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array aligned as a GPU's memory is, of poison, with 64 bytes of it before and after."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(nbytes + 256, 0xA5, np.uint8)
    first = 64 + -memory.ctypes.data % 64
    made = memory[first : first + nbytes].view(dtype).reshape(shape)
    made_of[made.ctypes.data] = memory
    return made


made_of: dict[int, np.ndarray] = {}


def assert_guards(array: np.ndarray) -> None:
    memory = made_of.pop(array.ctypes.data)
    first = array.ctypes.data - memory.ctypes.data
    assert (memory[:first] == 0xA5).all()
    assert (memory[first + array.nbytes :] == 0xA5).all()


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("n_columns", [1, 3, 5, 7])
def test_windows_that_begin_anywhere_are_copied_in_sixteen_bytes(kernels, n_columns, pieces):
    window, n = 12, 500 - 12 + 1
    rows = guarded((500, n_columns), np.float32)
    rows[:] = np.random.default_rng(n_columns).normal(size=rows.shape)
    starts = np.arange(n)
    addresses = (rows.ctypes.data + starts * 4 * n_columns).astype(np.uint64)
    x = guarded((n, window, n_columns), np.float32)
    launch(
        kernels, "copy_windows_shifted", 2, (8, 3), at(addresses), at(x), I64(n), I32(window * n_columns // 4),
        pieces=pieces,
    )  # fmt: skip
    np.testing.assert_array_equal(x, rows[starts[:, None] + np.arange(window)])
    assert_guards(x)


class WindowsParameters(ctypes.Structure):
    _fields_ = (("count", I64), *((name, I32) for name in ("window", "row_floats", "n_columns", "step")))


def serve(
    kernels: Any, addresses: np.ndarray, n_all: int, window: int, columns: np.ndarray, dtype: str,
    *, wide: int = 1, kind: str = "", step: int = 1, stats: bool = True, pieces: int = 1,
) -> np.ndarray:  # fmt: skip
    """Windows as the kernels serve them: value by value, or some at a time by a kernel of some kind."""
    n, n_served = len(addresses), len(columns)
    windows = WindowsParameters(n, window, n_all, n_served, step)
    found = guarded((n, n_served, 2), np.float64)
    if stats:
        launch(kernels, "window_stats", 2, (16, 1), at(addresses), windows, at(columns), at(found))
    x = guarded((n, window, n_served), np.float32 if dtype == "float32" else np.uint16)
    # The lanes must be a multiple of what makes a lane's columns the same in all rounds.
    lanes = 8 if wide == 1 else 2 * n_served // math.gcd(n_served, wide)
    launch(
        kernels, f"serve_{'' if wide == 1 else f'{wide}_{kind}'}{dtype}", 2, (lanes, 3), at(addresses), at(x),
        windows, at(columns), at(found) if stats else ctypes.c_void_p(), pieces=pieces,
    )  # fmt: skip
    assert_guards(x)
    return x


def columns_of(sources: Any, methods: Any = 0, close: Any = 0, fitted: Any = (0, 1)) -> np.ndarray:
    columns = np.zeros(len(sources), COLUMN)
    columns["source"], columns["method"], columns["close"] = sources, methods, close
    columns["mean"], columns["deviation"] = fitted
    return columns


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("columns", [[0], [6, 2], [3, 3, 0, 5, 1, 6, 2, 4]])
def test_chosen_columns_are_copied(kernels, columns, pieces):
    for window in (1, 2, 63):
        _rows, addresses, right = windows_of(7, window, 21)
        x = serve(kernels, addresses, 7, window, columns_of(columns), "float32", stats=False, pieces=pieces)
        np.testing.assert_array_equal(x, right[:, :, columns])


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("wide", [4, 8])
@pytest.mark.parametrize(
    ("n_columns", "windows"), [(1, (8, 64)), (4, (2, 6, 64)), (5, (8, 64)), (6, (4, 28)), (8, (1, 5)), (12, (2, 10))]
)
def test_values_some_at_a_time_are_those_one_by_one(kernels, n_columns, windows, wide, pieces, stats):
    methods = np.resize([1, 2, 0] if wide == 8 else [1, 3, 2, 0, 4] if stats else [1, 0, 2, 4, 1], n_columns)
    for dtype, window in product(("float32", "float16", "bfloat16"), windows):
        _rows, addresses, right = windows_of(n_columns, window, 21)
        fitted = np.stack([right[0, 0], np.full(n_columns, 3.0)])
        scaled = columns_of(range(n_columns), methods, n_columns // 2, fitted)
        plain = columns_of(range(n_columns))
        for columns, kind in ((scaled, "scaled_"), (plain, "")):
            one = serve(kernels, addresses, n_columns, window, columns, dtype, stats=stats)
            for served in (kind, *([f"whole_{kind}"] if n_columns % wide == 0 else [])):
                some = serve(
                    kernels, addresses, n_columns, window, columns, dtype,
                    wide=wide, kind=served, pieces=pieces, stats=stats,
                )  # fmt: skip
                np.testing.assert_array_equal(one, some)


@pytest.mark.parametrize("wide", [4, 8])
@pytest.mark.parametrize("columns", [[6, 2], [3, 3, 0, 5, 1, 6, 2, 4], [1]])
def test_chosen_columns_are_copied_some_at_a_time(kernels, columns, wide):
    _rows, addresses, right = windows_of(7, 16, 21)
    x = serve(kernels, addresses, 7, 16, columns_of(columns), "float32", stats=False, wide=wide)
    np.testing.assert_array_equal(x, right[:, :, columns])


def test_rows_of_a_window_may_lie_apart(kernels):
    window, step, n_all = 7, 3, 5
    _rows, addresses, right = windows_of(n_all, (window - 1) * step + 1, 21)
    methods = np.array([1, 3, 0, 1, 3])
    wanted, close = right[:, ::step].copy(), 4
    x = serve(kernels, addresses, n_all, window, columns_of(range(n_all), methods, close), "float32", step=step)
    apply(wanted, methods.astype(np.int32), right[:, -1, [close]])
    np.testing.assert_array_equal(x.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3, 64])
def test_windows_are_normalised(kernels, window, stats):
    """All but the logarithm bit for bit as on NumPy."""
    methods = np.array([1, 3, 2, 0, 3, 4, 2] if stats else [1, 1, 2, 0, 1, 4, 2], np.int32)
    fitted = np.random.default_rng(1).normal(60_000, 3, (2, 7))
    _rows, addresses, right = windows_of(7, window, 21)
    wanted, close = right.copy(), 2
    x = serve(kernels, addresses, 7, window, columns_of(range(7), methods, close, fitted), "float32", stats=stats)
    apply(wanted, methods, right[:, -1, [close]], fitted)
    logs = methods == LOG1P
    np.testing.assert_array_equal(x[:, :, ~logs].view(np.uint32), wanted[:, :, ~logs].view(np.uint32))
    np.testing.assert_array_max_ulp(x[:, :, logs], wanted[:, :, logs], maxulp=4)
    assert np.isfinite(x).all()


@pytest.mark.parametrize("stats", [True, False])
def test_quotients_are_rounded_as_division_rounds_them(kernels, stats):
    """Of any two float32, tiny, huge, zero, infinite and missing ones too."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 1 << 32, (20_000, 2), np.uint32).view(np.float32)
    rows[:100, 1] = rng.choice([0.0, -0.0, np.inf, np.nan, 1e-45, 3.4e38, 1.0], 100)
    rows[1000:1200, 0] = rows[1000:1200, 1]
    if stats:
        # Then the last close that is there is meant: a missing one has no other before it here.
        rows = rows[~np.isnan(rows[:, 1])]
    addresses = (rows.ctypes.data + np.arange(len(rows)) * 8).astype(np.uint64)
    x = serve(kernels, addresses, 2, 1, columns_of([0], 1, 1), "float32", stats=stats)
    with np.errstate(all="ignore"):
        wanted = (rows[:, 0].astype(np.float64) / rows[:, 1].astype(np.float64) - 1.0).astype(np.float32)
    there = ~np.isnan(wanted)
    np.testing.assert_array_equal(x[there, 0, 0].view(np.uint32), wanted[there].view(np.uint32))
    assert np.isnan(x[~there]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_are_cast_to_the_nearest(kernels, dtype):
    rng = np.random.default_rng(3)
    values = rng.integers(0, 1 << 32, 100_000, np.uint32)
    halves = np.arange(1 << 16).astype(np.uint16)
    exact = halves.view(np.float16).astype(np.float32).view(np.uint32)
    # Between two neighbours, and what lies about it.
    ties = np.concatenate(
        [exact + np.uint32((1 << 12) + d) for d in (-1, 0, 1)] + [(halves.astype(np.uint32) << 16) + 0x8000]
    )
    rows = np.concatenate([values, exact, ties]).astype(np.uint32).view(np.float32).reshape(-1, 1)
    addresses = (rows.ctypes.data + np.arange(len(rows)) * 4).astype(np.uint64)
    x = serve(kernels, addresses, 1, 1, columns_of([0]), dtype, stats=False)
    np.testing.assert_array_equal(x[:, 0, 0], cast(rows[:, 0], dtype).view(np.uint16))
    if dtype == "bfloat16":
        there = ~np.isnan(rows[:, 0])
        near = (x[:, 0, 0].astype(np.uint32) << 16).view(np.float32)
        up = ((x[:, 0, 0].astype(np.uint32) + 1) << 16).view(np.float32)
        with np.errstate(all="ignore"):
            assert (np.abs(near - rows[:, 0]) <= np.abs(up - rows[:, 0]))[there & np.isfinite(near)].all()


@pytest.mark.parametrize("n_columns", [1, 5, 8])
@pytest.mark.parametrize("n_pieces", [1, 2, 700])
def test_rows_are_scattered(kernels, n_columns, n_pieces):
    rng = np.random.default_rng(n_columns * n_pieces)
    n_rows = 3000
    rows = rng.integers(0, 1 << 32, (n_rows, n_columns), np.uint32)
    sources = np.array([0, *np.sort(rng.choice(np.arange(1, n_rows), n_pieces - 1, replace=False))], np.int64)
    lengths, order = np.diff(sources, append=n_rows), rng.permutation(n_pieces)
    places = np.empty_like(sources)
    places[order] = np.cumsum(lengths[order]) - lengths[order]
    wanted = np.empty_like(rows)
    wanted[np.repeat(places - sources, lengths) + np.arange(n_rows)] = rows
    found = np.zeros_like(rows)
    for first, count in ((0, 1000), (1000, 1), (1001, 1999)):
        part = np.ascontiguousarray(rows[first : first + count])
        launch(
            kernels, "scatter_rows", 3, (16, 1), at(part), at(found), I64(first), I64(count), I32(n_columns),
            at(sources), at(places), I64(n_pieces),
        )  # fmt: skip
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("n_columns", [4, 5])
def test_windows_are_found_in_blocks_of_rows(kernels, n_columns):
    """As they lie where rows are spread over several GPUs: each block in memory of its own."""
    n_rows, window, count = 3000, 16, 400
    rows = np.random.default_rng(0).random((n_rows, n_columns)).astype(np.float32)
    layout = Layout.of(n_rows, 4, window - 1)
    blocks = [np.array(rows[first:stop]) for first, stop in layout.spans]
    decisions = np.arange(window - 1, n_rows)
    span_rows, span_ids = spans_of(decisions)
    order = Order(len(decisions), 5, 1)
    parameters = OrderParameters.from_buffer_copy(order_table.order_parameters(order).tobytes())
    bases = np.array([block.ctypes.data for block in blocks], np.uint64)
    samples = samples_of(span_rows, span_ids, bases, base_rows=layout.base_rows, row_nbytes=4 * n_columns, reach=window)
    addresses, out = np.zeros(count, np.uint64), np.zeros((count, window, n_columns), np.float32)
    launch(
        kernels, "resolve", 2, (16, 1), parameters, samples, I64(100), I64(count), *NO_BLOCKS, at(addresses),
        ctypes.c_void_p(),
    )  # fmt: skip
    launch(kernels, "copy_windows_4", 4, (8, 2), at(addresses), at(out), I64(count), I32(window * n_columns))
    wanted = decisions[order.sample_ids(100, count)]
    np.testing.assert_array_equal(out, np.stack([rows[row - window + 1 : row + 1] for row in wanted]))
    owners = (wanted - window + 1) // layout.base_rows
    assert len(np.unique(owners)) == 4
    assert (wanted // layout.base_rows != owners).any()  # some windows go over a border
