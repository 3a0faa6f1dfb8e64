"""What the loader can do on this machine, what it is bound by, and what a training step leaves it to do."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from stager.batches.batch import Batch
from stager.batches.bench_report import BenchReport, Rate
from stager.batches.configured import read_configuration
from stager.batches.frameworks import Framework, check_framework, hand_out
from stager.batches.resident import PackSource, Resident, StagingOptions, as_pack, stage_as, staging_options
from stager.batches.stager import Stager
from stager.batches.stats import ServingStats
from stager.batches.training_step import TrainingStep
from stager.errors import ConfigError
from stager.packs.layout import Pack

# Of a Stager without a configuration: as in the README.
WINDOW, BATCH_SIZE = 64, 256
_ROUNDS = 5
_MOST_COPIED_NBYTES = 1 << 28

Progress = Callable[[str, int, int], None]


def bench(
    source: PackSource,
    *,
    config: str | Path | None = None,
    seconds: float = 5.0,
    to: Framework | None = None,
    step: Callable[[Batch], Any] | None = None,
    window: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure staging, the first batch, the loader, the ceilings of this machine, and a training step.

    Parameters
    ----------
    source : path, Pack, pyarrow.Table or data frame
    config : str or Path, optional
        As in :meth:`stager.Stager.from_config`; its own source is not used. Without one, all windows are served.
    seconds : float
        For all loops together; a step of which few fit in takes longer.
    to : {"torch", "jax", "numpy"}, optional
        As of :meth:`stager.Stager.batches`.
    step : callable, optional
        Called with each batch.
    window, batch_size, device : optional
        In the place of what the configuration says; without one, 64, 256 and "auto".
    progress : callable(phase, done_nbytes, total_nbytes), optional

    Raises
    ------
    ConfigError, SampleError, BarsError, PackError, DeviceError, StagingError
    StepError
        If the step raises.
    """
    if isinstance(seconds, bool) or not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise ConfigError(f"seconds is {seconds!r}; it must be a positive number")
    check_framework(to)
    called = step if step is None or isinstance(step, TrainingStep) else TrainingStep(step)
    started = time.perf_counter()
    pack, staging, arguments = _told(source, config, window, batch_size, device, progress)
    opened = time.perf_counter()
    with stage_as(pack, staging, progress) as resident:
        staged = time.perf_counter()
        with Stager(resident, **arguments) as st:
            found = time.perf_counter()
            return _measured(st, resident, seconds, to, called, (opened - started, staged - opened, found - staged))


def _told(
    source: PackSource,
    config: str | Path | None,
    window: int | None,
    batch_size: int | None,
    device: str | None,
    progress: Progress | None,
) -> tuple[Pack, StagingOptions, dict[str, Any]]:
    if config is None:
        sizes = {
            "window": WINDOW if window is None else window,
            "batch_size": BATCH_SIZE if batch_size is None else batch_size,
        }
        return as_pack(source, progress), staging_options("auto" if device is None else device), sizes
    asked = {"window": window, "batch_size": batch_size, "device": device}
    told = read_configuration(config, {"source": source, **asked})
    assert told.staging is not None
    return as_pack(told.prepared(), progress), told.staging, told.arguments


def _measured(
    st: Stager,
    resident: Resident,
    seconds: float,
    to: Framework | None,
    step: TrainingStep | None,
    setting_up: tuple[float, float, float],
) -> BenchReport:
    wait, settle = _waits(resident.device.index, to)
    started = time.perf_counter()
    batch = next(st.batches(0, to=to))
    wait()
    first_batch_seconds = time.perf_counter() - started
    served = st.stats()
    sample_nbytes = served.nbytes / served.n_samples
    on_gpu = resident.device.index is not None
    reuses = on_gpu and to is None
    share = seconds / (1 + reuses + (not on_gpu) + 2 * (step is not None))
    if on_gpu:
        copy_gbps, bus_gbps = _ceilings(resident.device.index)
    else:
        copy_gbps, bus_gbps = _host_copy_gbps(int(sample_nbytes * len(batch)), resident.nbytes, share), 0.0
    before = st.stats()
    loader = measure(_Loop(st, to, wait).run, share)
    # The loop is closed by now, and all that it served is counted.
    stats = _since(before, st.stats())
    reusing = measure(_Loop(st, to, wait, reuse=True).run, share) if reuses else None
    alone = training = None
    if step is not None:
        alone = measure(_alone(step, batch, settle), share)
    # What is kept holds its group.
    del batch
    if step is not None:
        before = st.stats()
        training = measure(_Loop(st, to, settle, step).run, share)
        stats = _since(before, st.stats())
    return BenchReport(
        _describe(resident), resident.placement, resident.path, to or ("cupy" if on_gpu else "numpy"), st.batch_size,
        st.n_samples, len(st), sample_nbytes, resident.nbytes, *setting_up[:2], resident.seconds, setting_up[2],
        first_batch_seconds, copy_gbps, bus_gbps, loader, reusing, None if step is None else step.name, alone, training,
        stats,
    )  # fmt: skip


