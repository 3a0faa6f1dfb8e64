"""Attaching to device memory, with a driver that has none: what is opened, checked and closed, and in which order."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest
from service_fixtures import serving, until

cupy = pytest.importorskip("cupy")

from stager import attach  # noqa: E402
from stager.batches.devices import Device  # noqa: E402
from stager.cuda import ipc, kernels, spread  # noqa: E402
from stager.cuda.gather import where  # noqa: E402
from stager.errors import ConfigError, DeviceError, ServiceError, StagingError  # noqa: E402
from stager.service import attached, client, holdings, sharing  # noqa: E402
from stager.service.protocol import Blocks, DeviceHandle  # noqa: E402

GPU = "GPU-00000000-0000-0000-0000-000000000007"


class Driver:
    """Of a client: the service's memory is host memory at the address that the handle holds."""

    log: list[str] = []  # noqa: RUF012
    seen = (GPU,)
    error: Exception | None = None
    peers = True

    def uuids(self):
        return list(self.seen)

    def reads(self, device, other):
        return self.peers or device == other

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


def handle_of(gpu, values):
    """Of host memory, as if it were a part of an allocation of that GPU."""
    return DeviceHandle(gpu, (values.ctypes.data - 512).to_bytes(64, "little"), 512, values.nbytes)


@pytest.fixture
def on_gpu(run_dir, pack_path, monkeypatch):
    """A service that says that its rows are on a GPU, and clients that believe it."""

    def export(resident):
        return Blocks([handle_of(GPU, resident.rows)], len(resident.rows), 0)

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
    with pytest.raises(ServiceError, match="differ from those that the service staged, at row 0"):
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
        return values, handle_of(GPU, values)

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


# --------------------------------------------------------------- rows in blocks on several GPUs

OTHER = "GPU-00000000-0000-0000-0000-000000000008"
LAYOUT = spread.Layout(5000, 2000, 1500)


@pytest.fixture
def in_blocks(on_gpu, monkeypatch):
    """The service has the rows in blocks, of which the second lies on another GPU, and the third on the first one."""
    held = on_gpu.holdings.current("prices")
    gpus = GPU, OTHER, GPU
    on_gpu.blocks = [held.resident.rows[first:stop].copy() for first, stop in LAYOUT.spans]
    handles = [handle_of(gpu, block) for gpu, block in zip(gpus, on_gpu.blocks, strict=True)]
    held.blocks = Blocks(handles, LAYOUT.base_rows, LAYOUT.halo)
    monkeypatch.setattr(on_gpu.driver, "seen", (GPU, OTHER))
    monkeypatch.setattr(client, "choose_device", lambda text: Device(int(text[-1]), "said so"))
    return on_gpu


@pytest.mark.parametrize(("device", "number"), [("auto", 0), ("cuda:1", 1)])
def test_every_gpu_gathers_from_the_blocks_of_all(in_blocks, device, number):
    resident = attach("prices", socket=in_blocks.place.path, device=device)
    assert (str(resident.device), resident.placement) == (f"cuda:{number}", "spread")
    assert resident.path == "attached, in blocks on cuda:0, cuda:1, cuda:0"
    assert where(resident.rows) == (number, [block.ctypes.data for block in in_blocks.blocks], LAYOUT.base_rows)
    assert (resident.rows.shape, resident.rows.layout) == ((5000, 5), LAYOUT)
    own = in_blocks.holdings.current("prices").resident.rows
    for first, stop in ((0, 3500), (1999, 2003), (4990, 5000)):
        assert np.array_equal(read(resident.rows[first:stop]), own[first:stop])
    assert in_blocks.driver.log == ["Attach", *["open"] * 3]
    in_blocks.driver.log.clear()
    view = resident.rows[4000:4010]
    with pytest.warns(ResourceWarning, match="1 views of the closed rows"):
        resident.close()
    assert in_blocks.driver.log == []
    del view
    gc.collect()
    until(lambda: in_blocks.n_clients == 0)
    assert in_blocks.driver.log == [*["synchronize", "close"] * 3, "Detach"]


def test_how_many_gpus_hold_the_rows_is_told(in_blocks):
    (told,) = in_blocks.stats().packs
    assert (told.device, told.nbytes) == ("3 GPUs", 100_000)
    held = in_blocks.holdings.current("prices")
    held.blocks = Blocks(held.blocks.handles[:1], 5000, 0)
    assert in_blocks.stats().packs[0].device == GPU


def test_one_block_is_read_from_another_gpu_too(on_gpu, monkeypatch):
    monkeypatch.setattr(on_gpu.driver, "seen", (OTHER, GPU))
    monkeypatch.setattr(client, "choose_device", lambda text: Device(int(text[-1]), "said so"))
    with attach("prices", socket=on_gpu.place.path, device="cuda:0") as resident:
        assert (str(resident.device), resident.placement) == ("cuda:0", "spread")
        assert resident.path == "attached, in blocks on cuda:1"
        assert len(resident.rows.blocks) == 1
    with attach("prices", socket=on_gpu.place.path, device="cuda:1") as resident:
        assert (str(resident.device), resident.placement) == ("cuda:1", "device")


