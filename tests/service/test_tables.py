"""Equal tables of several clients are kept once, can't be written to, and outlast everybody but their users."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from bars_fixtures import bar_table
from blake3 import blake3
from service_fixtures import Client, Served, serving, until

import stager
from stager import PurgedKFold, Select, Stager, Target, attach
from stager.errors import ServiceError
from stager.service import attached, tables
from stager.service.protocol import Share
from stager.service.tables import Tables

ONE, TWO = "1" * 32, "2" * 32
BIG = np.arange(1 << 19, dtype=np.float32)


def digest(data):
    return blake3(bytes(data)).hexdigest(length=16)


@pytest.fixture
def large_pack(tmp_path):
    """Targets of more than the least that is shared."""
    path = tmp_path / "large.pack"
    stager.pack(bar_table({"A": range(300_000)}), path)
    return path


def test_equal_targets_are_one_memory_and_others_are_not(run_dir, large_pack):
    with serving(run_dir, large_pack) as service:
        options = {"window": 8, "batch_size": 256}
        residents = [attach("large", socket=service.place.path) for _ in range(3)]
        same = [Stager(r, target=Target(horizon=5), seed=k, **options) for k, r in enumerate(residents)]
        assert service.stats().table_nbytes == 4 * 300_000
        maps = Path("/proc/self/maps").read_text()
        inodes = {line.split()[4] for line in maps.splitlines() if "stager-table" in line}
        assert len(inodes) == 1
        other = Stager(residents[0], target=Target(horizon=6), **options)
        assert service.stats().table_nbytes == 8 * 300_000
        with Stager(large_pack, target=Target(horizon=5), device="cpu", seed=2, **options) as own:
            for mine, theirs in zip(own.batches(3), same[2].batches(3), strict=True):
                assert np.array_equal(mine.x, theirs.x)
                assert np.array_equal(mine.y, theirs.y)
                assert np.array_equal(mine.y_valid, theirs.y_valid)
            for mine, theirs in zip(own.split(PurgedKFold(3)), same[2].split(PurgedKFold(3)), strict=True):
                assert mine.counts == theirs.counts
            assert own.state_dict(1, 2) == same[2].state_dict(1, 2)
        del other
        for st in same:
            assert not st._index.y.flags.writeable
        held = same[1]._index.y
        before = held.copy()
        for resident in residents:
            resident.close()
        assert service.stats().table_nbytes == 0
        assert np.array_equal(held, before, equal_nan=True)


def same_batches(own, theirs):
    for mine, other in zip(own.batches(3), theirs.batches(3), strict=True):
        for name in ("x", "y", "mask", "sample_ids"):
            left, right = getattr(mine, name), getattr(other, name)
            assert (left is None and right is None) or np.array_equal(left, right, equal_nan=left.dtype.kind == "f")


def shared_nbytes(service, own, options, n_clients=3):
    """Bytes of the tables that equal clients share, each once, after all of them serve what a Stager does."""
    name = service.stats().packs[-1].name
    residents = [attach(name, socket=service.place.path) for _ in range(n_clients)]
    stagers, nbytes = [], []
    for resident in residents:
        stagers.append(Stager(resident, **options))
        nbytes.append(service.stats().table_nbytes)
    assert len(set(nbytes)) == 1
    for st in stagers[1:]:
        same_batches(own, st)
        for one in st.split(PurgedKFold(2)):
            assert len(one.train) > 0
        assert own.state_dict(1, 2) == st.state_dict(1, 2)
    for resident in residents:
        resident.close()
    assert service.stats().table_nbytes == 0
    return nbytes[0]


def test_equal_draws_and_spans_are_one_memory(run_dir, large_pack):
    with serving(run_dir, large_pack) as service:
        weighted = {"window": 8, "batch_size": 4096, "sampling": "weighted", "weights": np.arange(299_993) % 5}
        with Stager(large_pack, device="cpu", **weighted) as own:
            assert shared_nbytes(service, own, weighted) == 16 * own.n_samples
        # Every second bar is a span of its own: its row, and its first sample, and the number of all.
        strided = {"window": 8, "batch_size": 4096, "select": Select(stride=2), "target": Target(horizon=3)}
        with Stager(large_pack, device="cpu", **strided) as own:
            assert shared_nbytes(service, own, strided) == 16 * own.n_samples + 8 + 4 * 300_000


def test_the_tables_of_equal_panels_are_one_memory(run_dir, tmp_path):
    n, symbols = 40_000, 30
    steps = {f"S{k:02}": range(k % 7, n - k % 5) for k in range(symbols)}
    stager.pack(bar_table(steps), tmp_path / "bars.pack")
    made = stager.panel(tmp_path / "bars.pack", stager.Panel())
    options = {"window": 8, "batch_size": 4096, "target": Target(horizon=3)}
    with serving(run_dir, made.path) as service, Stager(made, device="cpu", **options) as own:
        index = own._index
        held = {name: value for name, value in vars(index).items() if isinstance(value, np.ndarray)}
        large = {name for name, value in held.items() if value.nbytes >= tables.LEAST_NBYTES}
        assert {"y", "mask", "cells"} <= large
        # And the mask once more, as rows of float32 have it: padded to four symbols.
        padded = 32 * len(index.mask)
        distinct = {
            (value.nbytes, digest(np.ascontiguousarray(value))) for name, value in held.items() if name in large
        }
        assert shared_nbytes(service, own, options) == sum(nbytes for nbytes, _ in distinct) + padded


def test_small_tables_stay_with_their_clients(service):
    with attach("prices", socket=service.place.path) as resident:
        Stager(resident, window=8, batch_size=10, target=Target(horizon=2))
        assert service.stats().table_nbytes == 0


def test_a_table_that_can_not_be_shared_is_kept(service, monkeypatch, caplog):
    with attach("prices", socket=service.place.path) as resident:
        monkeypatch.setattr(tables, "_MOST_TABLES", 0)
        assert resident.shared(BIG) is BIG
        monkeypatch.setattr(tables, "_MOST_TABLES", 32)
        monkeypatch.setattr(attached, "SEALS", 0xFF)
        assert resident.shared(BIG) is BIG
        monkeypatch.undo()
        # What is there is not what its hash says: nobody uses it.
        (made,) = service.tables._tables.values()
        wrong = os.memfd_create("wrong", os.MFD_ALLOW_SEALING)
        os.truncate(wrong, BIG.nbytes)
        tables.fcntl.fcntl(wrong, tables.fcntl.F_ADD_SEALS, tables.SEALS)
        right, made.file = made.file, wrong
        assert resident.shared(BIG) is BIG
        assert "is another than its hash says" in caplog.text
        made.file = right
        os.close(wrong)
        shared = resident.shared(BIG)
        assert shared is not BIG
        assert np.array_equal(shared, BIG)
    until(lambda: service.n_clients == 0)


def test_a_service_that_is_gone_shares_nothing_and_harms_nothing(run_dir, large_pack, processes):
    served = Served(run_dir, large_pack)
    processes.append(served)
    resident = attach("large", socket=served.socket)
    st = Stager(resident, window=8, batch_size=256, target=Target(horizon=5))
    first = next(iter(st.batches())).y.copy()
    served.process.kill()
    served.process.wait()
    assert np.array_equal(next(iter(st.batches())).y, first)
    again = Stager(resident, window=8, batch_size=256, target=Target(horizon=5))
    assert np.array_equal(next(iter(again.batches())).y, first)
    resident.close()


def test_processes_map_the_same_memory(run_dir, large_pack, processes):
    script = """
