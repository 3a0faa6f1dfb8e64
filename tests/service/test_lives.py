"""What happens when somebody dies, is stopped, or goes silent: in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from bars_fixtures import bar_table
from service_fixtures import Client, Served, until

import stager
from stager import attach
from stager.service import holdings, leases, protocol
from stager.service.client import Connection
from stager.service.leases import Attachment
from stager.service.places import Life, ServerPlace, Watched, start_of
from stager.service.protocol import Answer, Attach, Beat, Lease, Process
from stager.service.service import Service

READER = """
import sys, numpy as np
from stager import Stager, Target, attach
resident = attach("prices")
st = Stager(resident, window=8, target=Target(horizon=3), batch_size=32)
def total(epoch):
    return sum(int(batch.x.view(np.uint32).astype(np.uint64).sum()) for batch in st.batches(epoch))
print(total(0), flush=True)
for line in sys.stdin:
    if line.strip() == "close":
        st.close(), resident.close()
        print("closed", flush=True)
    else:
        print(total(int(line)), flush=True)
"""


def states(served):
    return sorted(one.state for one in served.stats().clients)


@pytest.fixture
def served(run_dir, pack_path, processes):
    made = Served(run_dir, pack_path)
    processes.append(made)
    return made


def reader(served, processes):
    made = Client(READER, served.socket)
    processes.append(made)
    return made, made.read()


def leftovers(run_dir):
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.suffix != ".log")


def test_a_killed_client_is_noticed_and_leaves_nothing(served, processes, run_dir):
    victim, _ = reader(served, processes)
    other, right = reader(served, processes)
    until(lambda: states(served) == ["live", "live"])
    victim.process.kill()
    until(lambda: states(served) == ["live"])
    until(lambda: len(list((run_dir / "s.sock.clients").iterdir())) == 1)
    assert other.say("0") == right
    assert other.say("close") == "closed"
    assert states(served) == []


def test_a_stopped_client_is_late_and_keeps_what_it_has(served, processes, pack_path):
    client, right = reader(served, processes)
    until(lambda: states(served) == ["live"])
    client.process.send_signal(signal.SIGSTOP)
    until(lambda: states(served) == ["late"])
    # Its pack is released meanwhile, and stays.
    released = subprocess.run(
        [sys.executable, "-m", "stager.cli", "release", "prices", "--socket", str(served.socket)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert released.returncode == 0, released.stderr
    assert f"process {client.process.pid} (late, version 1)" in released.stdout
    time.sleep(1)
    (pack,) = served.stats().packs
    assert (pack.offered, pack.n_clients) == (False, 1)
    assert pack.nbytes > 0
    client.process.send_signal(signal.SIGCONT)
    until(lambda: states(served) == ["live"])
    assert client.say("0") == right
    client.process.send_signal(signal.SIGSTOP)
    client.process.kill()
    until(lambda: served.stats().packs == [])


def test_a_killed_server_leaves_clients_with_their_data_and_one_warning(run_dir, pack_path, processes):
    first = Served(run_dir, pack_path)
    processes.append(first)
    clients = [reader(first, processes) for _ in range(3)]
    first.process.kill()
    first.process.wait()
    time.sleep(2.5)
    for client, right in clients:
        assert client.say("0") == right
        assert int(client.say("5")) > 0
    # A new server takes the place, and new clients.
    second = Served(run_dir, pack_path)
    processes.append(second)
    new, right = reader(second, processes)
    assert right == clients[0][1]
    until(lambda: states(second) == ["live"])
    for client, right in clients:
        assert client.say("0") == right
        assert client.say("close") == "closed"
        code, told = client.end()
        assert code == 0
        assert told.count("the service at") == 1
        assert "has ended; this process goes on with the rows of 'prices'" in told
        assert "Traceback" not in told
    assert new.say("close") == "closed"
    assert second.end() == 0
    assert leftovers(run_dir) == []


def test_a_client_that_outlives_its_server_leaves_no_file(run_dir, pack_path, processes):
    served = Served(run_dir, pack_path)
    processes.append(served)
    client, _ = reader(served, processes)
    served.process.kill()
    served.process.wait()
    client.process.stdin.close()
    assert client.process.wait(30) == 0
    assert list((run_dir / "s.sock.clients").iterdir()) == []
    again = Served(run_dir, pack_path)
    processes.append(again)
    assert again.end() == 0
    assert leftovers(run_dir) == []


def test_a_signal_ends_the_server_in_order_and_its_clients_go_on(served, processes, run_dir):
    client, right = reader(served, processes)
    started = time.monotonic()
    assert served.end(signal.SIGTERM) == 0
    assert time.monotonic() - started < 8
    assert not served.socket.exists()
    log = served.log.read_text()
    assert "SIGTERM: the service takes no new clients and ends" in log
    assert "1 clients go on with what they have attached" in log
    assert "Traceback" not in log
    assert client.say("0") == right
    time.sleep(2.5)
    code, told = client.end()
    assert (code, told.count("has ended")) == (0, 1)
    assert leftovers(run_dir) == ["s.sock.clients"]


def test_a_stopped_client_does_not_hold_up_the_end(served, processes, run_dir):
    client, right = reader(served, processes)
    client.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    started = time.monotonic()
    assert served.end(signal.SIGTERM) == 0
    assert time.monotonic() - started < 12
    assert "Traceback" not in served.log.read_text()
    client.process.send_signal(signal.SIGCONT)
    assert client.say("0") == right


def test_a_stopped_server_holds_up_neither_reading_nor_closing(served, processes):
    client, right = reader(served, processes)
    served.process.send_signal(signal.SIGSTOP)
    assert client.say("0") == right
    started = time.monotonic()
    assert client.say("close") == "closed"
    code, told = client.end()
    assert code == 0
    assert time.monotonic() - started < 15
    assert "was not told yet that this process let go" in told
    served.process.send_signal(signal.SIGCONT)
    until(lambda: states(served) == [])


def test_the_server_is_killed_while_clients_attach(run_dir, pack_path, processes):
    script = """
