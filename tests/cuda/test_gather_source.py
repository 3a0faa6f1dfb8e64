"""The kernels of gather.cu as plain C++, thread after thread, against NumPy: no GPU is needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stager.samples.normalize import LOG1P, apply
from stager.samples.order import Order
from stager.samples.schedule import Schedule

pytest.importorskip("cupy")
from stager.cuda import gather
from stager.cuda import order as order_table

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

HERE = Path(__file__).parent
I64, I32, U64 = ctypes.c_int64, ctypes.c_int, ctypes.c_uint64
NO_BLOCKS = ctypes.c_void_p(), ctypes.c_void_p(), I64(0)


class Place(ctypes.Structure):
    _fields_ = (("x", I32), ("y", I32))


class OrderParameters(ctypes.Structure):
    _fields_ = (("bytes", U64 * (order_table.ORDER.itemsize // 8)),)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    library = tmp_path_factory.mktemp("gather") / "gather.so"
    source = library.with_suffix(".cpp")
    source.write_text(gather.kernel_source(), encoding="utf-8")
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
    for first, count in ((0, 700), (len(rows) - 300, 300)):
        addresses, y = np.zeros(count, np.uint64), np.zeros((count, max(1, n_targets)), np.float32)
        launch(
            kernels, "resolve", 2, (16, 1), parameters, I64(first), I64(count), *NO_BLOCKS,
            I64(window), I64(row_nbytes),
            at(span_ids), at(span_rows), I64(len(span_rows)), at(bases), I64(4000),
            at(target), I32(n_targets), at(addresses), at(y) if n_targets else ctypes.c_void_p(),
        )  # fmt: skip
        decisions = rows[order.sample_ids(first, count)]
        starts = decisions - window + 1
        np.testing.assert_array_equal(addresses, bases[starts // 4000] + (starts % 4000 * row_nbytes).astype(np.uint64))
        if n_targets:
            np.testing.assert_array_equal(y.view(np.uint32), target[decisions].view(np.uint32))


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
@pytest.mark.parametrize("shuffle", ["full", False])
def test_samples_of_whole_instants_are_resolved(kernels, shuffle, batch_size):
    rng = np.random.default_rng(batch_size)
    counts = rng.integers(1, 9, 200)
    instants = np.append(0, np.cumsum(counts))
    rows = rng.permutation(3000)[: instants[-1]]
    span_rows, span_ids = spans_of(rows)
    schedule = Schedule(Order(200, 3, 2, shuffle), batch_size, instants)
    n_batches = -(-200 // batch_size)
    for first, stop in ((0, n_batches), (n_batches // 2, n_batches), (n_batches - 1, n_batches)):
        places, samples = schedule.blocks(first, stop)
        ids = schedule.sample_ids(first, stop)
        addresses = np.zeros(len(ids), np.uint64)
        launch(
            kernels, "resolve", 2, (16, 1),
            OrderParameters.from_buffer_copy(order_table.order_parameters(schedule.order).tobytes()),
            I64(first * batch_size), I64(len(ids)), at(places), at(samples), I64(len(places)), I64(1), I64(1),
            at(span_ids), at(span_rows), I64(len(span_rows)), at(np.zeros(1, np.uint64)), I64(1 << 40),
            ctypes.c_void_p(), I32(1), at(addresses), ctypes.c_void_p(),
        )  # fmt: skip
        np.testing.assert_array_equal(addresses.astype(np.int64), rows[ids])


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


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("columns", [[0], [6, 2], [3, 3, 0, 5, 1, 6, 2, 4]])
def test_chosen_columns_are_copied(kernels, columns, pieces):
    for window in (1, 2, 63):
        _rows, addresses, right = windows_of(7, window, 21)
        x = np.zeros((21, window, len(columns)), np.float32)
        launch(
            kernels, "copy_columns", 2, (8, 3), at(addresses), at(x), I64(21), I32(window * len(columns)),
            at(np.array(columns, np.int32)), I32(len(columns)), I32(7), pieces=pieces,
        )  # fmt: skip
        np.testing.assert_array_equal(x, right[:, :, columns])


@pytest.mark.parametrize("window", [1, 2, 3, 64])
def test_windows_are_normalised(kernels, window):
    """All but the logarithm bit for bit as on NumPy."""
    methods = np.array([1, 3, 2, 0, 3, 4, 2], np.int32)
    fitted = np.random.default_rng(1).normal(60_000, 3, (2, 7))
    _rows, addresses, right = windows_of(7, window, 21)
    x, wanted, close = right.copy(), right.copy(), 2
    launch(
        kernels, "normalize", 2, (16, 1), at(addresses), at(x), I64(21 * 7), I32(window), I32(7), at(methods),
        I64((window - 1) * 7 + close), at(fitted),
    )  # fmt: skip
    apply(wanted, methods, right[:, -1, close], fitted)
    logs = methods == LOG1P
    np.testing.assert_array_equal(x[:, :, ~logs].view(np.uint32), wanted[:, :, ~logs].view(np.uint32))
    np.testing.assert_array_max_ulp(x[:, :, logs], wanted[:, :, logs], maxulp=4)
    assert np.isfinite(x).all()


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