def test_without_peer_access_the_clients_are_refused(in_blocks, monkeypatch):
    monkeypatch.setattr(in_blocks.driver, "peers", False)
    with pytest.raises(DeviceError, match=r"cuda:0 can't read the memory of cuda:1 \(no peer access\)"):
        attach("prices", socket=in_blocks.place.path)
    assert in_blocks.driver.log == ["Attach", "open", "synchronize", "close", "Detach"]
    assert in_blocks.n_clients == 0


def test_blocks_of_other_rows_are_refused(in_blocks):
    held = in_blocks.holdings.current("prices")
    held.blocks = Blocks(held.blocks.handles[:2], LAYOUT.base_rows, LAYOUT.halo)
    with pytest.raises(ServiceError, match="the blocks that the service has of 'prices' are not those of its rows"):
        attach("prices", socket=in_blocks.place.path)
    assert in_blocks.driver.log == ["Attach", "Detach"]


def test_tables_are_shared_on_the_first_gpu_alone(in_blocks, loaded):
    for device, n_loaded in (("cuda:1", 0), ("cuda:0", 1)):
        with attach("prices", socket=in_blocks.place.path, device=device) as resident:
            assert (resident._hold.share_on_device(resident.shared(BIG)) is None) == (n_loaded == 0)
            assert len(loaded) == n_loaded


def test_a_service_on_the_cpu_has_nothing_for_a_gpu(service, monkeypatch):
    monkeypatch.setattr(client, "choose_device", lambda text: Device(int(text[-1]), "said so"))
    with pytest.raises(ServiceError, match="holds 'prices' on the CPU, and cuda:3 can't read that"):
        attach("prices", socket=service.place.path, device="cuda:3")
    assert service.n_clients == 0


def test_rows_in_blocks_are_verified_in_all_of_them(in_blocks, monkeypatch):
    from stager.service import checking

    monkeypatch.setattr(checking, "on_host", read)
    monkeypatch.setattr(checking, "_CHUNK_ROWS", 700)
    done = []
    found = checking.verify_resident("prices", in_blocks.place.path, progress=lambda *told: done.append(told))
    assert found == []
    assert done[-1] == ("compare", 5000 * 20, 5000 * 20)
    assert in_blocks.n_clients == 0
    # In what follows the first block, which the second has as well.
    in_blocks.blocks[0][3000, 2] += 1
    (finding,) = checking.verify_resident("prices", in_blocks.place.path)
    assert "1 rows differ" in finding
    assert "from row 3,000 to 3,000;" in finding


def test_each_block_is_given_out(monkeypatch):
    exported = []

    def export(ptr, nbytes, device, driver):
        exported.append((ptr, nbytes, device))
        return ipc.Handle(f"GPU-{device}", b"h", 0, nbytes)

    monkeypatch.setattr(ipc, "export", export)
    blocks = [
        SimpleNamespace(
            shape=(stop - first, 5), nbytes=20 * (stop - first), data=SimpleNamespace(ptr=first, device_id=k)
        )
        for k, (first, stop) in enumerate(LAYOUT.spans)
    ]
    rows = spread.SpreadRows(LAYOUT, blocks, 0)
    told = sharing.export_rows(SimpleNamespace(device=Device(0, ""), placement="spread", rows=rows))
    assert exported == [(0, 70_000, 0), (2000, 60_000, 1), (4000, 20_000, 2)]
    assert [one.uuid for one in told.handles] == ["GPU-0", "GPU-1", "GPU-2"]
    assert (told.base_rows, told.halo) == (2000, 1500)
    assert sharing.export_rows(SimpleNamespace(device=Device(None, ""))) is None


@pytest.mark.parametrize(
    ("on_cpu", "asked", "placement"),
    [(True, "device", "auto"), (True, "spread", "spread"), (False, "device", "device"), (False, "spread", "spread")],
)
def test_the_service_stages_as_it_was_told(pack_path, monkeypatch, on_cpu, asked, placement):
    told = []

    def stage_as(pack, options, progress):
        told.append(options.placement)
        raise StagingError("enough")

    monkeypatch.setattr(holdings, "stage_as", stage_as)
    monkeypatch.setattr(holdings, "choose_device", lambda device: Device(None if on_cpu else 0, ""))
    with pytest.raises(StagingError, match="enough"):
        holdings.Holdings("auto", asked).add("prices", pack_path)
    assert told == [placement]


def test_blocks_without_gpus_are_refused(pack_path):
    with pytest.raises(ConfigError, match="placement='spread' needs a GPU"):
        holdings.Holdings("cpu", "spread").add("prices", pack_path)