from stager import attach
from stager.errors import StagerError
print("ready", flush=True)
n = {True: 0, False: 0}
while n[False] < 3:
    try:
        resident = attach("prices")
        assert resident.rows.sum() > 0
        resident.close()
        n[True] += 1
    except StagerError as error:
        n[False] += 1
print(n[True], flush=True)
"""
    served = Served(run_dir, pack_path)
    processes.append(served)
    clients = [Client(script, served.socket) for _ in range(2)]
    processes.extend(clients)
    for client in clients:
        assert client.read() == "ready"
    time.sleep(0.5)
    served.process.kill()
    served.process.wait()
    for client in clients:
        assert int(client.read()) > 0
        code, told = client.end()
        assert code == 0, told
        assert "Traceback" not in told


def test_a_signal_that_another_thread_receives_ends_the_server_too(run_dir, pack_path):
    script = """
import signal, sys, threading, time
from stager.service import running
def receive():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(60)
running.serve(
    running.name_packs([sys.argv[1]]), device="cpu", socket=sys.argv[2],
    ready=lambda _: threading.Thread(target=receive, daemon=True).start(),
)
"""
    command = [sys.executable, "-c", script, str(pack_path), str(run_dir / "s.sock")]
    assert subprocess.run(command, timeout=20).returncode == 0


def test_an_end_that_hangs_says_where_and_is_an_end_all_the_same(run_dir, pack_path, processes):
    script = """
import sys, time
from stager.service import running
running._END_SECONDS = 1.0
def hang_here(self):
    time.sleep(60)
running.Service.close = hang_here
running.serve(
    running.name_packs([sys.argv[1]]), device="cpu", socket=sys.argv[2], ready=lambda _: print("ready", flush=True)
)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(pack_path), str(run_dir / "s.sock")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        _, told = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "in hang_here" in told


def test_a_server_is_killed_or_told_to_end_while_staging(run_dir, pack_path, tmp_path, processes):
    script = """
import sys, time
from stager.service import holdings, running
real = holdings.hold
def slow(*arguments):
    print("staging", flush=True)
    time.sleep(60)
holdings.hold = slow
try:
    running.serve(running.name_packs([sys.argv[1]]), device="cpu", socket=sys.argv[2])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    for number, left in ((signal.SIGTERM, []), (signal.SIGKILL, ["s.sock.clients", "s.sock.lock"])):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(pack_path), str(run_dir / "s.sock")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "staging\n"
        process.send_signal(number)
        assert process.wait(20) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        process.stdout.close()
        assert leftovers(run_dir) == left
    again = Served(run_dir, pack_path)
    processes.append(again)
    assert again.end() == 0
    assert leftovers(run_dir) == []


def test_a_second_server_is_refused_and_the_first_goes_on(served, pack_path):
    done = subprocess.run(
        [sys.executable, "-m", "stager.cli", "serve", str(pack_path), "--socket", str(served.socket)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Error: another service has")
    attach("prices", socket=served.socket).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to be somebody else")
def test_another_user_can_not_connect(served):
    script = """
import os, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
from stager import attach
from stager.errors import ServiceError
try:
    attach("prices", socket=sys.argv[1])
except ServiceError as error:
    print(error)
from pyarrow import flight
try:
    list(flight.FlightClient("grpc+unix://" + sys.argv[1]).do_action(flight.Action("list", b"{}")))
