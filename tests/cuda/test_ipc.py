"""Sharing device memory, over a driver that has none and notices misuse; and the calls, CuPy's runtime replaced."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402

from stager.cuda import ipc  # noqa: E402
from stager.cuda.ipc import CudaIpc, Handle, Mapping, array_of, device_of, export  # noqa: E402
from stager.errors import DeviceError, StagingError  # noqa: E402

COMPILER = shutil.which("gcc") or shutil.which("clang")
MINE, OTHER = (f"GPU-{uuid.UUID(int=n)}" for n in (1, 2))


class FakeIpc:
    """Implements ``ipc.Driver`` for one process; allocations are (base, bytes)."""

    def __init__(self, uuids=(MINE,), allocations=()):
        self.seen, self.allocations = list(uuids), dict(allocations)
        self.calls, self.opened = [], {}
        self.next_base = 0x7000_0000_0000
        self.fail, self.peers = {}, set()

    def call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.fail:
            raise self.fail[name]

    def uuids(self):
        return self.seen

    def reads(self, device, other):
        return device == other or (device, other) in self.peers

    def synchronize(self, device):
        self.call("synchronize", device)

    def address_range(self, device, ptr):
        self.call("address_range", device, ptr)
        return next((base, size) for base, size in self.allocations.items() if base <= ptr < base + size)

    def get_handle(self, device, ptr):
        self.call("get_handle", device, ptr)
        assert ptr in self.allocations, "a handle names an allocation's start"
        return ptr.to_bytes(64, "little")

    def open_handle(self, device, handle):
        self.call("open_handle", device, handle)
        base, self.next_base = self.next_base, self.next_base + (1 << 30)
        self.opened[base] = device
        return base

    def close_handle(self, device, ptr):
        self.call("close_handle", device, ptr)
        assert self.opened.pop(ptr) == device, "closed twice, or on another device"


def test_a_handle_is_of_the_base_and_says_where_in_it_the_rows_are():
    driver = FakeIpc(allocations={0x10000: 4096})
    handle = export(0x10200, 1024, 0, driver)
    assert handle == Handle(MINE, (0x10000).to_bytes(64, "little"), 0x200, 1024)
    # What was queued, the upload too, has run before anybody gets it.
    assert [call[0] for call in driver.calls] == ["synchronize", "address_range", "get_handle"]


def test_what_is_not_inside_its_allocation_is_refused():
    driver = FakeIpc(allocations={0x10000: 4096})
    assert export(0x10000, 4096, 0, driver).offset == 0
    with pytest.raises(StagingError, match="are not inside the allocation of 4,096 bytes"):
        export(0x10200, 4096, 0, driver)


def test_devices_are_matched_by_uuid(monkeypatch):
    assert device_of(OTHER, FakeIpc([MINE, OTHER])) == 1
    assert device_of(OTHER, FakeIpc([OTHER])) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DeviceError, match=rf"lie on {OTHER}, and this process sees {MINE} \(CUDA_VISIBLE"):
        device_of(OTHER, FakeIpc([MINE]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(DeviceError, match=r"this process sees none; let it see that one"):
        device_of(OTHER, FakeIpc([]))


def test_a_mapping_is_closed_once_after_what_is_queued():
    driver = FakeIpc([OTHER, MINE])
    mapping = Mapping(Handle(MINE, b"h" * 64, 0x200, 1024), driver)
    assert mapping.device == 1
    assert mapping.ptr == 0x7000_0000_0200
    driver.calls.clear()
    mapping.close()
    mapping.close()
    assert driver.calls == [("synchronize", 1), ("close_handle", 1, 0x7000_0000_0000)]
    assert driver.opened == {}


def test_a_gpu_that_failed_does_not_keep_the_mapping_open():
    driver = FakeIpc()
    mapping = Mapping(Handle(MINE, b"h" * 64, 0, 1024), driver)
    driver.fail["synchronize"] = StagingError("the GPU failed")
    with pytest.raises(StagingError, match="the GPU failed"):
        mapping.close()
    assert driver.opened == {}


def test_nothing_stays_open_where_opening_fails():
    driver = FakeIpc()
    driver.fail["open_handle"] = StagingError("no")
    with pytest.raises(StagingError):
        Mapping(Handle(MINE, b"h" * 64, 0, 1024), driver)
    assert driver.opened == {}


def test_memory_is_opened_for_the_gpu_that_reads_it():
    driver = FakeIpc([OTHER, MINE])
    handle = Handle(MINE, b"h" * 64, 0, 1024)
    with pytest.raises(DeviceError, match=r"cuda:0 can't read the memory of cuda:1 \(no peer access\)"):
        Mapping(handle, driver, 0)
    assert driver.calls == []
    driver.peers.add((0, 1))
    mapping = Mapping(handle, driver, 0)
    assert (mapping.device, list(driver.opened.values())) == (0, [0])
    mapping.close()
    assert driver.calls[-2:] == [("synchronize", 0), ("close_handle", 0, mapping.ptr)]


def test_a_forked_child_does_not_close_its_parents_mapping(monkeypatch):
    driver = FakeIpc()
    mapping = Mapping(Handle(MINE, b"h" * 64, 0, 1024), driver)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    mapping.close()
    assert len(driver.opened) == 1


def test_the_owner_lives_until_the_last_array_has_died():
    import weakref

    class Owner:
        pass

    owner = Owner()
    died = weakref.ref(owner)
    mapping = Mapping(Handle(MINE, b"h" * 64, 0x200, 400), FakeIpc())
    rows, memory = array_of(mapping, 400, owner, (20, 5), "f4")
    assert rows.data.ptr == mapping.ptr
    assert rows.shape == (20, 5)
    del owner, memory
    view = rows[3:5]
    del rows
    assert died() is not None
    del view
    assert died() is None


# ------------------------------------------------------------------------------ the calls


class Runtime:
    CUDARuntimeError = runtime.CUDARuntimeError

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            told = {"ipcGetMemHandle": b"h" * 64, "ipcOpenMemHandle": 0x7000, "deviceCanAccessPeer": 1}
            return told.get(name)

        return call


# libcuda with two devices and one allocation far above 4 GiB; it tells nothing before cuInit. Prototypes as in cuda.h.
LIBRARY = """
#include <stddef.h>
static int status, ready;
void set_status(int value) { status = value; ready = 0; }
int cuInit(unsigned int flags) { ready = !status && !flags; return status; }
int cuDeviceGetCount(int *count) { *count = 2; return ready ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return ready && ordinal < 2 ? 0 : 101; }
int cuDeviceGetUuid_v2(char *uuid, int device) {
    for (int k = 0; k < 15; ++k) uuid[k] = 0;
    uuid[15] = device - 9;
    return ready && device >= 10 && device < 12 ? 0 : 101;
}
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long ptr) {
    *base = 0x7f0000005000, *size = 0x300000000;
    return ptr >= *base && ptr - *base < *size ? 0 : 1;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C compiler")
    source = tmp_path_factory.mktemp("driver") / "cuda.c"
    source.write_text(LIBRARY)
    made = source.with_suffix(".so")
    subprocess.run([COMPILER, "-shared", "-fPIC", source, "-o", made], check=True)
    return made


def failing(status):
    def fail(*_):
        raise runtime.CUDARuntimeError(status)

    return fail


@pytest.fixture
def fake(monkeypatch, library):
    made = Runtime()
    monkeypatch.setattr(ipc, "runtime", made)
    monkeypatch.setattr(ipc, "_LIBRARY", str(library))
    monkeypatch.setattr(ipc, "relaxed", contextlib.nullcontext)
    monkeypatch.setattr(ipc.cupy.cuda, "Device", lambda device: contextlib.nullcontext())
    return made


def test_the_calls_are_those_of_the_runtime(fake):
    one = CudaIpc()
    assert one.uuids() == [MINE, OTHER]
    assert one.get_handle(0, 0x5000) == b"h" * 64
    assert one.open_handle(0, b"h" * 64) == 0x7000
    one.synchronize(0)
    one.close_handle(0, 0x7000)
    assert one.reads(1, 1)
    assert one.reads(0, 1) is True
    assert fake.calls == [
        ("ipcGetMemHandle", 0x5000),
        ("ipcOpenMemHandle", b"h" * 64),
        ("deviceSynchronize",),
        ("ipcCloseMemHandle", 0x7000),
        ("deviceCanAccessPeer", 0, 1),
    ]


def test_failures_of_the_driver_say_what_to_do(fake):
    one = CudaIpc()
    fake.ipcGetMemHandle = failing(1)
    with pytest.raises(StagingError, match="only memory of cudaMalloc can be shared"):
        one.get_handle(0, 1)
    fake.ipcOpenMemHandle = failing(201)
    with pytest.raises(StagingError, match="both need one PID and one IPC namespace"):
        one.open_handle(0, b"h" * 64)
    fake.ipcOpenMemHandle = failing(719)
    with pytest.raises(StagingError, match="the GPU failed"):
        one.open_handle(0, b"h" * 64)
    fake.ipcCloseMemHandle = failing(1)
    with pytest.raises(StagingError, match="failed to close"):
        one.close_handle(0, 1)
    fake.deviceSynchronize = failing(700)
    with pytest.raises(StagingError, match="the GPU failed"):
        one.synchronize(0)


def test_the_driver_itself_tells_uuids_and_allocations(fake, library):
    one = CudaIpc()
    assert one.address_range(0, 0x7F0000005200) == (0x7F0000005000, 0x300000000)
    assert fake.calls == [("free", 0)]
    with pytest.raises(StagingError, match=r"knows no allocation at 0x5200 \(CUDA error 1\)"):
        one.address_range(0, 0x5200)
    ctypes.CDLL(str(library)).set_status(100)
    with pytest.raises(DeviceError, match=r"does not tell which GPUs there are \(CUDA error 100\)"):
        one.uuids()
    ctypes.CDLL(str(library)).set_status(0)
    assert one.uuids() == [MINE, OTHER]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a driver")
def test_without_a_driver_the_error_says_so():
    with pytest.raises(DeviceError, match=r"libcuda.so.1\) is missing"):
        CudaIpc().uuids()
