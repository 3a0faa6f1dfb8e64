"""The service on a real GPU: one copy for all, right values whoever dies, and the memory back at the end.

Clients and servers are processes of their own, because CUDA opens no handle in the process that made it; they are
spawned, never forked. Every wait has an end.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import stager
from stager.batches.smoke import made_up_bars
from stager.service import asking
from stager.service.client import Connection

try:
    import cupy
    from cupy.cuda import runtime

    from stager.cuda.groups import GatherStream
except ImportError:  # the marker skips, or fails under --require-gpu
    pass

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

MIB = 1 << 20
N_ROWS = 4_000_000
START_SECONDS = 90.0
ANSWER_SECONDS = 60.0
# A context less or more, and what the driver keeps of it for itself.
SLACK = 64 * MIB

CLIENT = """
import hashlib, os, sys, time
import numpy as np
import cupy
from stager import Stager, Target, attach
cupy.zeros(1).sum().item()
print("ready", flush=True)
resident = st = None
def checksum():
    state = hashlib.blake2b(digest_size=16)
    for first in range(0, len(resident.rows), 1 << 19):
        state.update(resident.rows[first : first + (1 << 19)].get().tobytes())
    return state.hexdigest()
for line in sys.stdin:
    word, *rest = line.split()
    if word == "attach":
        begun = time.perf_counter()
        resident = attach(rest[0])
        attached = time.perf_counter()
        st = Stager(resident, window=32, target=Target(horizon=5), batch_size=256, seed=11)
        tables = time.perf_counter()
        batch = next(iter(st.batches()))
        cupy.cuda.runtime.deviceSynchronize()
        first = time.perf_counter()
        del batch
        print(resident.rows.data.ptr % 512, attached - begun, first - tables, str(resident.device), flush=True)
    elif word == "checksum":
        print(checksum(), flush=True)
    elif word == "epoch":
        state = hashlib.blake2b(digest_size=16)
        for batch in st.batches(int(rest[0])):
            state.update(batch.x.get().tobytes())
            state.update(batch.y.get().tobytes())
        print(state.hexdigest(), flush=True)
    elif word == "spin":
        # Reads until it is told to stop by the next line being there; every value is compared.
        right, n = checksum(), 0
        end = time.monotonic() + float(rest[0])
        while time.monotonic() < end:
            assert checksum() == right
            n += 1
        print(n, flush=True)
    elif word == "cycle":
        for _ in range(int(rest[1])):
            one = attach(rest[0])
            assert float(one.rows[0, 0]) == float(one.rows[0, 0])
            one.close()
        print("cycled", flush=True)
    elif word == "write":
        resident.rows[int(rest[0]), 0] += 1
        cupy.cuda.runtime.deviceSynchronize()
        print("written", flush=True)
    elif word == "close":
        st.close()
        resident.close()
        print("closed", flush=True)
"""


class Spawned:
    """A process whose output is read by a thread, so that no wait can hang."""

    def __init__(self, command, socket, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-u", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"STAGER_SERVICE_SOCKET": str(socket), "PYTHONFAULTHANDLER": "1"} | environment,
        )  # fmt: skip
        self.lines = queue.Queue()
        self.errors = []
        self.readers = [
            threading.Thread(
                target=lambda: [self.lines.put(line.strip()) for line in self.process.stdout], daemon=True
            ),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True),
        ]
        for reader in self.readers:
            reader.start()

    def read(self, seconds=ANSWER_SECONDS):
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            try:
                return self.lines.get(timeout=0.2)
            except queue.Empty:
                if self.process.poll() is not None and self.lines.empty():
                    break
        raise AssertionError(f"no answer (exit code {self.process.poll()}): {''.join(self.errors)[-3000:]}")

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line, seconds=ANSWER_SECONDS):
        self.tell(line)
        return self.read(seconds)

    def until(self, beginning, seconds=START_SECONDS):
        limit = time.monotonic() + seconds
        while not (line := self.read(max(0.1, limit - time.monotonic()))).startswith(beginning):
            pass
        return line

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for reader in self.readers:
            reader.join(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # tells where its threads are, see PYTHONFAULTHANDLER
            self.process.wait(30)
            time.sleep(0.5)
            raise AssertionError(f"it did not end: {''.join(self.errors)[-6000:]}") from None
        for reader in self.readers:
            reader.join(10)
        return code


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """80 MB of rows."""
    return stager.pack(made_up_bars(N_ROWS), tmp_path_factory.mktemp("service") / "bars.pack")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Rows that CUDA may lay into an allocation with others."""
    return stager.pack(made_up_bars(20_000), tmp_path_factory.mktemp("service") / "small.pack")


