"""Attaching to device memory, with a driver that has none: what is opened, checked and closed, and in which order."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
from service_fixtures import serving, until

cupy = pytest.importorskip("cupy")

from stager import attach  # noqa: E402
from stager.batches.devices import Device  # noqa: E402
from stager.cuda import ipc, kernels  # noqa: E402
from stager.errors import DeviceError, ServiceError, StagingError  # noqa: E402
from stager.service import attached, client, holdings, sharing  # noqa: E402
from stager.service.protocol import DeviceHandle  # noqa: E402

GPU = "GPU-00000000-0000-0000-0000-000000000007"


class Driver:
    """Of a client: the service's memory is host memory at the address that the handle holds."""

    log: list[str] = []  # noqa: RUF012
    seen = (GPU,)
    error: Exception | None = None

    def uuids(self):
        return list(self.seen)

    def synchronize(self, device):
        self.log.append("synchronize")

    def open_handle(self, device, handle):
        if self.error is not None:
            raise self.error
        self.log.append("open")
        return int.from_bytes(handle[:8], "little")

    def close_handle(self, device, ptr):
        self.log.append("close")


def read(values):
    """Device memory that is host memory."""
    if isinstance(values, np.ndarray):
        return values
    flat = np.frombuffer(ctypes.string_at(values.data.ptr, values.nbytes), np.float32)
    return flat.reshape(values.shape).copy()


@pytest.fixture
def on_gpu(run_dir, pack_path, monkeypatch):
    """A service that says that its rows are on a GPU, and clients that believe it."""

    def export(resident):
        ptr = resident.rows.ctypes.data
        return DeviceHandle(GPU, (ptr - 512).to_bytes(64, "little"), 512, resident.nbytes)

    driver = type("OneDriver", (Driver,), {"log": []})
    monkeypatch.setattr(holdings, "export_rows", export)
    monkeypatch.setattr(sharing, "on_host", read)
    monkeypatch.setattr(client, "count_devices", lambda: 1)
    monkeypatch.setattr(attached, "check_cuda", lambda device: None)
    monkeypatch.setattr(ipc, "CudaIpc", driver)
    monkeypatch.setattr(kernels, "compiled", lambda device: {})
    with serving(run_dir, pack_path) as service:
        real = service.answer
        monkeypatch.setattr(
            service, "answer", lambda request: (driver.log.append(type(request).__name__), real(request))[1]
        )
        service.driver = driver
        yield service


def test_rows_are_where_the_service_has_them_and_are_let_go_in_order(on_gpu):
    resident = attach("prices", socket=on_gpu.place.path)
    own = on_gpu.holdings.current("prices").resident.rows
    assert resident.rows.data.ptr == own.ctypes.data
    assert resident.rows.shape == own.shape
    assert resident.rows.dtype == np.float32
    assert (str(resident.device), resident.placement, resident.path) == ("cuda:0", "device", "attached")
    assert on_gpu.driver.log == ["Attach", "open"]
    assert not next(iter(on_gpu._attachments.values())).on_cpu
    resident.close()
    # Closed before anybody is told, and after what was queued.
    assert on_gpu.driver.log == ["Attach", "open", "synchronize", "close", "Detach"]
    assert on_gpu.n_clients == 0


def test_a_view_keeps_the_memory_open(on_gpu):
    resident = attach("prices", socket=on_gpu.place.path)
    view = resident.rows[3:9]
    with pytest.warns(ResourceWarning, match="views of the closed rows"):
        resident.close()
    assert on_gpu.driver.log == ["Attach", "open"]
    assert on_gpu.n_clients == 1
    del view
    gc.collect()
    until(lambda: on_gpu.n_clients == 0)
    assert on_gpu.driver.log[2:] == ["synchronize", "close", "Detach"]


