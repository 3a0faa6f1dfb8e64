"""Attaching: the same rows, bit for bit, without a copy, until the last view of them has died."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from bars_fixtures import bar_table
from service_fixtures import serving, until

import stager
from stager import PurgedKFold, Select, Stager, Target, attach
from stager.errors import ClosedError, ConfigError, NoServiceError, PackError, ServiceError
from stager.service import asking, attached, holdings, protocol
from stager.service.client import Connection
from stager.service.protocol import PackInfo, Probe, StatsInfo

TARGET = Target("close", horizon=5)


def ask(service, request, kind):
    with Connection(service.place.path) as connection:
        return connection.ask(request, kind)


def clients_of(service):
    return ask(service, protocol.Stats(), StatsInfo).clients


@pytest.mark.parametrize(
    "options",
    [
        {"window": 16, "target": TARGET, "batch_size": 64, "seed": 3},
        {"window": 5, "batch_size": 7, "shuffle": "time", "normalize": "zscore"},
        {"window": 8, "target": [TARGET, Target("open", horizon=2)], "batch_size": 33, "last": "drop",
         "select": Select(symbols=["B"], columns=["close", "volume"])},
    ],
)  # fmt: skip
def test_a_stager_over_attached_rows_is_like_any_other_bit_for_bit(service, pack_path, options):
    with attach("prices", socket=service.place.path) as resident, Stager(pack_path, device="cpu", **options) as own:
        st = Stager(resident, **options)
        assert str(st.plan).replace(st.plan.path, "") == str(own.plan).replace(own.plan.path, "")
        for epoch in (0, 4):
            for mine, theirs in zip(own.batches(epoch), st.batches(epoch), strict=True):
                assert np.array_equal(mine.x.view(np.uint32), theirs.x.view(np.uint32))
                assert (mine.y is None) == (theirs.y is None)
                if mine.y is not None:
                    assert np.array_equal(mine.y.view(np.uint32), theirs.y.view(np.uint32))
                assert np.array_equal(mine.times, theirs.times)
        assert np.array_equal(own.view(1, 2, 3), st.view(1, 2, 3))
        assert own.state_dict(1, 2) == st.state_dict(1, 2)
        st.close()
        assert not resident.closed


def test_the_rows_are_the_mapped_file_and_can_not_be_written(service, pack_path):
    with attach("prices", socket=service.place.path) as resident:
        assert (resident.device.index, resident.placement, resident.path) == (None, "host", "attached, mapped")
        assert resident.pack.path == pack_path
        base = resident.rows
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        assert not resident.rows.flags.writeable
        assert str(pack_path / "segment-0" / "rows.npy") in Path("/proc/self/maps").read_text()


def test_folds_serve_from_attached_rows(service, pack_path):
    options = {"window": 16, "target": TARGET, "batch_size": 64}
    with attach("prices", socket=service.place.path) as resident, Stager(pack_path, device="cpu", **options) as own:
        st = Stager(resident, **options)
        for mine, theirs in zip(own.split(PurgedKFold(3)), st.split(PurgedKFold(3)), strict=True):
            assert mine.counts == theirs.counts
            for a, b in zip(mine.test.batches(), theirs.test.batches(), strict=True):
                assert np.array_equal(a.x, b.x)


def test_batches_and_attachments_are_counted(service):
    with attach("prices", socket=service.place.path) as resident:
        until(lambda: [one.state for one in clients_of(service)] == ["live"])
        st = Stager(resident, window=4, batch_size=100)
        n = sum(1 for _ in st.batches())
        until(lambda: clients_of(service)[0].n_batches == n)
        stats = service.stats()
        assert (stats.n_attached, stats.n_batches, stats.n_errors, stats.n_refused) == (1, n, 0, {})
        assert 0 < stats.attach_seconds < 5
        assert stats.packs[0].n_clients == 1
        del st
    assert service.stats().clients == []
    assert service.stats().n_batches == n


def test_closing_confirms_and_leaves_nothing(service):
    resident = attach("prices", socket=service.place.path)
    assert len(list(service.place.clients.iterdir())) == 1
    resident.close()
    resident.close()
    assert service.n_clients == 0
    assert list(service.place.clients.iterdir()) == []
    with pytest.raises(ClosedError):
        _ = resident.rows


def test_views_keep_the_attachment_and_the_last_one_ends_it(service):
    resident = attach("prices", socket=service.place.path)
    st = Stager(resident, window=8, batch_size=10)
    view = st.view(0, 0, 0)
    before = view.copy()
    st.close()
    with pytest.warns(ResourceWarning, match="1 views of the closed rows"):
        resident.close()
    time.sleep(0.5)
    assert service.n_clients == 1
    assert np.array_equal(view, before)
    del view
    until(lambda: service.n_clients == 0)


def test_what_is_forgotten_is_let_go_by_the_collector(service):
    resident = attach("prices", socket=service.place.path)
    cycle = [resident]
    cycle.append(cycle)
    del resident, cycle
    gc.collect()
    until(lambda: service.n_clients == 0)
    assert list(service.place.clients.iterdir()) == []


def test_several_attachments_of_one_process_are_independent(service):
    first, second = (attach("prices", socket=service.place.path) for _ in range(2))
    assert service.n_clients == 2
    first.close()
    assert service.n_clients == 1
    assert second.rows.shape[1] == 5
    second.close()


def test_what_can_not_be_attached_says_why(service, run_dir):
    with pytest.raises(ServiceError, match=r"no pack 'pricez' is held; there are: prices. `stager stage PACK`"):
        attach("pricez", socket=service.place.path)
    with pytest.raises(NoServiceError, match=r"no service at .*stager serve"):
        attach("prices", socket=run_dir / "nobody.sock")
    with pytest.raises(ConfigError, match="device is 'tpu'; there are 'auto', 'cpu'"):
        attach("prices", socket=service.place.path, device="tpu")
    with pytest.raises(ServiceError, match="malformed"):
        attach("a/b", socket=service.place.path)
    assert list(service.place.clients.iterdir()) == []
    assert service.n_clients == 0
    assert service.stats().n_refused["ServiceError"] == 2


def test_the_environment_names_the_socket(service, monkeypatch):
    monkeypatch.setenv("STAGER_SERVICE_SOCKET", str(service.place.path))
    attach("prices").close()


def test_a_socket_in_a_strange_place_works(run_dir, pack_path):
    folder = run_dir / "a bü@"
    folder.mkdir(mode=0o700)
    with serving(folder, pack_path) as service:
        attach("prices", socket=service.place.path).close()


def test_so_many_clients_and_no_more(run_dir, pack_path):
    with serving(run_dir, pack_path, max_clients=2) as service:
        held = [attach("prices", socket=service.place.path) for _ in range(2)]
        with pytest.raises(ServiceError, match=r"has 2 clients, the most it takes \(--max-clients\)"):
            attach("prices", socket=service.place.path)
        held.pop().close()
        attach("prices", socket=service.place.path).close()
        held.pop().close()


def test_a_service_that_ends_takes_nobody(service):
    service.draining = True
    with pytest.raises(ServiceError, match="takes no new clients"):
        attach("prices", socket=service.place.path)


def test_rows_that_were_written_to_are_refused(service, monkeypatch):
    held = service.holdings.current("prices")
    held.probes[3] = Probe(held.probes[3].first, held.probes[3].count, "0" * 32)
    with pytest.raises(ServiceError, match=r"differ from those that the service staged, at row .*verify --resident"):
        attach("prices", socket=service.place.path)
    until(lambda: service.n_clients == 0)


def test_another_protocol_is_refused(service, monkeypatch):
    monkeypatch.setattr(protocol, "PROTOCOL", 2)
    request = protocol.Attach("a" * 32, "prices", protocol.Process(1, 1, "x"), protocol=1)
    with pytest.raises(ServiceError, match="speaks protocol 1, this service 2"):
        service.answer(request)


def test_a_client_that_can_not_be_told_of_goes_on_quietly(service, monkeypatch):
    monkeypatch.setattr(attached, "_END_SECONDS", 0.0)
    attach("prices", socket=service.place.path).close()
    until(lambda: service.n_clients == 0)


# ------------------------------------------------------------------------------- versions


def write(path, start, overwrite=True):
    stager.pack(bar_table({"A": range(start, start + 500)}), path, overwrite=overwrite)


def test_a_new_version_is_for_new_clients_and_the_old_one_stays(run_dir, tmp_path):
    path = tmp_path / "moving.pack"
    write(path, 0)
    with serving(run_dir, path) as service:
        first = attach("moving", socket=service.place.path)
        before = first.rows.copy()
        fingerprint = first.pack.fingerprint
        write(path, 7)
        second = attach("moving", socket=service.place.path)
        assert second.pack.fingerprint != fingerprint
        assert np.array_equal(first.rows, before)
        versions = {one.version: (one.offered, one.n_clients) for one in service.stats().packs}
        assert versions == {1: (False, 1), 2: (True, 1)}
        first.close()
        assert [one.version for one in service.stats().packs] == [2]
        second.close()
        assert [one.version for one in service.stats().packs] == [2]


def test_appended_bars_are_a_new_version_too(run_dir, tmp_path):
    path = tmp_path / "growing.pack"
    write(path, 0)
    with serving(run_dir, path) as service:
        held = attach("growing", socket=service.place.path)
        stager.append(path, bar_table({"A": range(500, 600)}))
        # Two segments can't be mapped as one, and are not copied behind the user's back.
        with pytest.raises(ServiceError, match=r"lie in 2 segments; merge them with `stager compact"):
            attach("growing", socket=service.place.path)
        stager.compact(path)
        with attach("growing", socket=service.place.path) as new:
            assert (len(held.rows), len(new.rows)) == (500, 600)
        held.close()


def test_a_pack_that_is_touched_is_no_new_version(run_dir, tmp_path):
    path = tmp_path / "same.pack"
    write(path, 0)
    with serving(run_dir, path) as service:
        (path / "manifest.json").touch()
        attach("same", socket=service.place.path).close()
        assert [one.version for one in service.stats().packs] == [1]


def test_a_pack_that_is_gone_is_told(run_dir, tmp_path):
    path = tmp_path / "gone.pack"
    write(path, 0)
    with serving(run_dir, path) as service:
        held = attach("gone", socket=service.place.path)
        path.rename(tmp_path / "elsewhere.pack")
        with pytest.raises(PackError, match="is gone or can't be read"):
            attach("gone", socket=service.place.path)
        assert len(held.rows) == 500
        held.close()


def test_staging_and_releasing_a_running_service(service, tmp_path):
    path = tmp_path / "more.pack"
    write(path, 0)
    told = asking.stage(f"other={path}", service.place.path)
    assert (told.name, told.version, told.n_rows) == ("other", 1, 500)
    names = ask(service, protocol.ListPacks(), list[PackInfo])
    assert [one.name for one in names] == ["prices", "other"]
    assert ask(service, protocol.Describe("other"), PackInfo).n_rows == 500
    with attach("other", socket=service.place.path) as held:
        released = asking.release("other", service.place.path)
        assert released.done
        assert released.freed_nbytes == 0
        assert [one.name for one in released.clients] == ["other"]
        with pytest.raises(ServiceError, match="no pack 'other'"):
            attach("other", socket=service.place.path)
        assert len(held.rows) == 500
    assert [one.name for one in service.stats().packs] == ["prices"]
    assert asking.release("prices", service.place.path).freed_nbytes > 0
    with pytest.raises(ServiceError, match="there are: none"):
        asking.release("prices", service.place.path)


def test_what_can_not_be_staged_says_why_and_changes_nothing(service, tmp_path):
    with pytest.raises(PackError, match="is gone or can't be read"):
        asking.stage(str(tmp_path / "none.pack"), service.place.path)
    (tmp_path / "bad.pack").mkdir()
    (tmp_path / "bad.pack" / "manifest.json").write_text("{}")
    with pytest.raises(PackError, match="no valid manifest"):
        asking.stage(f"prices={tmp_path / 'bad.pack'}", service.place.path)
    attach("prices", socket=service.place.path).close()
    assert [one.version for one in service.stats().packs] == [1]


def test_staging_that_nobody_came_back_for_is_in_nobodys_way(service, tmp_path, monkeypatch):
    paths = [tmp_path / f"{k}.pack" for k in range(2)]
    for k, path in enumerate(paths):
        write(path, 100 * k)
    service.answer(protocol.Stage("left", str(paths[0])))
    until(lambda: any(one.name == "left" for one in service.stats().packs))
    told = asking.stage(f"left={paths[1]}", service.place.path)
    assert (told.version, told.path) == (2, str(paths[1]))
    gate = threading.Event()
    real = holdings.hold
    monkeypatch.setattr(holdings, "hold", lambda *arguments: (gate.wait(20), real(*arguments))[1])
    for k in range(8):
        service.answer(protocol.Stage(f"wait{k}", str(paths[0])))
    with pytest.raises(ServiceError, match="8 packs wait to be staged already"):
        service.answer(protocol.Stage("more", str(paths[0])))
    with pytest.raises(ServiceError, match="is being staged as 'wait3'"):
        service.answer(protocol.Stage("wait3", str(paths[1])))
    # Others notice nothing of all this.
    attach("prices", socket=service.place.path).close()
    gate.set()
    until(lambda: len(service.stats().packs) == 10)
    monkeypatch.setattr(holdings, "_FORGET_SECONDS", 0.0)
    assert asking.stage(f"more={paths[0]}", service.place.path).version == 1


# ------------------------------------------------------------------------------- the process


def test_a_process_that_just_ends_leaves_nothing(service):
    script = f"""
