"""The gate lets calls through as they are, and cuts off who sends too much, too slowly, or something else."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight
from service_fixtures import Served, serving, until

from stager import attach
from stager.errors import ServiceError
from stager.service import gate
from stager.service.gate import Frames
from stager.service.places import location

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(length, kind=0, flags=0, stream=1, fill=b"x"):
    return length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + fill * length


def feed(data, step, burst=1000, rate=0):
    frames = Frames(burst, rate)
    for first in range(0, len(data), step):
        frames.feed(data[first : first + step])
    return frames


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 4, 8]), st.integers(0, 5)), max_size=20),
    st.integers(1, 700),
)
def test_frames_are_followed_however_the_bytes_come(parts, step):
    sent = {}
    for length, kind, stream in parts:
        if kind == 0 and stream:
            sent[stream] = sent.get(stream, 0) + length
    data = PREFACE + b"".join(frame(length, kind, 0, stream) for length, kind, stream in parts)
    if max(sent.values(), default=0) > 1000:
        with pytest.raises(ServiceError, match="sent more than 1,000 bytes at once"):
            feed(data, step)
    else:
        assert feed(data, step).begun


@given(st.binary(min_size=24, max_size=80), st.integers(1, 30))
def test_what_is_not_http_is_refused(data, step):
    if data.startswith(PREFACE):
        return
    with pytest.raises(ServiceError, match="is not HTTP/2"):
        feed(data, step)


def test_a_call_that_has_ended_counts_no_more():
    frames = Frames(1000, 0)
    frames.feed(PREFACE)
    for number in range(1, 2001, 2):
        frames.feed(frame(900, stream=number, flags=0x1))
        frames.feed(frame(4, kind=1, stream=number + 1))
        frames.feed(frame(4, kind=3, stream=number + 1))
    many = b"".join(frame(4, kind=1, stream=number) for number in range(5001, 5600, 2))
    with pytest.raises(ServiceError, match="more than 128 calls at a time"):
        frames.feed(many)


def test_a_call_may_go_on_slowly_for_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gate.time, "monotonic", lambda: now[0])
    frames = Frames(1000, 100)
    frames.feed(PREFACE)
    for _ in range(500):
        frames.feed(frame(90))
        now[0] += 1
    with pytest.raises(ServiceError, match="or 100 a second after that"):
        frames.feed(100 * frame(110))


def test_a_frame_beyond_all_measure_is_refused_before_it_comes():
    with pytest.raises(ServiceError, match="a frame has 16,777,215 bytes"):
        feed(PREFACE + b"\xff\xff\xff" + bytes(6), 5)


# ---------------------------------------------------------------------------- with a server


def resident_nbytes(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_a_huge_message_never_reaches_the_memory_of_the_server(run_dir, pack_path, processes):
    served = Served(run_dir, pack_path)
    processes.append(served)
    attach("prices", socket=served.socket).close()
    before = resident_nbytes(served.process.pid)
    client = flight.FlightClient(location(served.socket))
    options = flight.FlightCallOptions(timeout=30)
    for _ in range(3):
        with pytest.raises(flight.FlightError):
            list(client.do_action(flight.Action("list", b"x" * (200 << 20)), options))
        huge = flight.FlightDescriptor.for_command(b"x" * (200 << 20))
        with pytest.raises(flight.FlightError):
            client.do_exchange(huge, options)[1].read_chunk()
    client.close()
    attach("prices", socket=served.socket).close()
    assert resident_nbytes(served.process.pid) - before < 64 << 20
    assert served.stats().n_refused["too much"] >= 3
    assert "a call sent more than 262,144 bytes at once" in served.log.read_text()


def talk(path, data=b""):
    """Send something, and read to the end."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(20)
        one.connect(str(path))
        if data:
            one.sendall(data)
        found = b""
        try:
            while part := one.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
        return found


def test_other_protocols_and_silence_are_cut_off(service, monkeypatch, caplog):
    talk(service.place.path, b"GET / HTTP/1.1\r\nHost: stager\r\n\r\n")
    until(lambda: service.n_refused["too much"] == 1)
    monkeypatch.setattr(gate, "_BEGIN_SECONDS", 0.3)
    started = time.monotonic()
    talk(service.place.path)
    talk(service.place.path, PREFACE[:10])
    assert 0.5 < time.monotonic() - started < 10
    assert service.n_refused["slow"] == 2
    attach("prices", socket=service.place.path).close()


def test_noise_on_the_socket_harms_nobody(service):
    import random

    rng = random.Random(5)
    for number in range(200):
        talk(service.place.path, rng.randbytes(rng.randint(25, 400)))
        if number % 20 == 0:
            attach("prices", socket=service.place.path).close()
    until(lambda: service.n_refused["too much"] == 200)


def test_noise_after_a_right_beginning_harms_nobody(service):
    import random

    rng = random.Random(6)

    def one():
        with socket.socket(socket.AF_UNIX) as made:
            made.settimeout(5)
            made.connect(str(service.place.path))
            made.sendall(PREFACE + frame(0, kind=4, stream=0))
            try:
                for _ in range(20):
                    made.sendall(frame(rng.randint(0, 200), rng.randint(0, 9), rng.randrange(256), rng.randint(0, 9)))
                made.recv(1 << 16)
            except OSError:
                pass

    for number in range(100):
        one()
        if number % 20 == 0:
            attach("prices", socket=service.place.path).close()
    assert service.stats().clients == []
    assert service.n_errors == 0


def test_so_many_connections_and_no_more(run_dir, pack_path):
    with serving(run_dir, pack_path, max_clients=4) as service:
        held = []
        for _ in range(8):
            one = socket.socket(socket.AF_UNIX)
            one.connect(str(service.place.path))
            one.sendall(PREFACE + frame(0, kind=4, stream=0))
            assert one.recv(1)
            held.append(one)
        assert talk(service.place.path) == b""
        assert service.n_refused["too many"] == 1
        for one in held:
            one.close()
        until(lambda: _attaches(service))


def _attaches(service):
    try:
        attach("prices", socket=service.place.path).close()
    except ServiceError:
        return False
    return True


def test_connections_are_not_kept(service):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    attach("prices", socket=service.place.path).close()
    time.sleep(0.2)
    before = count()
    threads = [threading.Thread(target=talk, args=(service.place.path, b"x" * 30)) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    until(lambda: count() <= before + 4)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to be somebody else")
def test_another_user_is_turned_away_by_the_system_s_word_too(service):
    """Where somebody has opened directory and socket to all."""
    service.place.path.parent.chmod(0o755)
    service.place.path.chmod(0o666)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as one:
                one.settimeout(10)
                one.connect(str(service.place.path))
                try:
                    one.sendall(PREFACE + frame(0, kind=4, stream=0))
                    code = 0 if one.recv(1) == b"" else 2
                except (ConnectionResetError, BrokenPipeError):
                    code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    service.place.path.parent.chmod(0o700)
    assert os.waitstatus_to_exitcode(status) == 0
    assert service.n_refused["another user"] == 1
