"""``examples/ddp.py`` through torchrun: ranks share every batch, and a training outlives a rank that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

import pytest
from service_fixtures import serving, until

import stager
from stager import PurgedKFold, Stager, Target

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 96


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, str(EXAMPLES / "make_bars.py"), "bars.csv", "--minutes", "800"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    stager.pack(folder / "bars.csv")
    return folder / "bars.pack"


def start(world_size: int, *options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world_size]
    command += [EXAMPLES / "ddp.py", "--batch", BATCH, *options]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(part) for part in command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train(world_size: int, *options: object) -> str:
    process = start(world_size, *options)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    return out


def served(prefix: Path, world_size: int) -> dict[tuple[int, int], list[list[int]]]:
    """What each rank served, by epoch and batch; the last time where a batch was served again."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    for rank in range(world_size):
        for line in Path(f"{prefix}.{rank}").read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a kill may have cut it
                one = json.loads(line)
                found.setdefault((one["epoch"], one["batch"]), [[] for _ in range(world_size)])[rank] = one["samples"]
    return found


def alone(pack: Path, epochs: int) -> dict[tuple[int, int], list[int]]:
    """The batches of one process."""
    target = Target("close", horizon=5, kind="direction", classes=2)
    with Stager(pack, window=32, target=target, batch_size=BATCH, seed=7, device="cpu") as st:
        data = st.split(PurgedKFold(4))[-1].train
        return {
            (epoch, batch.number): batch.sample_ids.tolist() for epoch in range(epochs) for batch in data.batches(epoch)
        }


def losses(told: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^ +\d+ +([\d.]+) +[\d.]+% +[\d,]+$", told, re.MULTILINE)]


def test_ranks_share_the_rows_of_a_service(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="stg-") as folder, serving(Path(folder), pack) as service:
        monkeypatch.setenv("STAGER_SERVICE_SOCKET", str(service.place.path))
        train(2, "--attach", pack.stem, "--epochs", 1, "--served", tmp_path / "served")
        until(lambda: service.n_clients == 0)
        assert service.stats().n_attached == 2
    assert {place: list(chain(*parts)) for place, parts in served(tmp_path / "served", 2).items()} == alone(pack, 1)


def test_ranks_train_together_as_one_process_does(pack: Path, tmp_path: Path) -> None:
    told = train(2, pack, "--epochs", 2, "--served", tmp_path / "served")
    wanted = alone(pack, 2)
    assert {place: list(chain(*parts)) for place, parts in served(tmp_path / "served", 2).items()} == wanted
    assert losses(told) == pytest.approx(losses(train(1, pack, "--epochs", 2)), abs=2e-5)
    assert len(losses(told)) == 2


def test_a_training_outlives_a_killed_rank(pack: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "ddp.pt"
    options = ("--checkpoint", checkpoint, "--save-every", 3)
    process = start(2, pack, *options, "--epochs", 100_000, "--served", tmp_path / "before")
    try:
        deadline = time.monotonic() + 120
        while not checkpoint.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "SIGKILL" in err
    import torch

    state = torch.load(checkpoint, weights_only=True)["data"]
    epoch, batch = state["epoch"], state["next_batch"]
    told = train(1, pack, *options, "--epochs", epoch + 2, "--served", tmp_path / "after")
    assert f"from epoch {epoch}, batch {batch}\n" in told
    wanted = {place: ids for place, ids in alone(pack, epoch + 2).items() if place[0] >= epoch}
    before = {place: list(chain(*parts)) for place, parts in served(tmp_path / "before", 2).items()}
    found = {place: before[place] for place in wanted if place < (epoch, batch)}
    after = {place: ids for place, (ids,) in served(tmp_path / "after", 1).items()}
    assert not set(found) & set(after)
    assert found | after == wanted


def test_a_wrong_environment_ends_in_one_line(pack: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / "ddp.py"), str(pack)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"ddp\.py: WORLD_SIZE is not set, and RANK is; start .+\n", result.stderr)


def pid_of_rank(parent: int, rank: int) -> int:
    """The process that torchrun started as this rank."""
    while True:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_child = f"\nPPid:\t{parent}\n" in (folder / "status").read_text()
                if is_child and f"\0RANK={rank}\0".encode() in (folder / "environ").read_bytes():
                    return int(folder.name)
            except OSError:
                continue
        time.sleep(0.05)
