"""Rows as other processes get them: a file to map, or a handle of device memory; and how these are checked."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from stager.batches.resident import Resident
from stager.errors import ServiceError
from stager.service.protocol import DeviceHandle, Probe

_N_PROBES = 16
_PROBE_VALUES = 1024


def probes_of(rows: Any) -> list[Probe]:
    """Hashes of some stretches of the rows, the first and the last among them."""
    count = min(_PROBE_VALUES, rows.size)
    firsts = np.linspace(0, rows.size - count, _N_PROBES).astype(np.int64)
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
                f"the rows of {name!r} differ from those that the service staged, at value {probe.first:,}; somebody "
                f"wrote into them. `stager verify --resident` looks at all of them; stage the pack again"
            )


def export_rows(resident: Resident) -> DeviceHandle | None:
    """A handle of rows on a GPU; None on the CPU, where a client maps the file."""
    if resident.device.index is None:
        return None
    from stager.cuda import ipc

    handle = ipc.export(resident.rows.data.ptr, resident.nbytes, resident.device.index, ipc.CudaIpc())
    return DeviceHandle(handle.uuid, handle.handle, handle.offset, handle.nbytes)


def load_table(values: Any, device: int, stall_timeout: float) -> tuple[Any, DeviceHandle]:
    """A table on a GPU, in memory of its own, and a handle of it."""
    from stager.cuda import ipc, tables

    array = tables.load(values, device, stall_timeout)
    handle = ipc.export(array.data.ptr, array.nbytes, device, ipc.CudaIpc())
    return array, DeviceHandle(handle.uuid, handle.handle, handle.offset, handle.nbytes)


def on_host(values: Any) -> Any:
    """A copy on the host of a device array; a NumPy array as it is."""
    return values if isinstance(values, np.ndarray) else values.get()


def _digest(rows: Any, first: int, count: int) -> str:
    some = on_host(rows.reshape(-1)[first : first + count])
    return hashlib.blake2b(np.ascontiguousarray(some).data, digest_size=16).hexdigest()
