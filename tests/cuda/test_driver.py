"""The driver calls of staging and the compilation, with CuPy's runtime replaced."""

from __future__ import annotations

import contextlib

import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402

from stager.cuda import driver, kernels, order  # noqa: E402
from stager.cuda.driver import CudaDriver, CudaLane, check_device  # noqa: E402
from stager.cuda.ring import RegistrationRefused  # noqa: E402
from stager.errors import DeviceError, StagingError, StagingMemoryError  # noqa: E402


def failing(status):
    def fail(*_):
        raise runtime.CUDARuntimeError(status)

    return fail


class Runtime:
    """Stands in for CuPy's runtime module in the driver."""

    CUDARuntimeError = runtime.CUDARuntimeError
    cudaDevAttrHostRegisterReadOnlySupported = 1
    cudaDevAttrIntegrated = 2
    cudaDevAttrPageableMemoryAccessUsesHostPageTables = 3
    memcpyHostToDevice = 1

    def __init__(self):
        self.attributes = {1: 1, 2: 0, 3: 0}
        self.calls = []

    def deviceGetAttribute(self, attribute, device):
        return self.attributes[attribute]

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def fake(monkeypatch):
    fake = Runtime()
    monkeypatch.setattr(driver, "runtime", fake)
    monkeypatch.setattr(driver, "relax_capture", lambda: None)
    monkeypatch.setattr(driver, "relaxed", contextlib.nullcontext)
    monkeypatch.setattr(driver.cupy.cuda, "Device", lambda device: contextlib.nullcontext())
    return fake


def test_memory_is_registered_read_only_where_the_source_is(fake):
    CudaDriver(0).register(4096, 8192, True)
    CudaDriver(0).register(4096, 8192, False)
    assert fake.calls == [("hostRegister", 4096, 8192, 0x09), ("hostRegister", 4096, 8192, 0x01)]


def test_a_device_without_read_only_registration_refuses(fake):
    fake.attributes[1] = 0
    with pytest.raises(RegistrationRefused, match="read-only"):
        CudaDriver(0).register(4096, 8192, True)
    assert fake.calls == []


@pytest.mark.parametrize("status", [1, 2, 304, 712, 800, 801])
def test_a_refusal_is_no_failure(fake, status):
    fake.hostRegister = failing(status)
    with pytest.raises(RegistrationRefused):
        CudaDriver(0).register(4096, 8192, False)


@pytest.mark.parametrize("status", [700, 719, 999])
def test_failures_are_staging_errors(fake, monkeypatch, status):
    fake.hostRegister = fake.hostUnregister = fake.deviceSynchronize = failing(status)
    one = CudaDriver(0)
    for call in (lambda: one.register(4096, 8192, False), lambda: one.unregister(4096), one.synchronize):
        with pytest.raises(StagingError, match=r"failed"):
            call()
    monkeypatch.setattr(driver.cupy.cuda, "Memory", failing(status))
    with pytest.raises(StagingError, match="could not allocate 5 bytes"):
        one.allocate(5)
    assert one.n_allocations == 0


def test_an_allocation_without_memory_is_a_memory_error(fake, monkeypatch):
    monkeypatch.setattr(driver.cupy.cuda, "Memory", failing(2))
    with pytest.raises(MemoryError) as caught:
        CudaDriver(0).allocate(5)
    assert not isinstance(caught.value, StagingMemoryError)


def test_allocations_are_counted(fake, monkeypatch):
    monkeypatch.setattr(driver.cupy.cuda, "Memory", lambda nbytes: ("memory", nbytes))
    one = CudaDriver(0)
    # The kernels' loads take whole 16 bytes, the last one of a memory too.
    assert [one.allocate(nbytes) for nbytes in (7, 16, 17)] == [("memory", 16), ("memory", 16), ("memory", 32)]
    assert one.n_allocations == 3


def test_large_allocations_are_whole_pages(fake, monkeypatch):
    # Other processes read memory of any other size many times slower.
    monkeypatch.setattr(driver.cupy.cuda, "Memory", lambda nbytes: nbytes)
    page = 2 << 20
    assert [CudaDriver(0).allocate(nbytes) for nbytes in (page - 1, page, page + 1, 3 * page)] == [
        page, page, 2 * page, 3 * page,
    ]  # fmt: skip