def measure(run: Callable[[int], float], seconds: float) -> Rate:
    """How much a loop does in a second.

    Parameters
    ----------
    run : callable
        ``run(n)`` goes through a loop n times, waits for the end of it, and tells how much it did.
    seconds : float
        For rounds of about the same time; one that is longer is the only one.
    """
    # What is done once, such as compiling.
    run(1)
    deadline, planned, n = time.perf_counter() + seconds, seconds / (_ROUNDS + 1), 1
    rates: list[float] = []
    while len(rates) < _ROUNDS and (not rates or time.perf_counter() < deadline):
        started = time.perf_counter()
        amount = run(n)
        took = time.perf_counter() - started
        if took >= planned / 2:
            rates.append(amount / took)
        else:
            n = math.ceil(n * min(16.0, planned / max(took, 1e-9)))
    return Rate(statistics.median(rates), min(rates), max(rates), len(rates))


class _Loop:
    """Batches one after the other, epoch after epoch; rounds go on where the last one stopped."""

    def __init__(
        self,
        st: Stager,
        to: Framework | None,
        wait: Callable[[Any], None],
        step: TrainingStep | None = None,
        reuse: bool = False,
    ) -> None:
        self._st, self._wait, self._step = st, wait, step
        self._batches = chain.from_iterable(st.batches(epoch, to=to, reuse=reuse) for epoch in count())
        self._n_served = 0

    def run(self, n: int) -> float:
        """Serve n batches; how many samples they had, on average where they are of whole instants."""
        step, result = self._step, None
        if step is None:
            for _ in islice(self._batches, n):
                pass
            # What is still referred to keeps memory from being used again.
            del _
        else:
            for batch in islice(self._batches, n):
                result = step(batch)
            del batch
        self._wait(result)
        before, self._n_served = self._n_served, self._n_served + n
        return self._n_samples(self._n_served) - self._n_samples(before)

    def _n_samples(self, n_batches: int) -> float:
        st = self._st
        n_positions = st.n_samples if st.plan.n_instants is None else st.plan.n_instants
        epochs, batches = divmod(n_batches, len(st))
        whole, part = (n * st.batch_size for n in (len(st), batches))
        if st.last == "keep":
            whole = min(whole, n_positions)
        return (epochs * whole + part) * (st.n_samples / n_positions)


def _alone(step: TrainingStep, batch: Batch, wait: Callable[[Any], None]) -> Callable[[int], int]:
    def run(n: int) -> int:
        result = None
        for _ in range(n):
            result = step(batch)
        wait(result)
        return n * len(batch)

    return run


def _waits(device: int | None, to: Framework | None) -> tuple[Callable[..., None], Callable[[Any], None]]:
    """Waits for the batches that were handed out, and for all that a step has queued and what it returned."""
    if device is None:
        # Imports the framework, which is no part of the first batch.
        hand_out(np.zeros(1, np.float32), to)

        def wait(result: Any = None) -> None:
            pass

        synchronize: Callable[[], None] = wait
    else:
        from stager.cuda.driver import CudaDriver
        from stager.cuda.measuring import consumer_wait

        handed, synchronize = consumer_wait(device, to), CudaDriver(device).synchronize

        def wait(result: Any = None) -> None:
            handed()

    def settle(result: Any) -> None:
        if to == "jax":
            sys.modules["jax"].block_until_ready(result)
        synchronize()

    return wait, settle


def _ceilings(device: int | None) -> tuple[float, float]:
    from stager.cuda.driver import pinned_copy_gbps
    from stager.cuda.measuring import copy_nbytes, device_copy_gbps

    assert device is not None
    return device_copy_gbps(device, copy_nbytes(device)), pinned_copy_gbps(device, copy_nbytes(device))


def _host_copy_gbps(batch_nbytes: int, rows_nbytes: int, seconds: float) -> float:
    """A plain copy of the bytes of a batch, out of as many bytes as the rows have, within bounds."""
    places = max(1, min(rows_nbytes, _MOST_COPIED_NBYTES) // batch_nbytes)
    source = np.ones((places, batch_nbytes), np.uint8)

    def run(n: int) -> int:
        for k in range(n):
            source[k % places].copy()
        return n * batch_nbytes

    return measure(run, seconds).median / 1e9


def _since(before: ServingStats, now: ServingStats) -> ServingStats:
    return ServingStats(*(getattr(now, one.name) - getattr(before, one.name) for one in fields(ServingStats)))


def _describe(resident: Resident) -> str:
    if resident.device.index is None:
        return "cpu"
    from stager.cuda.driver import describe

    return f"{resident.device} {describe(resident.device.index)}"