from stager import Stager, attach
st = Stager(attach("prices", socket={str(service.place.path)!r}), window=4, batch_size=8)
print(sum(len(batch) for batch in st.batches()))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "4994\n"
    until(lambda: service.n_clients == 0)
    assert list(service.place.clients.iterdir()) == []


def test_a_forked_child_neither_lets_go_nor_holds_up(service):
    script = f"""
import os, warnings
warnings.simplefilter("ignore")
from stager import attach
resident = attach("prices", socket={str(service.place.path)!r})
child = os.fork()
if child == 0:
    resident.close()
    os._exit(0)
os.waitpid(child, 0)
import time
time.sleep(0.6)
from stager.service import asking
print(len(asking.stats({str(service.place.path)!r}).clients), float(resident.rows[0, 0]))
resident.close()
print(len(asking.stats({str(service.place.path)!r}).clients))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("1 ")
    assert done.stdout.splitlines()[1] == "0"


def test_a_thousand_cycles_leave_neither_threads_nor_files(service):
    def count():
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            attach("prices", socket=service.place.path).close()
        time.sleep(0.2)
        threads, files = count()
        for _ in range(1000):
            attach("prices", socket=service.place.path).close()
    until(lambda: count()[0] <= threads + 2)
    assert count()[1] <= files + 8
    assert service.n_clients == 0
    assert service.stats().n_attached == 1005
    assert list(service.place.clients.iterdir()) == []