def test_wrong_values_are_refused_and_nothing_stays_open(on_gpu, monkeypatch):
    monkeypatch.setattr(sharing, "on_host", lambda values: np.zeros(values.size, np.float32))
    with pytest.raises(ServiceError, match="differ from those that the service staged, at value 0"):
        attach("prices", socket=on_gpu.place.path)
    assert on_gpu.driver.log == ["Attach", "open", "synchronize", "close", "Detach"]
    assert on_gpu.n_clients == 0


def test_another_gpu_is_refused(on_gpu, monkeypatch):
    monkeypatch.setattr(on_gpu.driver, "seen", ("11111111-0000-0000-0000-000000000007",))
    with pytest.raises(DeviceError, match=f"the rows lie on {GPU}"):
        attach("prices", socket=on_gpu.place.path)
    assert on_gpu.driver.log == ["Attach", "Detach"]
    assert on_gpu.n_clients == 0


def test_memory_that_does_not_open_is_let_go(on_gpu, monkeypatch):
    monkeypatch.setattr(on_gpu.driver, "error", StagingError("the driver does not open it"))
    with pytest.raises(StagingError, match="does not open"):
        attach("prices", socket=on_gpu.place.path)
    assert on_gpu.n_clients == 0


def test_where_closing_fails_the_service_keeps_the_memory(on_gpu, monkeypatch, caplog):
    resident = attach("prices", socket=on_gpu.place.path)

    def fail(self, device, ptr):
        raise StagingError("the driver failed to close shared memory")

    monkeypatch.setattr(on_gpu.driver, "close_handle", fail)
    resident.close()
    until(lambda: "the rows could not be let go" in caplog.text)
    until(lambda: [one.state for one in on_gpu.stats().clients] == ["cut off"])
    (one,) = on_gpu._attachments.values()
    assert not one.has_ended


def test_without_a_gpu_the_file_is_mapped(on_gpu, monkeypatch):
    with attach("prices", socket=on_gpu.place.path, device="cpu") as resident:
        assert resident.path == "attached, mapped"
        assert next(iter(on_gpu._attachments.values())).on_cpu
    monkeypatch.setattr(client, "count_devices", lambda: 0)
    with attach("prices", socket=on_gpu.place.path) as resident:
        assert resident.path == "attached, mapped"
    assert "open" not in on_gpu.driver.log


def test_what_somebody_wrote_into_shared_rows_is_found(on_gpu, monkeypatch):
    from stager.service import checking

    monkeypatch.setattr(checking, "on_host", read)
    assert checking.verify_resident("prices", on_gpu.place.path) == []

    def damaged(values):
        rows = read(values).reshape(values.shape)
        rows[1234:1237, 2] += 1
        return rows

    monkeypatch.setattr(checking, "on_host", damaged)
    (finding,) = checking.verify_resident("prices", on_gpu.place.path)
    assert finding.startswith("prices: 3 rows differ from ")
    assert "from row 1,234 to 1,236; release it and stage it again" in finding


BIG = np.arange(1 << 19, dtype=np.float32).reshape(-1, 2)


@pytest.fixture
def loaded(on_gpu, monkeypatch):
    """What the service brought to its GPU, which is host memory here."""
    from stager.service import service as module

    made = []

    def load(values, device, timeout):
        values = values.copy()
        made.append(values)
        handle = DeviceHandle(GPU, (values.ctypes.data - 512).to_bytes(64, "little"), 512, values.nbytes)
        return values, handle

    monkeypatch.setattr(module, "load_table", load)
    # The rows of a service of the tests are on the CPU, and count as those of a GPU here.
    real = on_gpu.holdings.current("prices").resident
    monkeypatch.setattr(real, "device", Device(0, "said so"))
    return made


