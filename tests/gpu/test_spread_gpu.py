"""Rows over several GPUs of one process: the same batches, from blocks that one GPU reads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
from bars_fixtures import bar_table

import stager
from stager import Stager, Target, stage
from stager.batches.devices import count_devices
from stager.errors import StagingError
from stager.packs.layout import Pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(count_devices() < 2, reason="needs two GPUs")]

OPTIONS: dict[str, Any] = {"window": 48, "target": Target(horizon=3), "batch_size": 512, "seed": 5}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    table = bar_table({"A": range(60_000), "B": range(5000), "C": range(80_000)})
    return stager.pack(table, tmp_path_factory.mktemp("spread") / "bars.pack")


@pytest.fixture(autouse=True)
def _peers() -> None:
    from stager.cuda.driver import CudaDriver

    if not CudaDriver(0).peers():
        pytest.skip("cuda:0 reads no other GPU's memory")


@pytest.mark.parametrize(
    "more", [{}, {"normalize": "last"}, {"dtype": "float16"}, {"shuffle": "time", "batch_size": 20}]
)
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_batches_are_those_of_the_cpu(pack: Pack, more: dict[str, Any], device: str) -> None:
    options = OPTIONS | more
    with stage(pack, device=device, placement="spread") as resident, Stager(resident, **options) as one:
        assert resident.placement == "spread"
        assert ", in blocks on cuda:" in resident.path
        owners = [int(block.device.id) for block in resident.rows.blocks]
        assert owners[0] == int(device[-1])
        assert len(set(owners)) == len(owners) > 1
        with Stager(pack, device="cpu", **options) as other:
            for batch, wanted in zip(one.batches(1), other.batches(1), strict=True):
                np.testing.assert_allclose(batch.x.get(), wanted.x, rtol=5e-7 if more.get("normalize") else 0)
                np.testing.assert_array_equal(batch.y.get(), wanted.y)


def test_a_window_over_the_border_and_views(pack: Pack) -> None:
    with stage(pack, device="cuda:0", placement="spread") as resident:
        border = resident.rows.layout.base_rows
        np.testing.assert_array_equal(
            resident.rows[border - 20 : border + 20].get(), pack.rows[border - 20 : border + 20]
        )
        with pytest.raises(StagingError, match="no view of all of them"):
            resident.rows[0 : len(pack.rows)]
        with Stager(resident, **OPTIONS) as one:
            for sample in range(0, 500, 50):
                view = one.view(2, 3, sample)
                np.testing.assert_array_equal(view.get(), next(iter(one.batches(2, start=3))).x[sample].get())
            del view
    gc.collect()


def test_memory_returns_on_all_gpus(pack: Pack) -> None:
    import cupy

    def free() -> list[int]:
        found = []
        for device in range(count_devices()):
            with cupy.cuda.Device(device):
                found.append(cupy.cuda.runtime.memGetInfo()[0])
        return found

    stage(pack, device="cuda:0", placement="spread").close()
    before = free()
    for _ in range(3):
        stage(pack, device="cuda:0", placement="spread").close()
    assert all(abs(one - other) < 8 << 20 for one, other in zip(before, free(), strict=True))
    resident = stage(pack, device="cuda:0", placement="spread")
    view = resident.rows[5:9]
    with pytest.warns(ResourceWarning, match="1 views"):
        resident.close()
    np.testing.assert_array_equal(view.get(), pack.rows[5:9])


def test_windows_beyond_what_follows_a_block_are_refused(pack: Pack) -> None:
    with (
        stage(pack, device="cuda:0", placement="spread") as resident,
        pytest.raises(StagingError, match="use a shorter window"),
    ):
        Stager(resident, window=40_000, dilation=2, batch_size=2)


def test_by_itself_where_one_gpu_is_too_small(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    from stager.cuda.driver import CudaDriver

    monkeypatch.setattr(CudaDriver, "free_nbytes", lambda self: pack.rows_nbytes - 1)
    with stage(pack, device="cuda:0") as resident:
        assert resident.placement == "spread"
        assert "do not fit the" in resident.path
        with Stager(resident, **OPTIONS) as one:
            assert resident.path in str(one.plan)


RANK = """
import sys
import numpy as np
from stager import Ranks, Stager, Target, attach
rank, path = int(sys.argv[1]), sys.argv[2]
options = dict(window=48, target=Target(horizon=3), batch_size=256, seed=5, last="drop", ranks=Ranks(rank, 2))
with attach("bars", device=f"cuda:{rank}") as resident:
    with Stager(resident, **options) as one, Stager(path, device="cpu", **options) as other:
        for batch, wanted in zip(one.batches(1), other.batches(1), strict=True):
            assert int(batch.x.device.id) == rank
            assert np.array_equal(batch.x.get().view(np.uint32), wanted.x.view(np.uint32))
            assert np.array_equal(batch.y.get().view(np.uint32), wanted.y.view(np.uint32))
        del batch
    print(resident.placement, len(resident.rows.blocks))
"""


def test_ranks_share_the_blocks_of_a_service(pack: Pack) -> None:
    with tempfile.TemporaryDirectory(prefix="stg-") as folder:
        environ = os.environ | {"STAGER_SERVICE_SOCKET": f"{folder}/s.sock"}
        stager_command = [sys.executable, "-m", "stager.cli"]
        service = subprocess.Popen(
            [*stager_command, "serve", str(pack.path), "--device", "cuda:0", "--placement", "spread"],
            env=environ, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert service.stdout is not None
            assert any(line.startswith("serving on") for line in service.stdout)
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(rank), str(pack.path)],
                    env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for rank in range(2)
            ]  # fmt: skip
            for rank in ranks:
                out, error = rank.communicate(timeout=120)
                assert out == f"spread {count_devices()}\n", error
            verified = subprocess.run(
                [*stager_command, "verify", "--resident", "bars"],
                env=environ,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert (verified.returncode, verified.stdout) == (0, "bars: whole\n"), verified.stderr
        finally:
            service.kill()
            service.communicate()
