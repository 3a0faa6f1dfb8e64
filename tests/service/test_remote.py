"""Batches streamed to clients elsewhere: the same bits, behind TLS and a token."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import re
import threading

import numpy as np
import pytest
from bars_fixtures import bar_table
from pyarrow import flight
from service_fixtures import Served, serving

import stager
from stager import Ranks, Select, Stager, Target, WalkForward
from stager.errors import ConfigError, NoServiceError, SampleError, ServiceError
from stager.service import listening, protocol, streams
from stager.service.listening import Listener, is_loopback, read_listen
from stager.service.protocol import Open, Serving, Ticket
from stager.service.remote import RemoteStager

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def url(service, token_file):
    listener = Listener(service, read_listen("grpc+tcp://127.0.0.1:0", token_file))
    yield f"grpc+tcp://127.0.0.1:{listener.outer_port}"
    assert listener.end(20)


OPTIONS = [
    {"window": 16, "target": Target("close", horizon=5), "batch_size": 64, "seed": 3},
    {"window": 5, "batch_size": 70, "shuffle": "time", "normalize": "zscore"},
    {"window": 5, "batch_size": 70, "shuffle": False, "last": "drop"},
    {"window": 8, "target": [Target("close", horizon=5), Target("open", horizon=2)], "batch_size": 33,
     "select": Select(symbols=["B"], columns=["close", "volume"], interval=("2024-01-01T05:00", None))},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_streamed_batches_are_those_of_a_stager_bit_for_bit(url, pack_path, options):
    with (
        RemoteStager(url, "prices", token=TOKEN, **options) as remote,
        Stager(pack_path, device="cpu", **options) as own,
    ):
        assert (len(remote), remote.n_samples) == (len(own), own.n_samples)
        for epoch in (0, 7):
            for mine, theirs in zip(own.batches(epoch), remote.batches(epoch), strict=True):
                assert (theirs.epoch, theirs.number) == (epoch, mine.number)
                assert np.array_equal(mine.x.view(np.uint32), theirs.x.view(np.uint32))
                assert (mine.y is None) == (theirs.y is None)
                if mine.y is not None:
                    assert np.array_equal(mine.y.view(np.uint32), theirs.y.view(np.uint32))
                assert np.array_equal(mine.sample_ids, theirs.sample_ids)
                assert np.array_equal(mine.times, theirs.times)
        some = [batch.number for batch in remote.batches(2, start=3, stop=5)]
        assert some == [3, 4]
        assert list(remote.batches(2, start=len(remote))) == []


def test_a_training_goes_on_from_the_state_of_either(url, pack_path):
    options = {"window": 16, "target": Target("close", horizon=5), "batch_size": 64, "seed": 3, "dtype": "float16"}
    scheme = WalkForward(3)
    with (
        RemoteStager(url, "prices", token=TOKEN, **options) as remote,
        Stager(pack_path, device="cpu", **options) as own,
    ):
        pairs = [
            (remote, own),
            *((r.train, o.train) for r, o in zip(remote.split(scheme), own.split(scheme), strict=True)),
        ]
        for theirs, mine in pairs:
            states = [one.state_dict(4, np.int64(2)) for one in (theirs, mine)]
            assert states[0] == states[1] == json.loads(json.dumps(states[0]))
            assert theirs.resume(states[1]) == mine.resume(states[0]) == (4, 2)
            assert theirs.resume(mine.state_dict(4, len(mine))) == (5, 0)
        with pytest.raises(SampleError, match="next_batch is 1000000; it must be an integer from 0 to"):
            remote.state_dict(0, 1_000_000)
        with pytest.raises(SampleError, match="the training was of another seed: 4, and this Stager has 3"):
            remote.resume(own.state_dict(0, 0) | {"seed": 4})
        with pytest.raises(SampleError, match="digest of window, target, selection"):
            pairs[1][0].resume(own.state_dict(0, 0) | {"n_samples": pairs[1][1].n_samples})


def test_the_newest_windows_are_those_of_a_stager(url, pack_path):
    options = {"window": 16, "batch_size": 7, "normalize": "zscore"}
    with (
        RemoteStager(url, "prices", token=TOKEN, **options) as remote,
        Stager(pack_path, device="cpu", **options) as own,
    ):
        theirs, mine = remote.latest(), own.latest()
        assert np.array_equal(theirs.x.view(np.uint32), mine.x.view(np.uint32))
        assert len(theirs) == len(mine) > 1
        assert (theirs.y, theirs.symbols, theirs.epoch, theirs.number) == (None, mine.symbols, 0, 0)
        assert np.array_equal(theirs.times, mine.times)
        assert np.array_equal(theirs.weight, mine.weight)
    with (
        RemoteStager(url, "prices", token=TOKEN, **options, target=Target(horizon=2)) as remote,
        pytest.raises(SampleError, match="latest\\(\\) is for a Stager with target=None"),
    ):
        remote.latest()


def test_the_newest_windows_too_may_be_too_many(url, monkeypatch):
    with RemoteStager(url, "prices", token=TOKEN, window=16, batch_size=1) as remote:
        next(remote.batches())
        monkeypatch.setattr(streams, "_MOST_BATCH_NBYTES", 4 * 16 * 5)
        with pytest.raises(ServiceError, match=r"a batch of \d windows of 16 rows has"):
            remote.latest()


def test_a_panel_is_streamed_with_its_mask(service, url, pack_path, tmp_path):
    made = stager.panel(pack_path, stager.Panel())
    service.add("panel", made.path)
    options = {"window": 6, "batch_size": 32, "target": Target(horizon=2)}
    with RemoteStager(url, "panel", token=TOKEN, **options) as remote, Stager(made, device="cpu", **options) as own:
        for mine, theirs in zip(own.batches(1), remote.batches(1), strict=True):
            assert np.array_equal(mine.x, theirs.x, equal_nan=True)
            assert np.array_equal(mine.y, theirs.y, equal_nan=True)
            assert theirs.mask.dtype == bool
            assert np.array_equal(mine.mask, theirs.mask)


@pytest.mark.parametrize("last", ["drop", "pad"])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_every_rank_gets_what_it_would_serve_itself(url, pack_path, n_ranks, last):
    options = {"window": 8, "last": last, "seed": 5, "batch_size": 21, "target": Target(horizon=2)}
    for rank in range(n_ranks):
        own = Stager(pack_path, device="cpu", ranks=Ranks(rank, n_ranks), **options)
        remote = RemoteStager(url, "prices", token=TOKEN, ranks=Ranks(rank, n_ranks), **options)
        assert len(remote) == len(own)
        for mine, theirs in zip(own.batches(4), remote.batches(4), strict=True):
            assert np.array_equal(mine.x, theirs.x)
            assert np.array_equal(mine.y, theirs.y, equal_nan=True)
            assert np.array_equal(mine.valid, theirs.valid)
            assert np.array_equal(mine.sample_ids, theirs.sample_ids)
        own.close()
        remote.close()


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ranks_share_the_batches_that_one_would_get(url, pack_path, n_ranks):
    options = {"window": 8, "last": "drop", "seed": 5}
    ranks = [
        RemoteStager(url, "prices", token=TOKEN, batch_size=20, ranks=Ranks(rank, n_ranks), **options)
        for rank in range(n_ranks)
    ]
    with Stager(pack_path, device="cpu", batch_size=20 * n_ranks, **options) as own:
        assert {len(one) for one in ranks} == {len(own)}
        for whole, *parts in zip(own.batches(2), *(one.batches(2) for one in ranks), strict=True):
            assert {len(part) for part in parts} == {20}
            assert np.array_equal(whole.x, np.concatenate([part.x for part in parts]))
            assert np.array_equal(whole.sample_ids, np.concatenate([part.sample_ids for part in parts]))
    for one in ranks:
        one.close()
    with pytest.raises(SampleError, match="use last='drop', or last='pad'"):
        RemoteStager(url, "prices", token=TOKEN, batch_size=20, ranks=Ranks(0, 2), window=8)


def test_many_requests_are_put_together_in_order(url, pack_path, monkeypatch):
    from stager.service import remote as module

    monkeypatch.setattr(module, "_REQUEST_NBYTES", 4 * 50 * 8 * 5 * 3)
    with (
        RemoteStager(url, "prices", token=TOKEN, window=8, batch_size=50) as remote,
        Stager(pack_path, device="cpu", window=8, batch_size=50) as own,
    ):
        for mine, theirs in zip(own.batches(1), remote.batches(1), strict=True):
            assert np.array_equal(mine.x, theirs.x)
        iterator = remote.batches(2)
        next(iterator)
        iterator.close()


def test_what_is_streamed_is_counted(service, url):
    with RemoteStager(url, "prices", token=TOKEN, window=8, batch_size=50) as remote:
        n = sum(1 for _ in remote.batches())
    assert service.stats().n_batches == n


# --------------------------------------------------------------------------- who may, and how


def test_without_the_token_nothing_is_answered(url, service):
    for token in ("", "wrong", TOKEN + "x"):
        with pytest.raises(ServiceError, match="wants its token"):
            RemoteStager(url, "prices", token=token, window=8, batch_size=50)
    client = flight.FlightClient(url)
    for call in (
        lambda: list(client.do_action(flight.Action("list", b"{}"))),
        lambda: client.do_get(flight.Ticket(b"{}")).read_all(),
        lambda: list(client.list_actions()),
    ):
        with pytest.raises(flight.FlightUnauthenticatedError):
            call()
    client.close()
    assert service.n_refused["no token"] == 6


def test_the_listener_controls_nothing(url, service):
    client = flight.FlightClient(url)
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    for name in ("attach", "stage", "release", "stats", "detach"):
        with pytest.raises(flight.FlightServerError, match="there are: list, open, table"):
            list(client.do_action(flight.Action(name, b'{"name": "prices"}'), options))
    assert len(list(client.do_action(flight.Action("list", b"{}"), options))) == 1
    client.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("grpc+tcp://0.0.0.0:8815", "plain TCP is for this machine alone"),
        ("grpc+tcp://example.com:8815", "plain TCP is for this machine alone"),
        ("grpc+tcp://10.0.0.1:8815", "plain TCP is for this machine alone"),
        ("grpc+tcp://[::]:8815", "plain TCP is for this machine alone"),
        ("grpc+tls://0.0.0.0:8815", "TLS needs --tls-cert and --tls-key"),
        ("grpc://127.0.0.1:8815", "write grpc"),
        ("http://127.0.0.1:8815", "write grpc"),
        ("grpc+tls://:8815", "write grpc"),
        ("grpc+tls://host", "write grpc"),
        ("grpc+tls://host:99999", "Port out of range"),
        ("grpc+unix:///tmp/x", "write grpc"),
        ("", "write grpc"),
    ],
)
def test_what_may_not_be_listened_on_is_refused(url, told, token_file):
    with pytest.raises(ConfigError, match=told):
        read_listen(url, token_file)


def test_tokens_are_kept_to_oneself(token_file, tmp_path):
    with pytest.raises(ConfigError, match="listen needs a token"):
        read_listen("grpc+tcp://127.0.0.1:1", None)
    with pytest.raises(ConfigError, match="can't be read"):
        read_listen("grpc+tcp://127.0.0.1:1", tmp_path / "none")
    token_file.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read the token"):
        read_listen("grpc+tcp://127.0.0.1:1", token_file)
    token_file.chmod(0o600)
    token_file.write_text("short")
    with pytest.raises(ConfigError, match="at least 16"):
        read_listen("grpc+tcp://127.0.0.1:1", token_file)
    assert TOKEN not in repr(ConfigError(str(token_file)))


def test_hosts_of_this_machine_are_told_from_others():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "example.com")))


def test_a_client_sends_its_token_over_tls_alone():
    with pytest.raises(ConfigError, match="the token would travel readable"):
        RemoteStager("grpc+tcp://10.0.0.1:1", "prices", token=TOKEN, window=1, batch_size=1)
    with pytest.raises(ConfigError, match="is no address of a service"):
        RemoteStager("http://10.0.0.1:1", "prices", token=TOKEN, window=1, batch_size=1)
    with pytest.raises(NoServiceError):
        RemoteStager("grpc+tcp://127.0.0.1:1", "prices", token=TOKEN, window=1, batch_size=1)


# ---------------------------------------------------------------------------------- tickets


@pytest.fixture
def raw(url):
    client = flight.FlightClient(url)
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    options = flight.FlightCallOptions(timeout=20, headers=headers)
    yield lambda ticket: client.do_get(flight.Ticket(ticket), options).read_all()
    client.close()


def ticket(service, **changes):
    serving = Serving("prices", **{"batches": {"window": 8, "batch_size": 50}} | changes.pop("serving", {}))
    fingerprint = service.holdings.current("prices").resident.pack.fingerprint
    values = {"fingerprint": fingerprint, "epoch": 0, "first": 0, "stop": 1, "rank": 0} | changes
    return protocol.encode(Ticket(serving, **values))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stop": 10_000}, r"the ticket is for batches 0 to 10000; an epoch has batches 0 to 99"),
        ({"first": 4, "stop": 4}, "batches 4 to 4"),
        ({"first": 5, "stop": 4}, "batches 5 to 4"),
        ({"rank": 1}, "the ticket is for rank 1; there are ranks 0 to 0"),
        ({"first": -1}, "malformed"),
        ({"epoch": -1}, "malformed"),
        ({"fingerprint": "0" * 32}, "is another version now"),
        ({"fingerprint": "x"}, "malformed"),
        ({"serving": {"batches": {"window": 8, "batch_size": 50, "dilation": 2}}}, None),
        ({"serving": {"target": {"horizon": 0}}}, "target horizon is 0"),
        ({"serving": {"target": {"horizon": 1 << 40}}}, "no sample"),
        ({"serving": {"target": {"horizon": 1, "power": 2}}}, r"\[target\] power is no option"),
        ({"serving": {"target": [{"horizon": 1}] * 65}}, "malformed"),
        (
            {"serving": {"batches": {"window": 8, "batch_size": 50, "last": "drop"}, "n_ranks": 1 << 15}},
            "fill no batch",
        ),
        ({"serving": {"batches": {"window": 8}}}, "batch_size is not given"),
        ({"serving": {"batches": {"window": True, "batch_size": 50}}}, "window is True"),
        ({"serving": {"batches": {"window": 8, "batch_size": 50, "device": "cpu"}}}, "device is no option"),
        (
            {"serving": {"batches": {"window": 8, "batch_size": 1 << 40, "last": "pad"}}},
            "at most 1.00 GiB are streamed",
        ),
        ({"serving": {"batches": {"window": 8, "batch_size": 50, "normalize": {"price": "x"}}}}, "price is 'x'"),
        ({"serving": {"batches": {"window": 8, "batch_size": 50, "weights": {"digest": 7}}}}, "weights is"),
        ({"serving": {"select": {"symbols": ["none"]}}}, "the pack has no symbol 'none'"),
        ({"serving": {"select": {"interval": [1, 2, 3]}}}, "interval is"),
        ({"serving": {"fold": protocol.Fold({"scheme": "purged_kfold", "folds": 3}, 3, "test")}}, "folds 0 to 2"),
        ({"serving": {"fold": protocol.Fold({"scheme": "none"}, 0, "test")}}, "scheme is 'none'"),
        ({"serving": {"fold": protocol.Fold({"scheme": "purged_kfold", "folds": "x"}, 0, "test")}}, "folds is 'x'"),
        ({"serving": {"target": {"table": {"digest": "0" * 32}}}}, "not here any more"),
    ],
)
def test_tickets_out_of_range_are_refused(service, raw, changes, told):
    if told is None:
        assert raw(ticket(service)).num_rows == 50
        return
    with pytest.raises(flight.FlightServerError, match=told):
        raw(ticket(service, **changes))
    assert service.n_errors == 0
    raw(ticket(service))


def test_noise_in_tickets_is_refused(service, raw):
    import random

    rng = random.Random(3)
    good = ticket(service)
    for _ in range(300):
        body = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            raw(bytes(body))
        except flight.FlightServerError as error:
            assert "Traceback" not in str(error)  # noqa: PT017
    with pytest.raises(flight.FlightError, match="at most 1,048,576"):
        raw(b" " * (3 << 19))
    assert service.n_errors == 0


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ({"select": {"universe": "/etc/passwd"}}, r"select.universe is '/etc/passwd'; the service opens no files"),
        ({"select": {"splits": "splits.csv"}}, "select.splits is"),
        ({"select": {"rolls": "/etc/passwd"}}, "no such column, but open"),
        ({"select": {"rolls": "../x.csv"}}, "opens no files"),
        ({"select": {"universe": "close"}}, "opens no files"),
        ({"target": {"table": "/etc/passwd"}}, "target.table is '/etc/passwd'"),
        ({"target": {"table": ["/etc/passwd"]}}, "opens no files"),
        ({"select": {"universe": {"path": "/etc/passwd"}}}, "opens no files"),
        ({"batches": {"window": 8, "batch_size": 5, "sampling": "weighted", "weights": "/etc/passwd"}}, "weights is"),
    ],
)
def test_files_are_not_opened_for_strangers(service, url, where, told):
    body = protocol.encode(Open(Serving("prices", **{"batches": {"window": 8, "batch_size": 50}} | where)))
    client = flight.FlightClient(url)
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    with pytest.raises(flight.FlightServerError, match=told):
        list(client.do_action(flight.Action("open", body), options))
    client.close()
    assert service.n_errors == 0


def test_so_many_streams_at_once_and_no_more(service, url, raw, monkeypatch):
    go, begun = threading.Event(), threading.Semaphore(0)
    real = streams._Part.as_record

    def slow(self, batch):
        if batch.number == 1:
            begun.release()
            assert go.wait(20)
        return real(self, batch)

    monkeypatch.setattr(streams._Part, "as_record", slow)
    body = ticket(service, first=1, stop=2)
    threads = [threading.Thread(target=raw, args=(body,)) for _ in range(listening.MAX_STREAMS)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=20)
    with pytest.raises(flight.FlightServerError, match="streams to 16 clients already"):
        raw(ticket(service))
    go.set()
    for thread in threads:
        thread.join(20)
    assert raw(ticket(service)).num_rows == 50


# ------------------------------------------------------------------------------- versions


def test_an_epoch_never_mixes_versions(run_dir, tmp_path, token_file, monkeypatch):
    path = tmp_path / "moving.pack"

    def write(start):
        stager.pack(bar_table({"A": range(start, start + 500)}), path, overwrite=True)

    write(0)
    with serving(run_dir, path) as service:
        listener = Listener(service, read_listen("grpc+tcp://127.0.0.1:0", token_file))
        url = f"grpc+tcp://127.0.0.1:{listener.outer_port}"
        remote = RemoteStager(url, "moving", token=TOKEN, window=4, batch_size=10)
        before = [batch.x for batch in remote.batches(1)]
        write(7)
        new = RemoteStager(url, "moving", token=TOKEN, window=4, batch_size=10)
        assert new.fingerprint != remote.fingerprint
        # Held for those who read it, until nobody asks.
        assert all(np.array_equal(a, batch.x) for a, batch in zip(before, remote.batches(1), strict=True))
        assert len(service.stats().packs) == 2
        monkeypatch.setattr(streams, "_IDLE_SECONDS", 0.0)
        listener._streams.purge()
        assert len(service.stats().packs) == 1
        with pytest.raises(ServiceError, match="is another version now"):
            list(remote.batches(1))
        assert len(list(new.batches(1))) == len(new)
        remote.close()
        new.close()
        assert listener.end(20)
    assert service.holdings.all() == []


def test_only_a_few_stagers_are_kept(service, url):
    for seed in range(7):
        with RemoteStager(url, "prices", token=TOKEN, window=4, batch_size=10, seed=seed) as remote:
            assert len(list(remote.batches(0, stop=2))) == 2
    holding = service.holdings.current("prices")
    assert len(holding.clients) == 4


# ------------------------------------------------------------------------------------ TLS


@pytest.fixture
def certificate(tmp_path):
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stager test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            False,
        )
        .sign(key, hashes.SHA256())
    )
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert, private


def test_a_served_process_streams_over_tls(run_dir, pack_path, token_file, certificate, processes):
    cert, key = certificate
    served = Served(
        run_dir, pack_path, "--listen", "grpc+tls://0.0.0.0:0", "--token-file", token_file, "--tls-cert", cert,
        "--tls-key", key,
    )  # fmt: skip
    processes.append(served)
    port = re.search(r"streams batches on port (\d+)", served.log.read_text())[1]
    options = {"window": 8, "target": Target(horizon=3), "batch_size": 64}
    with (
        RemoteStager(f"grpc+tls://localhost:{port}", "prices", token=TOKEN, tls_roots=cert, **options) as remote,
        Stager(pack_path, device="cpu", **options) as own,
    ):
        for mine, theirs in zip(own.batches(1), remote.batches(1), strict=True):
            assert np.array_equal(mine.x, theirs.x)
            assert np.array_equal(mine.y, theirs.y)
        # Neither with another certificate's trust, nor in the clear, nor without the token.
        with pytest.raises(NoServiceError):
            RemoteStager(f"grpc+tls://localhost:{port}", "prices", token=TOKEN, **options)
        with pytest.raises(NoServiceError):
            RemoteStager(f"grpc+tcp://127.0.0.1:{port}", "prices", token=TOKEN, **options)
        with pytest.raises(ServiceError, match="wants its token"):
            RemoteStager(f"grpc+tls://localhost:{port}", "prices", token="no", tls_roots=cert, **options)
        assert TOKEN not in served.log.read_text()
        assert served.end() == 0
        with pytest.raises(NoServiceError):
            list(remote.batches(2))
    assert "Traceback" not in served.log.read_text()
