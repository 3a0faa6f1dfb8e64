"""The benchmark of serving compares loaders that serve the same: every sample once, with its window and its target."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rivals
import serve
import tables
from peers import LeftOutError, Loader, Peer, Windows, pairs

WINDOW, BATCH, N_COLUMNS = 16, 32, 8
PEERS = {peer.name: peer for peer in rivals.everybody("cpu", False)}


@pytest.fixture(scope="module")
def windows() -> Windows:
    pack = serve.bars(64 * 90 * N_COLUMNS * 4, N_COLUMNS)
    return replace(Windows.find(pack, WINDOW, "cpu"), batch_size=BATCH)


@pytest.fixture(scope="module")
def here() -> serve.Machine:
    return serve.Machine("cpu")


def open_peer(peer: Peer, w: Windows) -> Loader:
    try:
        peer.check_installed()
        return peer.open(w)
    except LeftOutError as reason:
        pytest.skip(str(reason))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.same_windows])
def test_a_peer_serves_every_sample_once_with_its_window_and_target(name, windows):
    loader = open_peer(PEERS[name], windows)
    # Rows are random: the first one of a window tells which it is.
    samples = {windows.rows[first].tobytes(): sample for sample, first in enumerate(windows.starts)}
    seen = []
    for _ in range(windows.n_batches):
        x, y = (np.array(array) for array in loader.run(1))
        assert x.shape == (BATCH, WINDOW, N_COLUMNS)
        assert x.dtype == y.dtype == np.float32
        for window, target in zip(x, y, strict=True):
            sample = samples[window[0].tobytes()]
            first = windows.starts[sample]
            np.testing.assert_array_equal(window, windows.rows[first : first + WINDOW])
            assert target == windows.y[sample]
            seen.append(sample)
    # Qlib serves windows as they come in time, and all of them; the rest that fills no batch is dropped.
    assert len(seen) == len(set(seen)) == len(windows.y) // BATCH * BATCH
    assert seen != sorted(seen)
    x, _ = loader.run(3)  # on into the next epoch
    assert len(x) == BATCH
    loader.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if not peer.same_windows])
def test_a_peer_with_windows_of_its_own_serves_batches_of_the_size(name, windows):
    x, y = open_peer(PEERS[name], windows).run(2)
    assert len(x) == BATCH or x.size == BATCH * WINDOW * N_COLUMNS
    assert len(y) == BATCH


def test_the_fused_work_is_done_right_by_its_peer_too(windows):
    (peer,) = rivals.fused("cpu")
    x, y = open_peer(peer, windows).run(1)
    assert str(x.dtype) == "torch.bfloat16"
    for window, target in zip(x.float().numpy(), y.numpy(), strict=True):
        candidates = [windows.rows[first : first + WINDOW].copy() for first in windows.starts[windows.y == target]]
        for raw in candidates:
            raw[:, :4] = raw[:, :4] / raw[-1, 3] - 1
            raw[:, 4] = np.log1p(raw[:, 4])
        # bfloat16 keeps eight bits.
        assert any(np.allclose(window, raw, rtol=2**-8, atol=1e-6) for raw in candidates)


def test_windows_that_are_not_those_of_the_targets_are_found_out(windows):
    first = windows.starts[:BATCH]
    x = np.stack([windows.rows[start : start + WINDOW] for start in first])
    serve.check(windows, x, windows.y[:BATCH])
    with pytest.raises(ValueError, match="not the one of its target"):
        serve.check(windows, x, windows.y[1 : BATCH + 1])
    x[1, 3, 2] += 1
    with pytest.raises(ValueError, match="not the one of its target"):
        serve.check(windows, x, windows.y[:BATCH])
    with pytest.raises(ValueError, match="a batch is x"):
        serve.check(windows, x[:-1], windows.y[: BATCH - 1])


def test_a_peer_that_fails_is_a_row_and_the_others_are_measured(windows, here, capsys):
    def broken(w: Windows) -> Loader:
        raise MemoryError("nothing\nleft")

    def wrong(w: Windows) -> Loader:
        return Loader(pairs(lambda epoch: [(np.zeros((BATCH, WINDOW, N_COLUMNS), np.float32), windows.y[:BATCH])]))

    found = serve.measured(Peer("broken", broken), windows, here, 0.01)
    assert found["error"] == "MemoryError: nothing left"
    found = serve.measured(Peer("wrong", wrong), windows, here, 0.01)
    assert "ValueError" in found["error"]
    found = serve.measured(Peer("missing", broken, ("no_such_module",)), windows, here, 0.01)
    assert found["left_out"].startswith("not installed")
    found = serve.measured(Peer("few", broken), replace(windows, batch_size=10**9), here, 0.01)
    assert "fill no batch" in found["left_out"]
    assert "seconds" not in found
    assert capsys.readouterr().out.count("\n") == 4


def test_figures_are_of_whole_epochs_where_a_batch_costs_nothing_by_itself(windows, here):
    counted = []

    def run(n: int) -> tuple[None, None]:
        counted.append(n)
        return None, None

    timing = serve.rate(Loader(run, whole=7), here, 0.001)
    assert timing["min"] <= timing["seconds"] <= timing["max"]
    assert timing["n"] >= serve.LEAST_REPEATS
    assert all(n % 7 == 0 for n in counted[-timing["n"] :])


def test_a_batch_is_counted_with_what_is_read_and_written(windows, here):
    found = serve.measured(PEERS["Stager, NumPy"], windows, here, 0.01)
    nbytes = BATCH * 2 * (WINDOW * N_COLUMNS + 1) * 4
    assert found["gbps"] == pytest.approx(nbytes / found["seconds"] / 1e9)
    assert found["samples_per_second"] == pytest.approx(BATCH / found["seconds"])


# --------------------------------------------------------------------------------- how they are told


def result(name: str, batch: int, **facts: object) -> dict[str, object]:
    measured = {"seconds": batch / 50e6, "min": batch / 60e6, "max": batch / 40e6, "n": 5}
    shape = {"batch": batch, "window": 64, "columns": 8, "open_seconds": 0.5, "first_seconds": 0.01}
    return {"name": name, **measured, **shape, "of_copy": 0.5, **facts}


def test_a_table_has_a_line_a_peer_and_a_column_a_batch():
    left_out = {"name": "B", "batch": 32, "window": 64, "columns": 8, "left_out": "not installed (no module named b)"}
    rows = [result("A", 32), result("A", 4096), left_out, left_out | {"batch": 4096}]
    head, _, a, b = tables.formatted(rows).splitlines()
    assert head == "| | batch 32 | batch 4,096 | of the copy | to the first batch |"
    assert a == "| A | 50 M (40 M to 60 M) | 50 M (40 M to 60 M) | 0.50 / 0.50 | 510 ms |"
    assert b == "| B | not installed |  |  |  |"


def test_other_shapes_are_lines():
    rows = [result("A", 32), result("A", 4096), result("A", 32, window=256)]
    assert tables.formatted(rows).splitlines()[2:] == ["| 64 x 8 | 50 M / 50 M (0.50) |", "| 256 x 8 | 50 M (0.50) |"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.2, "3.2"),
        (999.96, "1 k"),
        (1234, "1.23 k"),
        (99_960, "100 k"),
        (5.4e7, "54 M"),
        (8.5e8, "850 M"),
        (2e9, "2 G"),
    ],
)
def test_counts_are_told_in_three_digits(value, text):
    assert tables.short(value) == text
