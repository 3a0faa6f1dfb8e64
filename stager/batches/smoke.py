"""The smoke test: the whole way on this machine, every value compared."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.batches.arrays import stage_arrays
from stager.batches.devices import choose_device
from stager.batches.resident import stage
from stager.batches.stager import Stager
from stager.config import format_nbytes
from stager.errors import StagerError
from stager.packs.packing import pack
from stager.samples.targets import Target

N_ARRAYS = 106_652
ARRAY_SHAPE = (60, 5)

Progress = Callable[[str, int, int], None]


class SmokeError(StagerError):
    """A value on the device was not the host's."""


@dataclass(frozen=True)
class SmokeResult:
    """What ran and how fast. Times in seconds; `ceiling_gbps` is a pinned copy of the same run, 0 on the CPU."""

    device: str
    path: str
    n_rows: int
    rows_nbytes: int
    pack_seconds: float
    stage_seconds: float
    ceiling_gbps: float
    n_row_allocations: int
    n_samples: int
    batch_nbytes: int
    epoch_seconds: float
    n_arrays: int
    arrays_nbytes: int
    arrays_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """The table."""

        def rate(nbytes: int, seconds: float) -> str:
            text = f"{format_nbytes(nbytes)} in {seconds:.4f} s"
            if not seconds:
                return text
            gbps = nbytes / seconds / 1e9
            share = f", {gbps / self.ceiling_gbps:.0%} of the pinned copy" if self.ceiling_gbps else ""
            return f"{text}, {gbps:.1f} GB/s{share}"

        return [
            ("packed", f"{self.n_rows:,} rows in {self.pack_seconds:.2f} s"),
            ("staged", f"{rate(self.rows_nbytes, self.stage_seconds)} ({self.path})"),
            ("pinned copy", f"{self.ceiling_gbps:.1f} GB/s" if self.ceiling_gbps else "no bus on the CPU"),
            ("allocations", f"{self.n_row_allocations} for rows"),
            ("epoch", f"{self.n_samples:,} samples, each once: {rate(self.batch_nbytes, self.epoch_seconds)}"),
            ("arrays", f"{self.n_arrays:,}: {rate(self.arrays_nbytes, self.arrays_seconds)}, packing included"),
        ]


def run_smoke(device: str, n_rows: int = 2_000_000, *, progress: Progress | None = None) -> SmokeResult:
    """Pack made-up bars, stage them, compare every value, serve an epoch, stage 106,652 arrays.

    Raises
    ------
    SmokeError
        If a value or a sample is not what it must be.
    DeviceError
        If the device is not there.
    """
    chosen = choose_device(device)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        packed = pack(made_up_bars(n_rows), Path(folder) / "smoke.pack", progress=progress)
        pack_seconds = time.perf_counter() - started
        with stage(packed, device=device, progress=progress) as resident:
            _check(np.array_equal(to_host(resident.rows), packed.rows), "the staged rows differ from the pack")
            target = Target("close", horizon=5)
            with Stager(resident, window=64, target=target, batch_size=256, seed=7) as st:
                n_samples, epoch_seconds, batch_nbytes = _epoch(st)
            stage_seconds, path, n_allocations = resident.seconds, resident.path, resident.n_allocations
    rng = np.random.default_rng(7)
    block = rng.random((N_ARRAYS, *ARRAY_SHAPE), np.float32)
    arrays = list(block)
    started = time.perf_counter()
    staged = stage_arrays(arrays, device=device)
    arrays_seconds = time.perf_counter() - started
    with staged:
        _check(all(np.array_equal(to_host(view), array) for view, array in zip(staged, arrays, strict=True)),
               "a staged array differs from the host's")  # fmt: skip
        arrays_nbytes = staged.nbytes
    return SmokeResult(
        device=_describe(chosen.index),
        path=path,
        n_rows=packed.n_rows,
        rows_nbytes=packed.rows.nbytes,
        pack_seconds=pack_seconds,
        stage_seconds=stage_seconds,
        ceiling_gbps=_ceiling(chosen.index),
        n_row_allocations=n_allocations,
        n_samples=n_samples,
        batch_nbytes=batch_nbytes,
        epoch_seconds=epoch_seconds,
        n_arrays=N_ARRAYS,
        arrays_nbytes=arrays_nbytes,
        arrays_seconds=arrays_seconds,
    )


def made_up_bars(n_rows: int, n_symbols: int = 20) -> pa.Table:
    """Minute bars whose values tell symbol and row: close is ``1e6 * symbol + row``, exact in float32 up to 2**24."""
    per_symbol = max(100, n_rows // n_symbols)
    row = np.tile(np.arange(per_symbol), n_symbols)
    symbol = np.repeat(np.arange(n_symbols), per_symbol)
    close = 5e5 * (symbol + 1) + row
    times = (row * 60_000_000_000 + 1_704_067_200_000_000_000).view("datetime64[ns]")
    return pa.table(
        {
            "symbol": pa.DictionaryArray.from_arrays(
                pa.array(symbol, pa.int32()), [f"SYM{i:03d}" for i in range(n_symbols)]
            ),
            "time": pa.array(times).cast(pa.timestamp("ns", "UTC")),
            "open": close - 0.5,
            "high": close + 1,
            "low": close - 1,
            "close": close,
            "volume": row + 1.0,
        }
    )


def to_host(array: Any) -> npt.NDArray[Any]:
    """A NumPy array of the same values."""
    return array if isinstance(array, np.ndarray) else array.get()


def _epoch(st: Stager) -> tuple[int, float, int]:
    started = time.perf_counter()
    for batch in st.batches(0):
        newest = batch
    to_host(newest.x[-1, -1])
    seconds = time.perf_counter() - started
    seen = np.zeros(st.n_samples, np.int64)
    nbytes = 0
    for batch in st.batches(0):
        ids = batch.sample_ids
        seen[ids] += 1
        x, last = to_host(batch.x), len(batch) - 1
        view = to_host(st.view(0, batch.number, last))
        nbytes += x.nbytes
        # Consecutive rows of one symbol differ by exactly one in the close.
        _check(bool((np.diff(x[:, :, 3], axis=1) == 1).all()), f"batch {batch.number} has a window with a seam")
        _check(np.array_equal(view, x[last]), f"batch {batch.number} is not its view")
    _check(bool((seen == 1).all()), "a sample came twice or not at all")
    return st.n_samples, seconds, nbytes


def _check(right: bool, what: str) -> None:
    if not right:
        raise SmokeError(f"smoke failed: {what}")


def _describe(index: int | None) -> str:
    if index is None:
        return "cpu"
    from stager.cuda.driver import describe

    return f"cuda:{index} {describe(index)}"


def _ceiling(index: int | None) -> float:
    if index is None:
        return 0.0
    from stager.cuda.driver import pinned_copy_gbps

    return pinned_copy_gbps(index)