import sys
from stager import Stager, Target, attach
resident = attach("large")
st = Stager(resident, window=8, batch_size=256, target=Target(horizon=5))
maps = [line.split() for line in open("/proc/self/maps") if "stager-table" in line]
print(maps[0][4], maps[0][1], float(next(iter(st.batches())).y.sum()), flush=True)
sys.stdin.readline()
"""
    served = Served(run_dir, large_pack)
    processes.append(served)
    clients = [Client(script, served.socket) for _ in range(3)]
    processes.extend(clients)
    told = {client.read() for client in clients}
    assert len(told) == 1
    assert told.pop().split()[1] == "r--s"
    assert served.stats().table_nbytes == 4 * 300_000
    clients[0].process.kill()
    for client in clients[1:]:
        client.end()
    until(lambda: served.stats().table_nbytes == 0)


def test_what_is_filled_in_wrongly_is_refused_and_forgotten():
    made = Tables()
    told = made.share(Share(ONE, digest(BIG), BIG.nbytes))
    assert not told.filled
    Path(told.path).write_bytes(bytes(BIG.nbytes))
    with pytest.raises(ServiceError, match="the table that was filled in has the hash"):
        made.share(Share(ONE, digest(BIG), BIG.nbytes, filled=True))
    assert made.nbytes == 0
    with pytest.raises(ServiceError, match="to be filled in; share it first"):
        made.share(Share(ONE, digest(BIG), BIG.nbytes, filled=True))


def test_what_is_sealed_can_not_be_written_by_anybody():
    made = Tables()
    told = made.share(Share(ONE, digest(BIG), BIG.nbytes))
    with open(told.path, "r+b") as file:
        file.write(BIG.tobytes())
    assert made.share(Share(ONE, digest(BIG), BIG.nbytes, filled=True)).filled
    assert made.share(Share(TWO, digest(BIG), BIG.nbytes)).filled
    with open(told.path, "r+b", buffering=0) as file, pytest.raises(PermissionError):
        file.write(b"x")
    with pytest.raises(PermissionError):
        os.truncate(told.path, 5)
    made.leave(ONE)
    assert made.nbytes == BIG.nbytes
    made.leave(TWO)
    assert made.nbytes == 0
    assert not Path(told.path).exists()


def test_a_table_that_is_mapped_for_writing_is_not_taken():
    import mmap

    made = Tables()
    told = made.share(Share(ONE, digest(BIG), BIG.nbytes))
    with open(told.path, "r+b") as file, mmap.mmap(file.fileno(), BIG.nbytes) as mapped:
        mapped[:] = BIG.tobytes()
        with pytest.raises(ServiceError, match="can't be sealed"):
            made.share(Share(ONE, digest(BIG), BIG.nbytes, filled=True))
    assert made.share(Share(ONE, digest(BIG), BIG.nbytes, filled=True)).filled
    made.leave(ONE)


def test_tables_of_strangers_and_beyond_the_memory_are_refused(service):
    with pytest.raises(ServiceError, match="there is no attachment"):
        service.answer(Share(ONE, TWO, 5))
    with attach("prices", socket=service.place.path):
        (name,) = service._attachments
        with pytest.raises(stager.StagerError, match="filled with tables that clients share"):
            service.answer(Share(name, TWO, (1 << 48) - 1))
        assert service.stats().table_nbytes == 0


def test_many_fill_in_the_same_table_at_once(service):
    residents = [attach("prices", socket=service.place.path) for _ in range(8)]
    found = []
    threads = [threading.Thread(target=lambda r=r: found.append(r.shared(BIG))) for r in residents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert all(np.array_equal(one, BIG) for one in found)
    assert service.stats().table_nbytes == BIG.nbytes
    assert sum(one is not BIG for one in found) >= 7
    for resident in residents:
        resident.close()
    assert service.stats().table_nbytes == 0