@pytest.fixture(scope="module")
def right(pack):
    """What a client that staged for itself would answer."""
    import hashlib

    from stager import Stager, Target

    rows = hashlib.blake2b(np.ascontiguousarray(pack.rows).data, digest_size=16).hexdigest()
    epoch = hashlib.blake2b(digest_size=16)
    with Stager(pack, window=32, target=Target(horizon=5), batch_size=256, seed=11, device="cpu") as st:
        for batch in st.batches(3):
            epoch.update(batch.x.tobytes())
            epoch.update(batch.y.tobytes())
    return {"checksum": rows, "epoch 3": epoch.hexdigest()}


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="stg-") as folder:
        yield Path(folder)


@pytest.fixture
def spawned():
    made = []
    yield made
    for one in made:
        one.kill()


@pytest.fixture
def start(run_dir, spawned):
    def serve(*packs, **environment):
        one = Spawned(
            ["-m", "stager.cli", "serve", *map(str, packs), "--device", "cuda:0"], run_dir / "s.sock", **environment
        )
        spawned.append(one)
        one.until("serving on")
        return one

    return serve


@pytest.fixture
def join(run_dir, spawned):
    def clients(n, **environment):
        """So many processes, started at once, each with its CUDA context made."""
        made = [Spawned(["-c", CLIENT], run_dir / "s.sock", **environment) for _ in range(n)]
        spawned.extend(made)
        assert [one.read(START_SECONDS) for one in made] == ["ready"] * n
        return made

    return clients


def free_nbytes():
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    runtime.deviceSynchronize()
    return runtime.memGetInfo()[0]


@pytest.fixture
def baseline():
    """Free device memory before; checked after everything has ended."""
    before = free_nbytes()
    yield before
    limit = time.monotonic() + 60
    while free_nbytes() < before - SLACK:
        assert time.monotonic() < limit, f"{(before - free_nbytes()) / MIB:.0f} MiB did not come back"
        time.sleep(0.2)


# Fixtures are torn down in reverse: the baseline is looked at when the processes are gone.
pytestmark.append(pytest.mark.usefixtures("baseline", "spawned"))


def ask_all(clients, right):
    """Every question to all clients at once."""
    for question, answer in right.items():
        for client in clients:
            client.tell(question)
        assert [client.read() for client in clients] == [answer] * len(clients)


