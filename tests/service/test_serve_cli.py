"""`stager serve`, `top`, `stage`, `release`, metrics and health."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from bars_fixtures import bar_table
from service_fixtures import Client, Served, serving, until

import stager
from stager import Stager, attach
from stager.errors import ConfigError, ServiceError
from stager.service.metrics import Endpoint
from stager.service.running import name_packs


def cli(*arguments, socket=None, code=0, stdin=""):
    command = [sys.executable, "-m", "stager.cli", *map(str, arguments)]
    if socket is not None:
        command += ["--socket", str(socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, input=stdin)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


def test_packs_are_named_by_their_files_or_by_the_user(tmp_path):
    assert name_packs(["a/prices.pack", "x=b/prices.pack"]) == {
        "prices": Path("a/prices.pack"),
        "x": Path("b/prices.pack"),
    }
    (tmp_path / "k=v.pack").mkdir()
    assert name_packs([str(tmp_path / "k=v.pack")]) == {"k=v": tmp_path / "k=v.pack"}
    with pytest.raises(ConfigError, match=r"two packs would be called 'prices': a/prices.pack and b/prices.pack"):
        name_packs(["a/prices.pack", "b/prices.pack"])
    with pytest.raises(ConfigError, match="'' is no name of a pack"):
        name_packs(["=b/prices.pack"])


def test_a_service_from_start_to_end(run_dir, pack_path, tmp_path, processes):
    served = Served(run_dir, pack_path)
    processes.append(served)
    assert "prices: 5,000 rows, 97.66 KiB, mapped\nserving on " in served.log.read_text()
    resident = attach("prices", socket=served.socket)
    n = sum(1 for _ in Stager(resident, window=4, batch_size=10).batches())
    until(lambda: served.stats().n_batches == n)
    told = json.loads(cli("top", "--json", socket=served.socket))
    assert [(one["name"], one["nbytes"], one["n_clients"]) for one in told["packs"]] == [("prices", 100_000, 1)]
    assert told["clients"][0]["pid"] == os.getpid()
    lines = cli("top", socket=served.socket).splitlines()
    assert [line.split()[0] for line in lines] == ["service", "process", "pack", "prices", "client", str(os.getpid())]
    assert re.search(rf"\blive +{n}\b", lines[5])
    stager.pack(bar_table({"A": range(300)}), tmp_path / "more.pack")
    assert cli("stage", tmp_path / "more.pack", socket=served.socket).startswith("more, version 1: 300 rows")
    assert json.loads(cli("stage", f"more={tmp_path / 'more.pack'}", "--json", socket=served.socket))["version"] == 2
    assert cli("release", "more", socket=served.socket) == "freed 5.86 KiB\n"
    assert cli("release", "more", socket=served.socket, code=1).startswith("Error: no pack 'more' is held")
    told = cli("release", "prices", socket=served.socket)
    assert told.startswith("offered no longer; the memory returns when these let go:\n  process ")
    resident.close()
    assert served.stats().packs == []
    assert served.end() == 0
    assert cli("top", socket=served.socket, code=1).startswith("Error: no service at")


def test_force_asks_before_it_breaks_anything(run_dir, pack_path):
    with serving(run_dir, pack_path) as service:
        told = cli("release", "prices", "--force", socket=service.place.path, code=1, stdin="n\n")
        assert "nothing breaks; free it?" in told
        assert len(service.stats().packs) == 1
        told = json.loads(cli("release", "prices", "--force", "--yes", "--json", socket=service.place.path))
        assert told["done"]
        assert told["freed_nbytes"] == 100_000


def test_what_is_held_can_be_verified(run_dir, tmp_path):
    path = tmp_path / "whole.pack"
    stager.pack(bar_table({"A": range(300)}), path)
    with serving(run_dir, path) as service:
        assert cli("verify", "--resident", "whole", socket=service.place.path) == "whole: whole\n"
        with (path / "segment-0" / "rows.npy").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\0\0\0\0")
        told = cli("verify", "--resident", "whole", socket=service.place.path, code=1)
        assert "differ from those that the service staged" in told or "are damaged" in told
    assert "--socket belongs to --resident" in cli("verify", path, socket=service.place.path, code=2)


def test_wrong_use_of_serve_says_why(run_dir, pack_path, tmp_path):
    assert "Missing argument 'PACK...'" in cli("serve", code=2)
    socket = run_dir / "s.sock"
    assert cli("serve", tmp_path / "none.pack", socket=socket, code=1).endswith("pack it again\n")
    assert "device is 'gpu'" in cli("serve", pack_path, "--device", "gpu", socket=socket, code=1)
    assert "metrics is 'here'" in cli("serve", pack_path, "--metrics", "here", "--device", "cpu", socket=socket, code=1)
    run_dir.chmod(0o755)
    assert "mode 0755, so others may enter it" in cli("serve", pack_path, socket=socket, code=1)
    run_dir.chmod(0o700)
    assert list(run_dir.iterdir()) == []


def test_top_is_live_on_a_terminal(run_dir, pack_path):
    with serving(run_dir, pack_path) as service:
        parent, child = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "stager.cli", "top", "--every", "0.2", "--socket", str(service.place.path)],
            stdin=child, stdout=child, stderr=child, env=os.environ | {"TERM": "xterm", "COLUMNS": "140"},
        )  # fmt: skip
        os.close(child)
        shown = b""
        limit = time.monotonic() + 20
        resident = None
        while time.monotonic() < limit:
            if select.select([parent], [], [], 0.1)[0]:
                try:
                    shown += os.read(parent, 1 << 16)
                except OSError:
                    break
            if b"prices" in shown and resident is None:
                resident = attach("prices", socket=service.place.path)
            if str(os.getpid()).encode() in shown and b"live" in shown:
                process.send_signal(signal.SIGINT)
                break
        assert process.wait(20) == 0
        os.close(parent)
        assert str(os.getpid()).encode() in shown
        assert b"Traceback" not in shown
        resident.close()


# ------------------------------------------------------------------------ metrics, health


def get(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def endpoint(service):
    pytest.importorskip("prometheus_client")
    made = Endpoint("0", service)
    yield made
    made.close()


def test_metrics_are_those_of_the_service(service, endpoint):
    from prometheus_client.parser import text_string_to_metric_families

    def value(name, **labels):
        families = text_string_to_metric_families(get(endpoint.port, "/metrics")[1])
        found = [s.value for f in families for s in f.samples if s.name == name and s.labels == labels]
        assert len(found) == 1, (name, labels)
        return found[0]

    resident = attach("prices", socket=service.place.path)
    n = sum(1 for _ in Stager(resident, window=4, batch_size=10).batches())
    until(lambda: value("stager_batches_total") == n)
    assert value("stager_resident_bytes", pack="prices", version="1") == resident.nbytes
    assert value("stager_clients", state="live") == 1
    assert value("stager_clients", state="late") == 0
    assert value("stager_attached_total") == 1
    assert value("stager_attach_seconds_count") == 1
    assert 0 < value("stager_attach_seconds_sum") < 5
    assert value("stager_errors_total") == 0
    with pytest.raises(ServiceError):
        attach("none", socket=service.place.path)
    assert value("stager_refused_total", reason="ServiceError") == 1
    resident.close()
    assert value("stager_clients", state="live") == 0
    assert value("stager_batches_total") == n


def test_health_tells_the_state(service, endpoint):
    assert get(endpoint.port, "/healthz") == (503, '{"status": "staging"}')
    service.ready = True
    assert get(endpoint.port, "/healthz") == (200, '{"status": "serving"}')
    service.draining = True
    assert get(endpoint.port, "/healthz") == (503, '{"status": "draining"}')
    assert get(endpoint.port, "/else")[0] == 404


def test_an_endpoint_that_can_not_be_says_why(service, endpoint):
    for address in ("", "70000", "a:b", "1.2.3.4", ":"):
        with pytest.raises(ConfigError, match="write a port such as 9464, or HOST:PORT"):
            Endpoint(address, service)
    with pytest.raises(ServiceError, match=f"metrics can't listen on 127.0.0.1:{endpoint.port}"):
        Endpoint(str(endpoint.port), service)


def test_without_prometheus_the_extra_is_named(service, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'stager\[serve\]'"):
        Endpoint("0", service)


def test_the_endpoint_is_up_while_packs_are_staged_and_gone_after(run_dir, pack_path, processes):
    pytest.importorskip("prometheus_client")
    served = Served(run_dir, pack_path, "--metrics", "127.0.0.1:0")
    processes.append(served)
    port = int(re.search(r"metrics on 127\.0\.0\.1:(\d+)", served.log.read_text())[1])
    assert get(port, "/healthz")[0] == 200
    client = Client("from stager import attach\nr = attach('prices')\nprint('in', flush=True)\ninput()", served.socket)
    processes.append(client)
    assert client.read() == "in"
    until(lambda: 'stager_clients{state="live"} 1.0' in get(port, "/metrics")[1])
    assert served.end() == 0
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")
