"""Rows as other processes get them: a file to map, or a handle of device memory; and how these are checked."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from stager.batches.resident import Resident
from stager.errors import ServiceError
from stager.service.protocol import Blocks, DeviceHandle, Probe

_N_PROBES = 16
_PROBE_VALUES = 1024


def probes_of(rows: Any) -> list[Probe]:
    """Hashes of some stretches of the rows, the first and the last among them."""
    width = int(np.prod(rows.shape[1:], dtype=np.int64))
    count = min(max(1, _PROBE_VALUES // max(1, width)), len(rows))
    firsts = np.linspace(0, len(rows) - count, _N_PROBES).astype(np.int64)
    return [Probe(int(first), count, _digest(rows, int(first), count)) for first in np.unique(firsts)]


def check_probes(rows: Any, probes: list[Probe], name: str) -> None:
    """Raise unless the rows are those that were probed.

    Raises
    ------
    ServiceError
    """
    for probe in probes:
        if _digest(rows, probe.first, probe.count) != probe.digest:
            raise ServiceError(
                f"the rows of {name!r} differ from those that the service staged, at row {probe.first:,}; somebody "
                f"wrote into them. `stager verify --resident` looks at all of them; stage the pack again"
            )


def export_rows(resident: Resident) -> Blocks | None:
    """Where rows lie on GPUs; None on the CPU, where a client maps the file."""
    if resident.device.index is None:
        return None
    rows = resident.rows
    if resident.placement == "spread":
        return Blocks([_export(block) for block in rows.blocks], rows.layout.base_rows, rows.layout.halo)
    return Blocks([_export(rows)], len(rows), 0)


def _export(array: Any) -> DeviceHandle:
    from stager.cuda import ipc

    handle = ipc.export(array.data.ptr, array.nbytes, array.data.device_id, ipc.CudaIpc())
    return DeviceHandle(handle.uuid, handle.handle, handle.offset, handle.nbytes)


def load_table(values: Any, device: int, stall_timeout: float) -> tuple[Any, DeviceHandle]:
    """A table on a GPU, in memory of its own, and a handle of it."""
    from stager.cuda import tables

    array = tables.load(values, device, stall_timeout)
    return array, _export(array)


def on_host(values: Any) -> Any:
    """A copy on the host of a device array; a NumPy array as it is."""
    return values if isinstance(values, np.ndarray) else values.get()


def _digest(rows: Any, first: int, count: int) -> str:
    some = on_host(rows[first : first + count])
    return hashlib.blake2b(np.ascontiguousarray(some).data, digest_size=16).hexdigest()