except flight.FlightError as error:
    print(type(error).__name__)
"""
    import socket

    done = subprocess.run(
        [sys.executable, "-c", "import stager.service.client, pyarrow.flight\n" + script, str(served.socket)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refused, kind = done.stdout.splitlines()
    assert "a service is for the processes of its own user" in refused or "belongs to user 0" in refused
    assert kind == "FlightUnavailableError"
    assert served.socket.stat().st_mode & 0o777 == 0o600
    assert served.socket.parent.stat().st_mode & 0o777 == 0o700
    # Even where the directory were open, the socket is not.
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.chmod(served.socket.parent, 0o755)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                socket.socket(socket.AF_UNIX).connect(str(served.socket))
            except PermissionError:
                code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    os.chmod(served.socket.parent, 0o700)
    assert os.waitstatus_to_exitcode(status) == 0


# --------------------------------------------------------------- leases, in this process


ID = "0123456789abcdef" * 2


@pytest.fixture
def place(run_dir):
    made = ServerPlace(run_dir / "s.sock")
    yield made
    made.close()


def test_an_attachment_goes_from_attaching_to_live_to_late_to_cut_off(place, monkeypatch):
    life = Life(place.path, ID)
    one = Attachment(ID, "prices", 1, Process(os.getpid(), 1, "me"), False, Watched(place.life(ID)))
    assert one.state == "attaching"
    one.beat(Beat(0))
    assert one.state == "live"
    monkeypatch.setattr(leases, "LATE_SECONDS", 0.0)
    assert one.state == "late"
    one.connected = False
    assert one.state == "cut off"
    assert not one.has_ended
    life.end()
    assert one.has_ended
    one.close(place.life(ID))


def test_a_lost_lock_alone_is_no_death_while_the_process_lives(place, monkeypatch):
    monkeypatch.setattr(leases, "_SETTLE_SECONDS", 0.05)
    life = Life(place.path, ID)
    me = Attachment(ID, "p", 1, Process(os.getpid(), start_of(os.getpid()), "me"), False, Watched(place.life(ID)))
    gone = Attachment(ID, "p", 1, Process(os.getpid(), 1, "another of my number"), False, Watched(place.life(ID)))
    os.close(life._file)
    life._file = -1
    assert not gone.has_ended
    time.sleep(0.1)
    assert gone.has_ended
    assert not me.has_ended
    me.watched.close()
    gone.close(place.life(ID))


def test_batches_do_not_go_backwards(place):
    Life(place.path, ID)
    one = Attachment(ID, "p", 1, Process(1, 1, "x"), False, Watched(place.life(ID)))
    one.beat(Beat(5))
    with pytest.raises(stager.errors.ServiceError, match="a beat says 4 batches, the one before said 5"):
        one.beat(Beat(4))
    one.close(place.life(ID))


def test_an_attachment_without_a_lease_holds_its_pack_until_its_process_ends(service):
    """A client that stops between asking and its lease."""
    script = """
