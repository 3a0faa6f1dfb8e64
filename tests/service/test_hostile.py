"""Malformed, huge and slow messages, floods and noise: refused, bounded, logged; and other clients notice nothing."""

from __future__ import annotations

import os
import random
import threading
import time

import msgspec
import pytest
from pyarrow import flight
from service_fixtures import until

import stager
from stager import Stager, attach
from stager.errors import ServiceError
from stager.service import protocol
from stager.service import server as server_module
from stager.service.client import Connection, as_error
from stager.service.places import Life, location, start_of
from stager.service.protocol import MAX_MESSAGE_NBYTES, REQUESTS, Beat, Lease, Process

ID = "0123456789abcdef" * 2
ME = Process(os.getpid(), start_of(os.getpid()), "me")


@pytest.fixture
def raw(service):
    client = flight.FlightClient(location(service.place.path))
    yield client
    client.close()


def send(client, name, body=b"{}", seconds=10.0):
    return list(client.do_action(flight.Action(name, body), flight.FlightCallOptions(timeout=seconds)))


@pytest.mark.parametrize(
    ("name", "body", "told"),
    [
        ("list", b"", "malformed"),
        ("list", b"{", "malformed"),
        ("attach", b"{}", "missing required field `id`"),
        ("reboot", b"{}", "there is no action 'reboot'; there are: list"),
        ("x" * 5000, b"{}", "there is no action"),
        ("", b"{}", "there is no action ''"),
        ("describe", b'{"name": "none"}', "no pack 'none' is held"),
        ("detach", b'{"id": "%s"}' % ID.encode(), "there is no attachment"),
        ("stage", b'{"name": "a", "path": "/etc/passwd"}', "is gone or can't be read|no pack"),
        ("stage", b'{"name": "a", "path": "/proc/self"}', "is gone or can't be read"),
        ("release", b'{"name": "none", "force": true, "sure": true}', "no pack 'none'"),
        ("attach", protocol.encode(protocol.Attach(ID, "prices", ME)), "makes and locks this file before it attaches"),
    ],
)
def test_what_is_no_request_is_refused_and_logged(service, raw, caplog, name, body, told):
    if name == "stage":  # in the background
        send(raw, name, body)
        time.sleep(0.3)
    with pytest.raises(flight.FlightServerError, match=told):
        send(raw, name, body)
    assert "refused (" in caplog.text
    assert "Traceback" not in caplog.text
    assert sum(service.stats().n_refused.values()) >= 1
    attach("prices", socket=service.place.path).close()


def test_a_long_message_is_refused_and_not_kept(service, raw):
    with pytest.raises(flight.FlightError, match="at most 65,536 are allowed"):
        send(raw, "list", b" " * (MAX_MESSAGE_NBYTES + 1))
    with pytest.raises(flight.FlightError):
        send(raw, "describe", b"x" * (32 << 20))
    attach("prices", socket=service.place.path).close()


def test_other_calls_of_arrow_flight_are_refused(service, raw):
    descriptor = flight.FlightDescriptor.for_path("prices")
    calls = [
        lambda: list(raw.list_flights()),
        lambda: raw.get_flight_info(descriptor),
        lambda: raw.get_schema(descriptor),
        lambda: raw.do_get(flight.Ticket(b"prices")).read_all(),
    ]
    for call in calls:
        with pytest.raises((flight.FlightError, NotImplementedError, stager.errors.StagerError)):
            call()
    assert {action.type for action in raw.list_actions()} == set(REQUESTS)


def exchange(client, command):
    return client.do_exchange(flight.FlightDescriptor.for_command(command), flight.FlightCallOptions(timeout=20))


def ended(writer, reader, message=b'{"n_batches": 0}'):
    """What a lease ends with."""
    try:
        for _ in range(400):
            writer.write_metadata(message)
            time.sleep(0.005)
        reader.read_chunk()
    except flight.FlightError as error:
        return str(as_error(error, "it"))
    raise AssertionError("the lease goes on")


@pytest.mark.parametrize("command", [b"", b"lease", b"{}", b'{"id": "../../x"}', b'{"id": "%s"}' % ID.encode(),
                                     b"x" * 70_000])  # fmt: skip
def test_a_lease_of_nothing_ends_at_once(service, raw, command):
    writer, reader = exchange(raw, command)
    assert "malformed" in (told := ended(writer, reader)) or "no attachment" in told or "at most" in told


@pytest.fixture
def held(service):
    """An attachment made by hand, its lease to be begun."""
    life = Life(service.place.path, ID)
    service.answer(protocol.Attach(ID, "prices", ME))
    yield life
    life.end()
    until(lambda: service.n_clients == 0)


LEASE = protocol.encode(Lease(ID))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (b"beat", "malformed"),
        (b'{"n_batches": -4}', "malformed"),
        (b"x" * 300, "at most 256 are allowed"),
        (b"x" * (4 << 20), "is gone"),  # cut off by the gate
    ],
)
def test_a_lease_with_noise_in_it_ends_and_the_attachment_stays(service, raw, held, message, told):
    writer, reader = exchange(raw, LEASE)
    import re

    assert re.search(told, ended(writer, reader, message))
    until(lambda: [one.state for one in service.stats().clients] in (["attaching"], ["cut off"]))
    assert service.n_clients == 1


def test_a_flood_of_signs_of_life_ends_the_lease(service, raw, held):
    writer, reader = exchange(raw, LEASE)
    assert "more than 20 signs of life a second" in ended(writer, reader)