def wait_for(condition, seconds=40.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come true"
        time.sleep(0.05)


def states(run_dir):
    return sorted(one.state for one in asking.stats(run_dir / "s.sock").clients)


# ------------------------------------------------------------------------------- one copy


def test_clients_read_one_copy_bit_for_bit(start, join, run_dir, pack, right):
    start(pack.path)
    clients = join(3)
    contexts = free_nbytes()
    told = [client.ask("attach bars").split() for client in clients]
    for alignment, attached, first, device in told:
        assert int(alignment) == 0
        assert device == "cuda:0"
        # Kernels may have to be compiled or loaded the first time.
        assert float(attached) + float(first) < 30
    ask_all(clients, right)
    # Rows are 80 MB; spans, kernels and groups are each client's own.
    taken = contexts - free_nbytes()
    targets = 4 * N_ROWS
    each = 3 * GatherStream(0).group_nbytes + 128 * MIB
    assert taken < targets + 3 * each, f"{taken / MIB:.0f} MiB for three clients"
    assert states(run_dir) == ["live"] * 3
    # The same target is one table for all, on the host and on the GPU.
    assert asking.stats(run_dir / "s.sock").table_nbytes == 2 * targets
    for client in clients:
        assert client.ask("close") == "closed"
    wait_for(lambda: states(run_dir) == [])


def test_attaching_takes_milliseconds(start, join, pack):
    start(pack.path)
    [client] = join(1)
    client.ask("attach bars")
    client.ask("close")
    figures = []
    for _ in range(20):
        _, attached, first, _ = client.ask("attach bars").split()
        figures.append(float(attached) + float(first))
        client.ask("close")
    assert np.median(figures) < 0.02, figures


def test_small_packs_share_allocations_and_are_right_all_the_same(start, join, small, tmp_path):
    others = [stager.pack(made_up_bars(20_000 + 100 * k), tmp_path / f"other{k}.pack") for k in range(3)]
    start(small.path, *(other.path for other in others))
    [client] = join(1)
    import hashlib

    for made, name in ((small, "small"), *((other, other.path.stem) for other in others)):
        client.ask(f"attach {name}")
        expected = hashlib.blake2b(np.ascontiguousarray(made.rows).data, digest_size=16).hexdigest()
        assert client.ask("checksum") == expected
        assert client.ask("close") == "closed"


def test_several_segments_are_shared_in_order(start, join, tmp_path):
    import hashlib

    table = made_up_bars(400_000, 10)
    times = table["time"].cast("int64").to_numpy()
    half = times < np.median(times)
    path = tmp_path / "two.pack"
    stager.pack(table.filter(half), path)
    stager.append(path, table.filter(~half))
    start(path)
    [client] = join(1)
    client.ask("attach two")
    whole = stager.open_pack(path)
    assert len(whole.parts) == 2
    assert client.ask("checksum") == hashlib.blake2b(whole.rows.data, digest_size=16).hexdigest()
    client.ask("close")


def test_the_gpu_is_found_by_uuid(start, join, pack, right):
    start(pack.path)
    count = runtime.getDeviceCount()
    if count > 1:
        # cuda:0 of the server is another number for this client.
        [client] = join(1, CUDA_VISIBLE_DEVICES=",".join(map(str, reversed(range(count)))))
        assert client.ask("attach bars").split()[3] == f"cuda:{count - 1}"
    else:
        [client] = join(1, CUDA_VISIBLE_DEVICES="0")
        client.ask("attach bars")
    assert client.ask("checksum") == right["checksum"]


def test_without_a_gpu_a_client_maps_the_file(start, run_dir, pack):
    start(pack.path)
    script = "from stager import attach\nr = attach('bars')\nprint(r.device, r.path, r.rows.shape[0])\nr.close()"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
        env=os.environ | {"STAGER_SERVICE_SOCKET": str(run_dir / "s.sock"), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.stdout.strip() == f"cpu attached, mapped {pack.n_rows}", done.stderr


def test_what_a_client_writes_is_found(start, join, run_dir, pack):
    start(pack.path)
    [client] = join(1)
    client.ask("attach bars")
    command = [sys.executable, "-m", "stager.cli", "verify", "--resident", "bars", "--socket", str(run_dir / "s.sock")]
    whole = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert (whole.returncode, whole.stdout) == (0, "bars: whole\n"), whole.stderr
    client.ask("write 1234567")
    damaged = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert damaged.returncode == 1
    assert "1 rows differ from" in damaged.stderr
    assert "from row 1,234,567 to 1,234,567" in damaged.stderr


# --------------------------------------------------------------------------------- deaths


def test_the_server_is_killed_while_eight_clients_read(start, join, run_dir, pack, right):
    server = start(pack.path)
    clients = join(8)
    for client in clients:
        client.ask("attach bars")
    for client in clients:
        client.tell("spin 6")
    time.sleep(2)
    server.process.kill()
    server.process.wait(30)
    for client in clients:
        assert int(client.read(120)) > 0
    ask_all(clients, right)
    # A new server takes the place, new clients, and none of the memory that the old clients read.
    start(pack.path)
    [new] = join(1)
    new.ask("attach bars")
    assert new.ask("checksum") == right["checksum"]
    assert clients[0].ask("checksum") == right["checksum"]
    for client in clients:
        assert client.ask("close") == "closed"
        client.process.stdin.close()
        assert client.process.wait(60) == 0
        for reader in client.readers:
            reader.join(10)
        assert "".join(client.errors).count("the service at") == 1


def test_a_server_that_ends_in_order_leaves_clients_with_their_data(start, join, pack, right):
    server = start(pack.path)
    [client] = join(1)
    client.ask("attach bars")
    assert server.end() == 0
    assert client.ask("checksum") == right["checksum"]
    assert client.ask("close") == "closed"


def test_the_server_is_killed_while_it_stages(run_dir, spawned, tmp_path):
    pack = stager.pack(made_up_bars(20_000_000), tmp_path / "large.pack")
    for seconds in (0.5, 1.5, 2.5):
        one = Spawned(["-m", "stager.cli", "serve", str(pack.path), "--device", "cuda:0"], run_dir / "s.sock")
        spawned.append(one)
        time.sleep(seconds)
        one.process.kill()
        one.process.wait(30)
    one = Spawned(["-m", "stager.cli", "serve", str(pack.path), "--device", "cuda:0"], run_dir / "s.sock")
    spawned.append(one)
    one.until("serving on")
    assert one.end() == 0, "".join(one.errors)[-6000:]


def test_the_server_is_killed_while_clients_attach(start, join, pack):
    server = start(pack.path)
    clients = join(4)
    for client in clients:
        client.tell("cycle bars 100000")
    time.sleep(3)
    server.process.kill()
    server.process.wait(30)
    for client in clients:
        # It ends with the error that nobody answers, not with a wrong value and not never.
        assert client.process.wait(60) == 1
        for reader in client.readers:
            reader.join(10)
        told = "".join(client.errors)
        assert "\nstager.errors." in told, told[-2000:]


def test_killed_and_stopped_clients_harm_nobody(start, join, run_dir, pack, right):
    start(pack.path)
    clients = join(4)
    for client in clients:
        client.ask("attach bars")
        client.tell("spin 20")
    time.sleep(1)
    clients[0].process.kill()
    clients[1].process.send_signal(signal.SIGSTOP)
    wait_for(lambda: "late" in states(run_dir))
    # Released while a client is stopped: its memory stays.
    assert asking.release("bars", run_dir / "s.sock").freed_nbytes == 0
    for client in clients[2:]:
        assert int(client.read(120)) > 0
        assert client.ask("checksum") == right["checksum"]
        assert client.ask("close") == "closed"
    held = asking.stats(run_dir / "s.sock")
    assert [(one.offered, one.n_clients) for one in held.packs] == [(False, 1)]
    clients[1].process.send_signal(signal.SIGCONT)
    assert int(clients[1].read(120)) > 0
    assert clients[1].ask("checksum") == right["checksum"]
    before = free_nbytes()
    assert clients[1].ask("close") == "closed"
    wait_for(lambda: asking.stats(run_dir / "s.sock").packs == [])
    wait_for(lambda: free_nbytes() >= before + pack.rows_nbytes - SLACK)


def test_a_new_version_and_the_old_one_side_by_side(start, join, run_dir, tmp_path):
    import hashlib

    def digest(made):
        return hashlib.blake2b(np.ascontiguousarray(made.rows).data, digest_size=16).hexdigest()

    first = stager.pack(made_up_bars(500_000), tmp_path / "moving.pack")
    one_digest = digest(first)
    start(first.path)
    old, new = join(2)
    old.ask("attach moving")
    second = stager.pack(made_up_bars(700_000), tmp_path / "moving.pack", overwrite=True)
    new.ask("attach moving")
    assert new.ask("checksum") == digest(second) != one_digest
    assert old.ask("checksum") == one_digest
    assert len(asking.stats(run_dir / "s.sock").packs) == 2
    old.ask("close")
    wait_for(lambda: [one.version for one in asking.stats(run_dir / "s.sock").packs] == [2])
    assert new.ask("checksum") == digest(second)


@pytest.mark.slow
def test_a_thousand_attachments_leave_the_memory_as_it_was(start, join, run_dir, pack):
    start(pack.path)
    [client] = join(1)
    client.ask("cycle bars 20", 120)
    before = free_nbytes()
    assert client.ask("cycle bars 1000", 200) == "cycled"
    assert free_nbytes() >= before - SLACK
    with Connection(run_dir / "s.sock"):
        assert states(run_dir) == []