def test_equal_tables_are_one_on_the_gpu_too(on_gpu, loaded):
    residents = [attach("prices", socket=on_gpu.place.path) for _ in range(3)]
    tables = []
    for resident in residents:
        kept = resident.shared(BIG)
        assert kept is not BIG
        tables.append(resident._hold.share_on_device(kept))
    assert len(loaded) == 1
    assert {table.data.ptr for table in tables} == {loaded[0].ctypes.data}
    assert tables[0].shape == BIG.shape
    assert np.array_equal(read(tables[0]), BIG)
    assert on_gpu.stats().table_nbytes == 2 * BIG.nbytes
    # What was not shared on the host is not on the GPU either.
    assert residents[0]._hold.share_on_device(BIG) is None
    on_gpu.driver.log.clear()
    # A table keeps everything open, as a view of the rows would.
    residents[0].close()
    assert on_gpu.driver.log == []
    assert on_gpu.n_clients == 3
    tables[0] = None
    until(lambda: on_gpu.n_clients == 2)
    assert on_gpu.driver.log == ["synchronize", "close", "synchronize", "close", "Detach"]
    for k in (1, 2):
        tables[k] = None
        residents[k].close()
    assert on_gpu.stats().table_nbytes == 0


def test_a_table_that_is_wrong_on_the_gpu_is_not_used(on_gpu, loaded, caplog):
    resident = attach("prices", socket=on_gpu.place.path)
    kept = resident.shared(BIG)
    array = resident._hold.share_on_device(kept)
    loaded[0][:] += 1
    assert array is not None
    assert resident._hold.share_on_device(kept) is None
    assert "is another than this process has" in caplog.text
    del array
    resident.close()
    assert on_gpu.n_clients == 0


def test_mapped_clients_get_no_table_on_a_gpu(on_gpu, loaded):
    with attach("prices", socket=on_gpu.place.path, device="cpu") as resident:
        kept = resident.shared(BIG)
        assert resident._hold.share_on_device(kept) is None
    assert loaded == []


class OnHost:
    """Arrays on a device that are host memory."""

    def __init__(self):
        self.held = []

    def __call__(self, table, *_):
        table = np.ascontiguousarray(table)
        self.held.append(table)
        memory = cupy.cuda.UnownedMemory(table.ctypes.data, table.nbytes, self, 0)
        return cupy.ndarray(table.shape, table.dtype, cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("kind", ["prices", "panel"])
def test_every_large_table_of_a_gather_is_asked_of_the_service(monkeypatch, pack_path, kind):
    """Targets, spans and draws, and the mask of a panel; what points into other memory is each client's own."""
    import stager
    from stager.batches import gathers
    from stager.batches.stager import Stager
    from stager.cuda import gather, groups

    source = pack_path if kind == "prices" else stager.panel(pack_path, stager.Panel())
    st = Stager(
        source, window=4, batch_size=8, device="cpu", target=stager.Target(horizon=2), sampling="weighted",
        weights="uniqueness",
    )  # fmt: skip
    index, draws = st._index, st._epochs.draws
    own, asked = OnHost(), []
    brought = OnHost()
    monkeypatch.setattr(gather, "load", own)
    monkeypatch.setattr(gather, "compiled", lambda device: _Any())
    monkeypatch.setattr(groups, "Groups", lambda *arguments: arguments)

    class Resident:
        device = Device(0, "said so")
        stall_timeout, rows = 60.0, brought(np.zeros((1, 1), np.float32))

        def shared(self, table):
            asked.append(table)
            return table

        def on_device(self, table):
            return brought(table)

    gathers.OnGpu(Resident(), index, "float32", None, draws)
    found = [(one.dtype, one.tobytes()) for one in brought.held[1:]]
    for table in (index.y, index.span_ids, index.span_rows, draws.table):
        assert (table.dtype, table.tobytes()) in found
    if kind == "panel":
        mask = np.zeros((len(index.mask), 4), bool)
        mask[:, :2] = index.mask
        assert any(raw == mask.tobytes() for _, raw in found)
        assert [table.nbytes for table in asked] == [mask.nbytes]
    # Addresses, and at most a few words about columns.
    assert all(table.nbytes <= 4096 for table in own.held)
    st.close()


class _Any(dict):
    """Kernels of every name."""

    def __missing__(self, name):
        return name
