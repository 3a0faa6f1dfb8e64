"""What ``stager bench`` measured, as a table and as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stager.batches.stats import ServingStats
from stager.config import format_nbytes


@dataclass(frozen=True)
class Rate:
    """What a loop did in a second: samples, or bytes; the median of some rounds.

    Attributes
    ----------
    median, least, most : float
    n_rounds : int
    """

    median: float
    least: float
    most: float
    n_rounds: int

    def __str__(self) -> str:
        spread = f"{_short(self.least)} to {_short(self.most)}, {self.n_rounds} round{'s' * (self.n_rounds > 1)}"
        return f"{_short(self.median)} samples/s ({spread})"


@dataclass(frozen=True)
class BenchReport:
    """What was measured. Rates are in samples a second; GB are 10^9 bytes.

    Attributes
    ----------
    device, placement, path : str
        Where the rows lie, and how they came there.
    to : str
        What batches are handed out as.
    batch_size, n_samples, n_batches : int
        Of a batch, and of an epoch.
    sample_nbytes : float
        Bytes of x, y and mask that a sample has.
    rows_nbytes : int
    open_seconds : float
        Opening the pack, or reading the bar file; what the configuration derives included.
    stage_seconds : float
        Staging: what a user waits for. On a GPU with the start of CUDA and the kernels.
    transfer_seconds : float
        The part of it in which rows came to their place; 0 where they were mapped.
    find_seconds : float
        From staged rows to a Stager: finding the samples, and their tables.
    first_batch_seconds : float
        From there to the first batch.
    copy_gbps : float
        Ceiling: bytes written by a plain copy, of NumPy on the host, on the device on a GPU.
    bus_gbps : float
        Ceiling: a pinned copy to the GPU; 0 on the host.
    loader : Rate
        Batches in a Python loop that does nothing with them.
    loader_reusing : Rate or None
        The same with ``reuse=True``; on a GPU, to CuPy.
    step_name : str or None
    step : Rate or None
        The training step alone, on one batch again and again.
    training : Rate or None
        Loader and step together.
    stats : ServingStats
        Of `training`; without a step, of `loader`.
    """

    device: str
    placement: str
    path: str
    to: str
    batch_size: int
    n_samples: int
    n_batches: int
    sample_nbytes: float
    rows_nbytes: int
    open_seconds: float
    stage_seconds: float
    transfer_seconds: float
    find_seconds: float
    first_batch_seconds: float
    copy_gbps: float
    bus_gbps: float
    loader: Rate
    loader_reusing: Rate | None
    step_name: str | None
    step: Rate | None
    training: Rate | None
    stats: ServingStats

    @property
    def bound(self) -> Literal["step", "loader"] | None:
        """What bounds the training: the loader, where it is slower than the step alone or takes most of the time, as
        it may where both share the processor; None without a step."""
        if self.step is None or self.loader_share is None:
            return None
        return "loader" if self.loader.median < self.step.median or self.loader_share > 0.5 else "step"

    @property
    def loader_share(self) -> float | None:
        """Share of the training's time that it takes longer than its steps alone; None without a step."""
        if self.step is None or self.training is None:
            return None
        return max(0.0, 1 - self.training.median / self.step.median)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            **asdict(self),
            "loader_gbps": self._gbps(self.loader),
            "loader_reusing_gbps": None if self.loader_reusing is None else self._gbps(self.loader_reusing),
            "bound": self.bound,
            "loader_share": self.loader_share,
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """The table."""
        yield "opened", f"in {self.open_seconds:.3g} s"
        rows = f"{format_nbytes(self.rows_nbytes)} in {self.stage_seconds:.3g} s ({self.path})"
        if self.transfer_seconds:
            gbps = self.rows_nbytes / self.transfer_seconds / 1e9
            rows += f", of which the transfer {self.transfer_seconds:.3g} s, {gbps:.1f} GB/s"
            rows += f", {gbps / self.bus_gbps:.0%} of the pinned copy" if self.bus_gbps else ""
        yield "staged", rows
        yield "samples", f"{self.n_samples:,}, found in {self.find_seconds:.3g} s"
        yield "first batch", f"{1e3 * self.first_batch_seconds:.3g} ms later"
        yield "batches", f"{self.n_batches:,} of {self.batch_size:,} an epoch, to {self.to}"
        yield "loader", self._loader(self.loader)
        if self.loader_reusing is not None:
            yield "loader, reuse", self._loader(self.loader_reusing)
        yield "copy", f"{self.copy_gbps:.1f} GB/s written, {'on the device' if self.bus_gbps else 'by NumPy'}"
        if self.bus_gbps:
            yield "pinned copy", f"{self.bus_gbps:.1f} GB/s over the bus"
        if self.step is not None and self.training is not None:
            yield "step", f"{self.step}, {self.step_name} alone on one batch"
            yield "training", f"{self.training}, loader and step"
            yield "bound", self._verdict(self.step, self.training)
        yield from self.stats.lines()

    def _gbps(self, rate: Rate) -> float:
        return rate.median * self.sample_nbytes / 1e9

    def _loader(self, rate: Rate) -> str:
        over_bus = self.bus_gbps and self.placement == "host"
        ceiling, name = (self.bus_gbps, "pinned copy") if over_bus else (self.copy_gbps, "copy")
        return f"{rate}, {self._gbps(rate):.1f} GB/s, {self._gbps(rate) / ceiling:.0%} of the {name}"

    def _verdict(self, step: Rate, training: Rate) -> str:
        other, rate = ("loader", self.loader) if self.bound == "step" else ("step", step)
        return (
            f"by the {self.bound}: the loader takes {self.loader_share:.0%} of the time; the {other} alone does "
            f"{rate.median / training.median:.1f} times as many samples"
        )


def _short(number: float) -> str:
    """12.3 M; three digits."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