import sys, time
from stager.service import protocol
from stager.service.client import Connection, this_process
from stager.service.places import Life
connection = Connection()
life = Life(connection.socket, "a" * 32)
connection.ask(protocol.Attach("a" * 32, "prices", this_process(), on_cpu=True), protocol.Answer)
print("attached", flush=True)
time.sleep(60)
"""
    client = Client(script, service.place.path)
    assert client.read() == "attached"
    time.sleep(1)
    assert [one.state for one in service.stats().clients] == ["attaching"]
    client.process.kill()
    client.end()
    until(lambda: service.n_clients == 0)


def test_a_connection_that_ends_is_marked_and_only_the_file_tells_the_rest(service):
    with Connection(service.place.path) as connection:
        life = Life(service.place.path, ID)
        me = Process(os.getpid(), start_of(os.getpid()), "me")
        assert connection.ask(Attach(ID, "prices", me), Answer).grant is not None
        writer, _ = connection.exchange(Lease(ID))
        writer.write_metadata(protocol.encode(Beat(0)))
        until(lambda: [one.state for one in service.stats().clients] == ["live"])
        with pytest.raises(stager.errors.ServiceError, match="is not let go; only its client can say so"):
            connection.ask(protocol.Detach(ID), type(None))
        writer.close()
    until(lambda: [one.state for one in service.stats().clients] == ["cut off"])
    time.sleep(1)
    assert service.n_clients == 1
    life.end()
    until(lambda: service.n_clients == 0)


# -------------------------------------------------------------------- release by force


@pytest.fixture
def on_gpu(place, pack_path, monkeypatch):
    """A service whose rows count as those of a GPU."""
    made = Service(place, "cpu")
    handle = protocol.DeviceHandle("gpu", b"h" * 64, 0, 100_000)
    monkeypatch.setattr(holdings, "export_rows", lambda resident: protocol.Blocks([handle], len(resident.rows), 0))
    made.add("prices", pack_path)
    monkeypatch.setattr(type(place), "close", lambda self: None)
    yield made
    made._closed.set()


def join(service, name):
    life = Life(service.place.path, name)
    me = Process(os.getpid(), start_of(os.getpid()), "me")
    answer = service.answer(Attach(name, "prices", me))
    service.connect(name)
    service.beat(name, Beat(0))
    return life, answer


def test_force_tells_first_whom_it_would_break_and_does_nothing(on_gpu):
    join(on_gpu, ID)
    told = on_gpu.answer(protocol.Release("prices", force=True))
    assert not told.done
    assert [one.id for one in told.clients] == [ID]
    assert [one.offered for one in on_gpu.stats().packs] == [True]


def test_force_asks_clients_that_live_to_let_go_and_frees_then(on_gpu, monkeypatch):
    import threading

    life, _ = join(on_gpu, ID)
    release = threading.Thread(target=lambda: told.append(on_gpu.answer(protocol.Release("prices", True, True))))
    told = []
    release.start()
    until(lambda: on_gpu.beat(ID, Beat(1)))
    assert on_gpu.stats().resident_nbytes > 0
    life.end()
    on_gpu.answer(protocol.Detach(ID))
    release.join(10)
    assert told[0].done
    assert told[0].clients == []
    assert on_gpu.stats().packs == []


def test_force_frees_under_a_stopped_client_and_names_it(on_gpu, monkeypatch, caplog):
    from stager.service import service as module

    monkeypatch.setattr(module, "_FORCE_SECONDS", 0.1)
    life, _ = join(on_gpu, ID)
    told = on_gpu.answer(protocol.Release("prices", force=True, sure=True))
    assert [one.id for one in told.clients] == [ID]
    assert told.freed_nbytes > 0
    assert on_gpu.stats().resident_nbytes == 0
    assert "which has not let go: what it reads there from now on is undefined" in caplog.text
    life.end()
    on_gpu.answer(protocol.Detach(ID))
    assert on_gpu.stats().packs == []


def test_mapped_clients_are_not_broken_by_force(service, pack_path):
    with attach("prices", socket=service.place.path) as resident:
        told = service.answer(protocol.Release("prices", force=True))
        assert told.clients == []
        before = resident.rows.copy()
        assert service.answer(protocol.Release("prices", force=True, sure=True)).done
        assert np.array_equal(resident.rows, before)


def test_a_client_that_is_forced_closes_its_rows_and_says_so(service, caplog):
    resident = attach("prices", socket=service.place.path)
    until(lambda: [one.state for one in service.stats().clients] == ["live"])
    (one,) = service._attachments.values()
    one.forced = True
    until(lambda: resident.closed)
    until(lambda: service.n_clients == 0)
    assert "takes 'prices' back by force; its rows are closed" in caplog.text
    resident.close()


def test_an_old_version_without_clients_gives_way_to_a_new_one_that_would_not_fit(
    service, pack_path, monkeypatch, tmp_path
):
    real, calls = holdings.hold, []

    def tight(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise stager.errors.StagingMemoryError("does not fit")
        return real(*arguments)

    monkeypatch.setattr(holdings, "hold", tight)
    assert service.add("prices", pack_path).version == 2
    assert len(service.stats().packs) == 1
    calls.clear()
    with attach("prices", socket=service.place.path), pytest.raises(stager.errors.StagingMemoryError):
        service.add("prices", pack_path)
    attach("prices", socket=service.place.path).close()


def test_many_come_and_go_at_once(service, pack_path, tmp_path):
    """While a pack is replaced again and again, every client has one version, whole."""
    import threading

    path = tmp_path / "moving.pack"

    def write(k):
        stager.pack(bar_table({"A": range(k * 100, k * 100 + 50)}), path, overwrite=True)

    write(0)
    service.add("moving", path)
    stop, wrong, n = threading.Event(), [], [0]

    def work():
        while not stop.is_set():
            try:
                with attach("moving", socket=service.place.path) as resident:
                    closes = np.asarray(resident.rows[:, 3])
                    expected = resident.pack.column("close").astype(np.float32)
                    if not np.array_equal(closes, expected):
                        wrong.append("torn")
                    del closes
                    n[0] += 1
            except stager.errors.StagerError as error:
                if "again and again" not in str(error):
                    wrong.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for k in range(1, 15):
        time.sleep(0.15)
        write(k)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert n[0] > 20
    until(lambda: service.n_clients == 0)
    assert len([one for one in service.stats().packs if one.name == "moving"]) == 1