def test_one_memory_for_both_is_noticed(fake):
    assert not CudaDriver(0).shares_memory
    fake.attributes[2] = 1
    assert CudaDriver(0).shares_memory
    fake.attributes.update({2: 0, 3: 1})
    assert CudaDriver(0).shares_memory


def test_a_copy_that_fails_is_a_staging_error(fake):
    class Event:
        def synchronize(self):
            raise runtime.CUDARuntimeError(700)

    lane = CudaLane.__new__(CudaLane)
    lane._stream = type("Stream", (), {"ptr": 7})()
    lane._events = [Event(), Event()]
    fake.memcpyAsync = failing(1)
    with pytest.raises(StagingError, match="the copy of 4,096 bytes to the GPU failed"):
        lane.copy(1, 2, 4096, 0)
    with pytest.raises(StagingError, match="a copy to the GPU failed"):
        lane.wait(1)


def test_a_device_that_is_not_there_is_told(fake):
    fake.getDeviceCount = lambda: 2
    check_device(1)
    with pytest.raises(DeviceError, match=r"no device cuda:2; this machine has 2"):
        check_device(2)
    fake.getDeviceCount = failing(35)
    with pytest.raises(DeviceError, match="does not answer"):
        check_device(0)


@pytest.mark.parametrize("error", [
    ImportError("libnvrtc.so.12: cannot open shared object file"),
    OSError("libnvrtc.so.13: cannot open"),
    RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: not found"),
])  # fmt: skip
def test_missing_nvrtc_has_its_own_error(fake, monkeypatch, error):
    def compile_source(**_):
        raise error

    monkeypatch.setattr(kernels.cupy, "RawModule", compile_source)
    monkeypatch.setattr(kernels, "_kernels", {})
    with pytest.raises(DeviceError, match=r"NVRTC.*can't be loaded.*pip install 'stager\[cuda12\]'") as caught:
        kernels.compiled(0)
    assert caught.value.__cause__ is error
    assert kernels._kernels == {}


def test_another_error_of_the_compilation_is_not_called_nvrtc(fake, monkeypatch):
    def compile_source(**_):
        raise RuntimeError("something else")

    monkeypatch.setattr(kernels.cupy, "RawModule", compile_source)
    monkeypatch.setattr(kernels, "_kernels", {})
    with pytest.raises(RuntimeError, match="something else"):
        kernels.compiled(0)


def test_kernels_are_compiled_once_a_device(fake, monkeypatch):
    made = []

    class Module:
        def __init__(self, **options):
            made.append(options)

        def get_function(self, name):
            return name

    monkeypatch.setattr(kernels.cupy, "RawModule", Module)
    monkeypatch.setattr(kernels, "_kernels", {})
    assert kernels.compiled(0)["resolve"] == "resolve"
    assert kernels.compiled(0) is kernels.compiled(0)
    kernels.compiled(1)
    assert len(made) == 2
    assert 'extern "C" __global__ void resolve' in made[0]["code"]


def test_the_parameters_mirror_the_structs():
    """Those of the kernels by the rules of C: a field lies at a multiple of its size."""
    sizes = {"<i8": 8, "<u8": 8, "<f8": 8, "<i4": 4, "<u4": 4}
    for table in (
        order.NETWORK,
        order.ORDER,
        kernels.COLUMN,
        kernels.WINDOWS,
        kernels.CURSOR,
        kernels.SAMPLES,
        kernels.NEXT,
    ):
        for name, (kind, offset, *_) in table.fields.items():
            base = kind.base
            assert offset % (8 if base.fields else sizes[base.str]) == 0, name
        assert table.itemsize % 8 == 0
        ends = [offset + kind.itemsize for kind, offset, *_ in table.fields.values()]
        assert sorted(ends)[-1] == table.itemsize, "no hidden bytes at the end"
    assert order.NETWORK.itemsize == 152
    assert order.ORDER.itemsize == 552