def test_a_lease_can_not_be_taken_over(service, raw, held):
    writer, _ = exchange(raw, LEASE)
    writer.write_metadata(protocol.encode(Beat(3)))
    until(lambda: [one.state for one in service.stats().clients] == ["live"])
    other = exchange(raw, LEASE)
    assert "has its lease already" in ended(*other)
    assert [one.state for one in service.stats().clients] == ["live"]
    writer.close()


def test_a_slow_client_holds_nobody_up(service, raw):
    """Calls that are opened and then left alone."""
    slow = [flight.FlightClient(location(service.place.path)) for _ in range(40)]
    kept = [client.do_exchange(flight.FlightDescriptor.for_command(b"")) for client in slow]
    started = time.monotonic()
    for _ in range(20):
        attach("prices", socket=service.place.path).close()
    assert time.monotonic() - started < 10
    for writer, _ in kept:
        with pytest.raises(flight.FlightError):
            writer.close()
    for client in slow:
        client.close()


def test_so_many_requests_at_once_and_no_more(service, raw, monkeypatch):
    begun, go = threading.Semaphore(0), threading.Event()
    real = service.answer

    def slow(request):
        if isinstance(request, protocol.ListPacks):
            begun.release()
            assert go.wait(20)
        return real(request)

    monkeypatch.setattr(service, "answer", slow)
    threads = [
        threading.Thread(target=send, args=(raw, "list"), kwargs={"seconds": 30.0})
        for _ in range(server_module.MAX_AT_ONCE)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=20)
    with pytest.raises(flight.FlightServerError, match="answers 32 requests already; ask again"):
        send(raw, "stats")
    go.set()
    for thread in threads:
        thread.join(20)
    send(raw, "stats")


def test_a_failure_inside_is_logged_and_told_without_its_insides(service, raw, monkeypatch, caplog):
    monkeypatch.setattr(service, "answer", lambda request: 1 / 0)
    with pytest.raises(flight.FlightServerError) as caught:
        send(raw, "stats")
    assert "the service failed (ZeroDivisionError); its log says more" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert "Traceback" in caplog.text
    assert service.n_errors == 1


def mutated(rng, message):
    """A good message with some of its bytes changed, dropped or doubled."""
    body = bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            body[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 1:
            del body[at : at + rng.randint(1, 20)]
        elif kind == 2:
            body[at:at] = body[: rng.randint(0, 64)]
        elif at < len(body):
            body[at] = rng.randrange(256)
    return bytes(body)


def test_ten_thousand_requests_of_noise_change_nothing_for_others(service, pack_path, caplog):
    rng = random.Random(7)
    good = {
        "list": b"{}",
        "describe": protocol.encode(protocol.Describe("prices")),
        "attach": protocol.encode(protocol.Attach(ID, "prices", ME)),
        "detach": protocol.encode(protocol.Detach(ID)),
        "stats": b"{}",
        "stage": protocol.encode(protocol.Stage("noise", "/nowhere/noise.pack")),
        "release": protocol.encode(protocol.Release("nothing", True, True)),
        "share": protocol.encode(protocol.Share(ID, ID, 8)),
    }
    assert set(good) == set(REQUESTS)
    stop, wrong = threading.Event(), []

    def train():
        """A client that goes on all the while."""
        with Stager(pack_path, window=8, batch_size=64, device="cpu") as own:
            right = [batch.x.copy() for batch in own.batches(1)]
        resident = attach("prices", socket=service.place.path)
        st = Stager(resident, window=8, batch_size=64)
        while not stop.is_set():
            for expected, batch in zip(right, st.batches(1), strict=True):
                if not (expected == batch.x).all():
                    wrong.append("another value")
            time.sleep(0.01)
        st.close()
        resident.close()

    trainer = threading.Thread(target=train)
    trainer.start()
    n, refused = 0, 0

    def flood(share, seed):
        nonlocal n, refused
        noise = random.Random(seed)
        client = flight.FlightClient(location(service.place.path))
        for _ in range(share):
            name = noise.choice([*good, *good, "noise", "\x00", "ü" * 9])
            body = good.get(name, b"{}")
            if noise.random() < 0.8:
                body = mutated(noise, body) if noise.random() < 0.8 else noise.randbytes(noise.randint(0, 400))
            n += 1
            try:
                send(client, name, body)
            except flight.FlightServerError as error:
                refused += 1
                if "Traceback" in str(error):
                    wrong.append(str(error))
        client.close()

    before = service.stats()
    floods = [threading.Thread(target=flood, args=(2500, rng.random())) for _ in range(4)]
    for thread in floods:
        thread.start()
    for thread in floods:
        thread.join(240)
    stop.set()
    trainer.join(60)
    assert wrong == []
    assert n == 10_000
    after = service.stats()
    assert after.n_errors == before.n_errors == 0
    assert sum(after.n_refused.values()) == refused
    assert refused > 5000
    assert [one.name for one in after.packs] == ["prices"]
    assert after.packs[0].offered
    assert after.clients == []
    # The flood did not fill the log.
    lines = [record for record in caplog.records if record.getMessage().startswith("refused")]
    assert 0 < len(lines) < 60
    assert any("more before it" in record.getMessage() for record in lines) or len(lines) == 1


def test_an_answer_that_is_none_is_an_error(service, monkeypatch):
    with Connection(service.place.path) as connection, pytest.raises(ServiceError, match="the answer is malformed"):
        connection.ask(protocol.Stats(), list[msgspec.Raw])
