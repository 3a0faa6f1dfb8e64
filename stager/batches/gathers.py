"""Which gather serves from some rows."""

from __future__ import annotations

from typing import Any

from stager.batches.host import HostGather
from stager.batches.resident import Resident
from stager.samples.index import SampleIndex


def make_gather(resident: Resident, index: SampleIndex, like: Any = None) -> Any:
    """The gather for the rows' device; on a GPU it shares memory with `like`, one over the same rows."""
    if resident.device.index is None:
        return HostGather(resident.rows, index)
    from stager.cuda.gather import CudaGather

    return CudaGather(resident.rows, index, resident.stall_timeout, like)
