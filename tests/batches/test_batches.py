"""Batches on NumPy, against windows cut row by row."""

from __future__ import annotations

import gc
import threading
import warnings

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, csv_text, memory_pack
from cut_windows import Cut
from hypothesis import given, settings
from hypothesis import strategies as st

import stager
from stager import ReadOptions, Select, Stager, Target
from stager.errors import ClosedError, ConfigError, SampleError

STEPS = {"B": [*range(40), *range(43, 75)], "A": range(30), "C": [*range(5), *range(7, 60)]}


def serve(st_, epoch=0, **options):
    """x, y, ids and sizes of the batches of an epoch, copied."""
    batches = list(st_.batches(epoch, **options))
    x = np.concatenate([batch.x for batch in batches])
    y = None if batches[0].y is None else np.concatenate([batch.y for batch in batches])
    return x, y, np.concatenate([batch.sample_ids for batch in batches]), [len(batch) for batch in batches]


@pytest.fixture
def table():
    return bar_table(STEPS)


@pytest.fixture
def make(table):
    """A Stager over the table; closed at the end."""
    made = []

    def make_one(source=table, **options):
        options = {"window": 7, "batch_size": 16, "device": "cpu", **options}
        if isinstance(source, stager.Resident):
            del options["device"]
        made.append(Stager(source, **options))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


# -------------------------------------------------------------------------------- what is served


@pytest.mark.parametrize("window", [1, 2, 7, 30])
@pytest.mark.parametrize("batch_size", [1, 5, 16, 1000])
@pytest.mark.parametrize("reach", [None, 4])
def test_every_batch_is_windows_cut_by_numpy(make, table, window, batch_size, reach):
    cut = Cut(table, STEPS, window, reach)
    one = make(window=window, batch_size=batch_size, target=reach and Target(horizon=reach - 1))
    assert one.n_samples == len(cut)
    for epoch in (0, 3):
        x, y, ids, sizes = serve(one, epoch)
        assert sorted(ids) == list(range(len(cut)))
        np.testing.assert_array_equal(x, cut.x[ids])
        assert x.dtype == np.float32
        if reach is None:
            assert y is None
        else:
            np.testing.assert_array_equal(y, cut.y[ids])
        assert sizes[:-1] == [batch_size] * (len(one) - 1)
        assert sum(sizes) == len(cut)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_table_window_and_batch_size(data):
    steps = {
        f"S{k}": sorted(data.draw(st.sets(st.integers(0, 40), min_size=1))) for k in range(data.draw(st.integers(1, 4)))
    }
    window, batch_size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    reach = data.draw(st.sampled_from([None, 1, 3]))
    target = None if reach is None else Target(horizon=reach, delay=0)
    table = bar_table(steps)
    cut = Cut(table, steps, window, reach, 0)
    options = {"window": window, "batch_size": batch_size, "target": target, "seed": data.draw(st.integers(0, 9))}
    pack = memory_pack(steps)
    if not len(cut):
        with pytest.raises(SampleError, match="no sample"):
            Stager(pack, device="cpu", **options)
        return
    with Stager(pack, device="cpu", shuffle=data.draw(st.sampled_from(["full", False])), **options) as one:
        x, y, ids, _ = serve(one, data.draw(st.integers(0, 5)))
        assert sorted(ids) == list(range(len(cut)))
        np.testing.assert_array_equal(x, cut.x[ids])
        if reach is not None:
            np.testing.assert_array_equal(y, cut.y[ids])


def test_many_tasks_and_threads_serve_the_same(monkeypatch, table):
    from stager.batches import host

    monkeypatch.setattr(host, "_TASK_NBYTES", 1000)
    monkeypatch.setattr(host, "_ORDER_POSITIONS", 8)
    cut = Cut(table, STEPS, 7)
    with Stager(table, window=7, batch_size=3, device="cpu") as one:
        x, _, ids, _ = serve(one)
        np.testing.assert_array_equal(x, cut.x[ids])
        assert sorted(ids) == list(range(len(cut)))


def test_without_shuffling_it_is_row_order(make, table):
    cut = Cut(table, STEPS, 7)
    x, _, ids, _ = serve(make(shuffle=False), epoch=5)
    assert list(ids) == list(range(len(cut)))
    np.testing.assert_array_equal(x, cut.x)


def test_epochs_and_seeds_differ_and_repeat(make):
    first = serve(make(seed=1), 0)[2]
    assert list(first) == list(serve(make(seed=1), 0)[2])
    assert list(first) != list(serve(make(seed=1), 1)[2])
    assert list(first) != list(serve(make(seed=2), 0)[2])
    assert list(first) != sorted(first)


def test_the_order_does_not_depend_on_the_batch_size(make):
    assert len({tuple(serve(make(batch_size=size), 2)[2]) for size in (1, 7, 16, 500)}) == 1


@pytest.mark.parametrize("batch_size", [16, 5, 1])
def test_start_skips_batches(make, batch_size):
    one = make(batch_size=batch_size, target=Target(horizon=2))
    all_batches = list(one.batches(1))
    assert len(all_batches) == len(one)
    for k in {0, 1, len(one) // 2, len(one) - 1, len(one)}:
        rest = list(one.batches(1, start=k))
        assert [batch.number for batch in rest] == list(range(k, len(one)))
        for batch, other in zip(rest, all_batches[k:], strict=True):
            np.testing.assert_array_equal(batch.x, other.x)
            np.testing.assert_array_equal(batch.y, other.y)
            np.testing.assert_array_equal(batch.sample_ids, other.sample_ids)


def test_the_last_batch_is_kept_or_dropped(make, table):
    n = len(Cut(table, STEPS, 7))
    keep, drop = make(batch_size=16), make(batch_size=16, last="drop")
    assert n % 16
    assert (len(keep), len(drop)) == (n // 16 + 1, n // 16)
    assert [len(batch) for batch in drop.batches()] == [16] * (n // 16)
    assert list(serve(drop)[2]) == list(serve(keep)[2])[: n // 16 * 16]
    even = make(batch_size=n, last="drop")
    assert len(even) == 1
    assert len(serve(even)[2]) == n
    with pytest.raises(SampleError, match="last='drop'"):
        make(batch_size=n + 1, last="drop")


def test_a_window_may_be_longer_than_the_gap_says(make, table):
    one = make(select=Select(max_gap=2), window=10, shuffle=False)
    # B has a gap of 3 missing bars, C of 2.
    closes = np.concatenate([batch.x[:, :, 3] for batch in one.batches()])
    assert (np.diff(closes, axis=1) == 1).all()
    assert one.n_samples == (30 - 9) + (40 - 9) + (32 - 9) + (58 - 9)


@pytest.mark.parametrize("columns", [["close"], ["volume", "open"], ["volume", "close", "low", "high", "open"], None])
@pytest.mark.parametrize("stride", [1, 3])
def test_columns_and_strides(make, table, columns, stride):
    cut = Cut(table, STEPS, 7, 4)
    one = make(target=Target(horizon=3), select=Select(columns=columns, stride=stride))
    chosen = [i for i, step in enumerate(cut.steps) if (step + 1) % stride == 0]
    assert one.n_samples == len(chosen)
    names = [name for name in table.column_names if name not in ("symbol", "time")]
    places = [names.index(name) for name in columns or names]
    x, y, ids, _ = serve(one, 2)
    assert sorted(ids) == list(range(len(chosen)))
    picked = [chosen[i] for i in ids]
    np.testing.assert_array_equal(x, cut.x[picked][:, :, places])
    assert x.flags.c_contiguous
    np.testing.assert_array_equal(y, cut.y[picked])
    assert one.plan.columns == tuple(columns or names)
    assert one.plan.batch_nbytes == 16 * (7 * len(places) + 1) * 4
    # A view is of the rows as they are.
    assert one.view(2, 0, 0).shape == (7, 5)
    batch = next(one.batches(2))
    assert batch.symbols == [cut.symbols[i] for i in picked[: len(batch)]]


@pytest.mark.parametrize("columns", [None, ["volume", "high"]])
@pytest.mark.parametrize("normalize", ["none", "last", "zscore", stager.Normalize("zscore", "none")])
def test_windows_are_normalised_by_what_they_hold(make, table, normalize, columns):
    cut = Cut(table, STEPS, 7)
    one = make(normalize=normalize, select=Select(columns=columns))
    x, _, ids, _ = serve(one, 1)
    raw = cut.x[ids].astype(np.float64)
    names = ["open", "high", "low", "close", "volume"]
    deviation = raw.std(axis=1, keepdims=True)
    scores = (raw - raw.mean(axis=1, keepdims=True)) / deviation
    wanted = raw.copy()
    if normalize == "last":
        wanted[:, :, :4] = raw[:, :, :4] / raw[:, -1:, 3:4] - 1
        wanted[:, :, 4] = np.log1p(raw[:, :, 4])
    elif normalize == "zscore":
        wanted = scores
    elif normalize != "none":
        wanted[:, :, :4] = scores[:, :, :4]
    places = [names.index(name) for name in columns or names]
    np.testing.assert_allclose(x, wanted[:, :, places], rtol=1e-6, atol=1e-6)
    assert x.dtype == np.float32
    # Rows and views are as they were.
    np.testing.assert_array_equal(one.view(1, 0, 0), cut.x[ids[0]])
    assert ("zscore" in one.plan.normalize) == (normalize not in ("none", "last"))


def test_a_sample_is_normalised_alike_in_any_batch(monkeypatch, make):
    from stager.batches import host

    whole, _, ids, _ = serve(make(normalize="zscore", batch_size=1000))
    monkeypatch.setattr(host, "_TASK_NBYTES", 100)
    for size in (1, 3, 64):
        x, _, others, _ = serve(make(normalize="zscore", batch_size=size))
        np.testing.assert_array_equal(ids, others)
        np.testing.assert_array_equal(x.view(np.uint32), whole.view(np.uint32))


# -------------------------------------------------------------------------------- about a batch


@pytest.mark.parametrize("exit_column", ["close", "open"])
def test_symbols_and_times_of_bars_of_a_minute(make, table, exit_column):
    cut = Cut(table, STEPS, 7, 4)
    one = make(target=Target(horizon=3, exit=exit_column))
    for batch in one.batches():
        ids = batch.sample_ids
        assert batch.symbols == [cut.symbols[i] for i in ids]
        opened = START + np.array([cut.steps[i] for i in ids]) * MINUTE
        assert batch.times.dtype == "datetime64[ns]"
        np.testing.assert_array_equal(batch.times.astype(np.int64), opened + MINUTE)
        known = opened + 4 * MINUTE + (MINUTE if exit_column == "close" else 0)
        np.testing.assert_array_equal(batch.label_times.astype(np.int64), known)
        assert batch.valid.all()
        assert batch.valid.shape == (len(batch),)


def test_without_a_target_there_are_no_label_times(make):
    batch = next(make().batches())
    assert batch.label_times is None
    assert batch.y is None


def test_several_targets_are_columns_with_their_own_validity(make, table):
    """A horizon of 20 ends where one of 2 goes on; the sample stays, and tells which of them it has."""
    near, far = (Target(horizon=horizon, kind="difference") for horizon in (2, 20))
    one, alone, both = make(target=[near, far]), Cut(table, STEPS, 7, 21), Cut(table, STEPS, 7, 3)
    n_valid = 0
    for batch in one.batches(1):
        ids = batch.sample_ids
        has_far = np.isin([both.decisions[i] for i in ids], alone.decisions)
        assert batch.y.shape == batch.y_valid.shape == batch.label_times.shape == (len(batch), 2)
        assert batch.y_valid.dtype == bool
        assert batch.y_valid[:, 0].all()
        np.testing.assert_array_equal(batch.y_valid[:, 1], has_far)
        np.testing.assert_array_equal(batch.y[:, 0], 2.0)
        np.testing.assert_array_equal(batch.y[:, 1], np.where(has_far, 20.0, np.nan))
        opened = START + np.array([both.steps[i] for i in ids]) * MINUTE
        np.testing.assert_array_equal(batch.label_times[:, 0].astype(np.int64), opened + 4 * MINUTE)
        np.testing.assert_array_equal(np.isnat(batch.label_times[:, 1]), ~has_far)
        np.testing.assert_array_equal(batch.label_times[has_far, 1].astype(np.int64), opened[has_far] + 22 * MINUTE)
        n_valid += has_far.sum()
        # What is told of the labels does not depend on what a loop does to them.
        batch.y[...] = 0
        np.testing.assert_array_equal(batch.y_valid[:, 1], has_far)
    assert one.n_samples == len(both)
    assert n_valid == len(alone)
    assert one.plan.batch_nbytes == 16 * (7 * 5 + 2) * 4
    assert one.plan.target.count(";") == 1


def test_one_target_is_valid_for_every_sample(make):
    batch = next(make(target=Target(horizon=2)).batches())
    assert batch.y_valid.shape == batch.y.shape == (16,)
    assert batch.y_valid.all()
    assert next(make().batches()).y_valid is None


def test_times_of_daily_bars_are_the_next_midnight():
    steps = {"A": [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]}
    pack = memory_pack(steps, interval="1d", unit=DAY)
    with Stager(pack, window=3, batch_size=100, target=Target(horizon=1), shuffle=False, device="cpu") as one:
        (batch,) = one.batches()
        rows = np.arange(2, 8)
        opened = START + np.array(steps["A"])[rows] * DAY
        np.testing.assert_array_equal(batch.times.astype(np.int64), opened + DAY)
        exits = START + np.array(steps["A"])[rows + 2] * DAY + DAY
        np.testing.assert_array_equal(batch.label_times.astype(np.int64), exits)
        assert set(batch.symbols) == {"A"}


def test_a_view_is_the_batchs_sample_without_a_copy(make):
    one = make()
    for batch in one.batches(2):
        for sample in range(len(batch)):
            view = one.view(2, batch.number, sample)
            np.testing.assert_array_equal(view, batch.x[sample])
            assert np.shares_memory(view, one.resident.rows)
            assert np.shares_memory(view, one.resident.pack.rows)
            assert not view.flags.writeable
            assert one.sample_id(2, batch.number, sample) == batch.sample_ids[sample]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ((0, -1, 0), "no batch -1"),
        ((0, 10**6, 0), "no batch"),
        ((0, 0, -1), "no sample -1"),
        ((0, 0, 16), "no sample 16"),
        ((-1, 0, 0), "epoch"),
        ((0, 1.0, 0), "no batch 1.0"),
        ((0, 0, True), "no sample True"),
        (("0", 0, 0), "epoch"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(make, place, text):
    one = make()
    with pytest.raises(SampleError, match=text):
        one.view(*place)
    with pytest.raises(SampleError, match=text):
        one.sample_id(*place)


def test_the_last_sample_of_a_short_batch_is_the_last(make):
    one = make()
    size = one.n_samples % 16
    one.view(0, len(one) - 1, size - 1)
    with pytest.raises(SampleError, match=f"samples 0 to {size - 1}"):
        one.view(0, len(one) - 1, size)


@pytest.mark.parametrize("start", [-1, 10**6, 1.5, True, "1"])
def test_a_start_that_does_not_exist_is_refused(make, start):
    with pytest.raises(SampleError, match="start"):
        make().batches(0, start=start)


# -------------------------------------------------------------------------------- iterators and memory


def test_leaving_early_and_beginning_again(make):
    one = make(batch_size=2)
    first = next(iter(one.batches(0))).x.copy()
    for k, _ in enumerate(one.batches(0)):
        if k == 3:
            break
    np.testing.assert_array_equal(next(iter(one.batches(0))).x, first)


def test_iterators_do_not_disturb_each_other(make):
    one = make(batch_size=3, target=Target(horizon=1))
    alone = [batch.x.copy() for batch in one.batches(0)]
    for outer, batch in enumerate(one.batches(0)):
        np.testing.assert_array_equal(batch.x, alone[outer])
        if outer % 5 == 0:
            for inner, other in enumerate(one.batches(0)):
                np.testing.assert_array_equal(other.x, alone[inner])
    for one_batch, other in zip(one.batches(0), one.batches(0, start=1), strict=False):
        np.testing.assert_array_equal(one_batch.x, alone[one_batch.number])
        np.testing.assert_array_equal(other.x, alone[other.number])


def test_a_kept_batch_is_not_changed_by_later_ones(monkeypatch, make):
    from stager.batches import host

    monkeypatch.setattr(host, "_TASK_NBYTES", 2000)
    one = make(batch_size=4, target=Target(horizon=1))
    kept = []
    for epoch in range(3):
        for batch in one.batches(epoch):
            kept.append((batch.x[1:2], batch.x[1:2].copy(), batch.y, batch.y.copy()))  # noqa: PERF401
    for x, x_then, y, y_then in kept:
        np.testing.assert_array_equal(x, x_then)
        np.testing.assert_array_equal(y, y_then)


def test_writing_into_a_batch_changes_nothing_else(make):
    one = make(batch_size=4, target=Target(horizon=1))
    before, rows = [batch.x.copy() for batch in one.batches(0)], one.resident.rows.copy()
    served = list(one.batches(0))
    for k, batch in enumerate(served):
        batch.x[...] = -k
        batch.y[...] = -k
    for k, batch in enumerate(served):
        assert (batch.x == -k).all()
        assert (batch.y == -k).all()
    np.testing.assert_array_equal(one.resident.rows, rows)
    for batch, then in zip(one.batches(0), before, strict=True):
        np.testing.assert_array_equal(batch.x, then)


def test_an_abandoned_iterator_leaves_no_thread_behind_after_close(table):
    def gathering():
        return [thread for thread in threading.enumerate() if thread.name.startswith("stager-gather")]

    gc.collect()
    n = len(gathering())
    one = Stager(table, window=7, batch_size=2, device="cpu")
    batches = one.batches()
    next(batches)
    assert len(gathering()) > n
    one.close()
    assert len(gathering()) == n
    del batches


# -------------------------------------------------------------------------------- closing


def test_after_close_everything_is_refused(make):
    one = make()
    running, unbegun = one.batches(), one.batches()
    kept = next(running)
    x = kept.x.copy()
    one.close()
    one.close()
    for use in (
        lambda: next(running),
        lambda: next(unbegun),
        lambda: one.batches(),
        lambda: one.view(0, 0, 0),
        lambda: one.sample_id(0, 0, 0),
        lambda: one.resident,
    ):
        with pytest.raises(ClosedError):
            use()
    np.testing.assert_array_equal(kept.x, x)
    assert kept.symbols
    assert "closed" in repr(one)
    assert len(one) > 0


def test_rows_closed_under_a_borrower_are_refused(make, table):
    resident = stager.stage(table, device="cpu")
    one = make(resident)
    running, unbegun = one.batches(), one.batches()
    next(running)
    resident.close()
    for use in (lambda: next(running), lambda: next(unbegun), one.batches, lambda: one.view(0, 0, 0)):
        with pytest.raises(ClosedError):
            use()
    with pytest.raises(ClosedError):
        Stager(resident, window=3, batch_size=1)


def test_closing_in_another_thread_ends_iteration_cleanly(table):
    for delay in np.linspace(0, 0.003, 60):
        one = Stager(table, window=7, batch_size=1, device="cpu")
        timer = threading.Timer(delay, one.close)
        timer.start()
        served = (batch for epoch in range(10**6) for batch in one.batches(epoch))
        with pytest.raises(ClosedError):
            assert {batch.x.shape for batch in served} == {(1, 7, 5)}
        timer.join()


@pytest.mark.parametrize("kind", ["memory", "mapped"])
def test_views_alive_at_close_are_counted_and_stay_right(table, tmp_path, kind):
    source = table if kind == "memory" else stager.pack(table, tmp_path / "bars.pack")
    one = Stager(source, window=7, batch_size=16, device="cpu")
    views = [one.view(0, 0, sample) for sample in range(3)]
    views.append(views[0][2:, 1])
    then = [view.copy() for view in views]
    list(one.batches())
    with pytest.warns(ResourceWarning, match="4 views of the closed rows"):
        one.close()
    for view, right in zip(views, then, strict=True):
        np.testing.assert_array_equal(view, right)


def test_the_rows_themselves_count_as_a_view(table):
    resident = stager.stage(table, device="cpu")
    rows = resident.rows
    with pytest.warns(ResourceWarning, match="1 views"):
        resident.close()
    assert rows[0, 3] == Cut(table, STEPS, 1).x[0, 0, 3]


def test_views_that_refer_to_their_base_are_counted_once():
    """CuPy's arrays at made-up addresses: each view refers to the rows and to the memory."""
    cupy = pytest.importorskip("cupy")
    from stager.batches.devices import Device
    from stager.batches.resident import Resident

    for n in (0, 1, 3):
        memory = cupy.cuda.UnownedMemory(0x10000, 4000, object(), 0)
        rows = cupy.ndarray((100, 10), np.float32, cupy.cuda.MemoryPointer(memory, 0))
        resident = Resident(memory_pack({"A": range(5)}), Device(0, "a test"), "device", "made up", rows, memory)
        views = [rows[k : k + 5] for k in range(n)]
        del rows, memory
        if n:
            with pytest.warns(ResourceWarning, match=f"{n} views"):
                resident.close()
        else:
            resident.close()
        assert len(views) == n


def test_without_views_closing_is_silent(table):
    for _ in range(3):
        one = Stager(table, window=7, batch_size=16, device="cpu")
        view = one.view(0, 0, 0)
        batches = one.batches()
        next(batches)
        del view
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one.close()


def test_two_stagers_over_one_resident(table):
    with stager.stage(table, device="cpu") as resident:
        short = Stager(resident, window=3, batch_size=8)
        with Stager(resident, window=9, batch_size=4, target=Target(horizon=2)) as long:
            for one, window, reach in ((short, 3, None), (long, 9, 3)):
                cut = Cut(table, STEPS, window, reach)
                x, _, ids, _ = serve(one)
                np.testing.assert_array_equal(x, cut.x[ids])
        # A borrower's close frees nothing.
        assert not resident.closed
        x, _, ids, _ = serve(short)
        np.testing.assert_array_equal(x, Cut(table, STEPS, 3).x[ids])
        short.close()
        assert not resident.closed
        assert resident.rows.shape == (table.num_rows, 5)
    assert resident.closed


def test_what_a_stager_staged_itself_it_closes(table):
    with Stager(table, window=3, batch_size=8, device="cpu") as one:
        resident = one.resident
    assert resident.closed
    with pytest.raises(ClosedError, match="stage the pack again"):
        _ = resident.rows
    resident.close()


# -------------------------------------------------------------------------------- sources


@pytest.mark.parametrize("kind", ["table", "csv", "csv as text", "pack", "path of a pack", "resident", "other pack"])
def test_every_kind_of_source_serves_the_same(table, tmp_path, kind, make):
    (tmp_path / "bars.csv").write_text(csv_text(table))
    source = {
        "table": lambda: table,
        "csv": lambda: tmp_path / "bars.csv",
        "csv as text": lambda: str(tmp_path / "bars.csv"),
        "pack": lambda: stager.pack(table, tmp_path / "bars.pack"),
        "path of a pack": lambda: stager.pack(table, tmp_path / "bars.pack").path,
        "other pack": lambda: str(stager.pack(table, tmp_path / "bars").path),
        "resident": lambda: stager.stage(table, device="cpu"),
    }[kind]()
    cut = Cut(table, STEPS, 7)
    one = make(source)
    x, _, ids, _ = serve(one)
    np.testing.assert_array_equal(x, cut.x[ids])
    assert one.resident.path == ("mapped" if "pack" in kind else "in memory")
    assert one.resident.placement == "host"
    assert one.resident.n_allocations == 0
    assert one.plan.device == "cpu"
    if kind == "resident":
        source.close()


def test_staging_a_path_that_is_no_pack_says_so(tmp_path):
    from stager.errors import NotAPackError

    with pytest.raises(NotAPackError, match=r"missing\.pack"):
        Stager(tmp_path / "missing.pack", window=3, batch_size=1, device="cpu")


def test_a_closed_stager_of_a_pack_leaves_the_pack_usable(table, tmp_path):
    pack = stager.pack(table, tmp_path / "bars.pack")
    for _ in range(3):
        with Stager(pack, window=3, batch_size=100, device="cpu") as one:
            serve(one)
    assert pack.rows.shape == (table.num_rows, 5)


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 0}, SampleError, "batch_size is 0"),
        ({"batch_size": -3}, SampleError, "batch_size"),
        ({"batch_size": 2.0}, SampleError, "batch_size is 2.0"),
        ({"batch_size": True}, SampleError, "batch_size"),
        ({"window": 0}, SampleError, "window is 0"),
        ({"window": 2.5}, SampleError, "window"),
        ({"normalize": "minmax"}, SampleError, "normalize is 'minmax'"),
        ({"normalize": None}, SampleError, "normalize is None"),
        ({"last": "fill"}, SampleError, "last is 'fill'"),
        ({"ranks": 2}, ConfigError, "ranks is 2"),
        ({"select": {"stride": 2}}, SampleError, r"select is \{'stride': 2\}; give Select"),
        ({"select": Select}, SampleError, "select is <class"),
        ({"placement": "disk"}, ConfigError, "placement is 'disk'; there are 'auto', 'device', 'spread', 'host'"),
        ({"sampling": "weighted"}, SampleError, "weights None"),
        ({"shuffle": "block", "block": 0}, SampleError, "block is 0"),
        ({"shuffle": "yes"}, SampleError, "shuffle"),
        ({"shuffle": True}, SampleError, "shuffle"),
        ({"seed": -1}, SampleError, "seed"),
        ({"seed": 1 << 64}, SampleError, "seed"),
        ({"seed": 0.5}, SampleError, "seed"),
        ({"device": "gpu"}, ConfigError, "device is 'gpu'"),
        ({"device": 0}, ConfigError, "device"),
        ({"placement": "disk"}, ConfigError, "placement"),
        ({"placement": "device"}, ConfigError, "needs a GPU"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_staged(monkeypatch, table, options, error, text):
    from stager.batches import resident

    def never(*_):
        raise AssertionError("something was staged")

    monkeypatch.setattr(resident, "as_pack", never)
    with pytest.raises(error, match=text):
        Stager(table, **{"window": 3, "batch_size": 4, "device": "cpu", **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 60}, "longest run has 53"),
        ({"window": 7, "select": Select(symbols=["nobody"])}, "no symbol 'nobody'"),
        ({"window": 7, "target": Target("vwap", horizon=1)}, "vwap"),
        ({"window": 7, "select": Select(interval=("2030-01-01", None))}, "no sample"),
    ],
)
def test_a_request_without_samples_leaves_nothing_open(monkeypatch, tmp_path, table, options, text):
    from stager.batches import stager as facade

    staged = []
    for name in ("stage", "stage_as"):
        real = getattr(facade, name)
        monkeypatch.setattr(
            facade, name, lambda *args, real=real, **how: staged.append(real(*args, **how)) or staged[-1]
        )
    with pytest.raises(SampleError, match=text):
        Stager(table, batch_size=4, device="cpu", **options)
    (tmp_path / "x.toml").write_text("[batches]\nbatch_size = 4\n")
    with pytest.raises(SampleError, match=text):
        Stager.from_config(tmp_path / "x.toml", source=table, device="cpu", **options)
    assert [one.closed for one in staged] == [True, True]


def test_a_resident_lies_where_it_was_staged(table):
    with (
        stager.stage(table, device="cpu") as resident,
        pytest.raises(ConfigError, match="a Resident lies where it was staged"),
    ):
        Stager(resident, window=3, batch_size=1, device="cpu")


# -------------------------------------------------------------------------------- configuration

TOML = """
source = "data/bars.pack"

[batches]
window = 7
batch_size = 16
seed = 3

[target]
horizon = 2
kind = "difference"

[select]
symbols = ["A", "C"]

[staging]
device = "cpu"
stall_timeout = 12.5
"""


@pytest.fixture
def config(tmp_path, table, monkeypatch):
    for name in ("BATCHES_SEED", "STAGING_DEVICE", "STAGING_STALL_TIMEOUT"):
        monkeypatch.delenv(f"STAGER_{name}", raising=False)
    (tmp_path / "data").mkdir()
    stager.pack(table, tmp_path / "data" / "bars.pack")
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def test_from_config_serves_as_the_arguments_would(config, table, make):
    other = make(window=7, batch_size=16, seed=3, target=Target(horizon=2, kind="difference"),
                 select=Select(symbols=["A", "C"]))  # fmt: skip
    with Stager.from_config(config) as one:
        for batch, right in zip(one.batches(4), other.batches(4), strict=True):
            np.testing.assert_array_equal(batch.x, right.x)
            np.testing.assert_array_equal(batch.y, right.y)
        assert one.resident.stall_timeout == 12.5


def test_arguments_win_over_the_environment_and_that_over_the_file(config, monkeypatch):
    monkeypatch.setenv("STAGER_BATCHES_SEED", "8")
    monkeypatch.setenv("STAGER_STAGING_STALL_TIMEOUT", "7")
    with Stager.from_config(str(config), batch_size=5, target=None, select=Select()) as one:
        assert (one.seed, one.batch_size, one.window, one.target) == (8, 5, 7, None)
        assert one.resident.stall_timeout == 7
        assert next(one.batches()).y is None
    with Stager.from_config(config, seed=9) as one:
        assert one.seed == 9


def test_from_config_takes_several_targets(config):
    text = config.read_text().replace("[target]", "[[target]]")
    config.write_text(text + '\n[[target]]\nhorizon = 5\nscale = "rank"\n')
    with Stager.from_config(config) as one:
        assert next(one.batches()).y.shape == (16, 2)
        assert one.target == [Target(horizon=2, kind="difference"), Target(horizon=5, scale="rank")]


def test_from_config_normalises(config, monkeypatch):
    config.write_text(config.read_text().replace("seed = 3", 'seed = 3\nnormalize = "last"'))
    with Stager.from_config(config) as one:
        assert one.plan.normalize == "price last, volume log1p, other none"
    monkeypatch.setenv("STAGER_BATCHES_NORMALIZE", "zscore")
    with Stager.from_config(config) as one:
        assert one.plan.normalize == "price zscore, volume zscore, other zscore"
    with Stager.from_config(config, normalize=stager.Normalize("none", "zscore")) as one:
        assert one.plan.normalize == "price none, volume zscore, other none"
    monkeypatch.delenv("STAGER_BATCHES_NORMALIZE")
    config.write_text(config.read_text().replace('"last"', '"lats"'))
    with pytest.raises(ConfigError, match="normalize is 'lats'"):
        Stager.from_config(config)


def test_from_config_casts(config):
    config.write_text(config.read_text().replace("seed = 3", 'seed = 3\ndtype = "float16"'))
    with Stager.from_config(config) as one, Stager.from_config(config, dtype="float32") as whole:
        assert (next(one.batches()).x.dtype, next(whole.batches()).x.dtype) == (np.float16, np.float32)
    config.write_text(config.read_text().replace("float16", "float8"))
    with pytest.raises(ConfigError, match="dtype is 'float8'"):
        Stager.from_config(config)


def test_from_config_derives_first(config, make):
    derived = '[derive]\ncolumns = ["range"]\nfill = "previous"\ncap = 3\n\n[batches]'
    config.write_text(config.read_text().replace("[batches]", derived))
    for _ in range(2):
        with Stager.from_config(config) as one:
            assert one.plan.columns == ("open", "high", "low", "close", "volume", "is_filled", "range")
            # B has a gap of 3 missing bars, C of 2; A and B end before C does, and are not selected or filled in.
            assert one.plan.n_rows == 30 + 3 + 72 + 3 + 3 + 58 + 2
            assert one.resident.path == "mapped"
    assert len(list((config.parent / "data").iterdir())) == 2
    config.write_text(config.read_text().replace("cap = 3", "kap = 3"))
    with pytest.raises(ConfigError, match=r"\[derive\] kap is no option"):
        Stager.from_config(config)


def test_tables_lie_beside_the_configuration(config):
    (config.parent / "data" / "universe.csv").write_text("symbol,start,end\nA,2024-01-01,\n")
    (config.parent / "labels.csv").write_text(
        "symbol,time,side,until\nA,2024-01-01 00:10:00,1,2024-01-01 00:20:00\nC,2024-01-01 00:20:00,-1,2024-01-02\n"
        "A,2024-01-01 00:21:00,-1,2024-01-02\n"
    )
    text = config.read_text().replace(
        'horizon = 2\nkind = "difference"', 'table = "labels.csv"\nvalue = "side"\nend = "until"'
    )
    config.write_text(text.replace("[select]", '[select]\nuniverse = "data/universe.csv"'))
    with Stager.from_config(config) as one:
        x, y, _, _ = serve(one)
        assert sorted(y) == [-1.0, 1.0]
        assert set(x[:, -1, 3] % 1e6) == {10.0, 21.0}


def test_from_config_takes_a_source_of_its_own(config, table):
    with stager.stage(table, device="cpu") as resident:
        with Stager.from_config(config, source=resident) as one:
            assert one.resident is resident
        assert not resident.closed
        with pytest.raises(ConfigError, match="a Resident lies"):
            Stager.from_config(config, source=resident, device="cpu")
    with Stager.from_config(config, source=table) as one:
        assert one.resident.path == "in memory"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('source = "data/bars.pack"', "", "says no source"),
        ('source = "data/bars.pack"', "source = 5", "says no source"),
        ("[select]", "[selection]", r"no table \[selection\]"),
        ("seed = 3", "sede = 3", r"\[batches\] sede is no option"),
        ("seed = 3", 'seed = "x"', r"\[batches\] seed is 'x'"),
        ("window = 7", "", r"\[batches\] window is not given"),
        ("horizon = 2", "", r"\[target\] horizon is not given"),
        ('device = "cpu"', 'device = "tpu"', "device is 'tpu'"),
        ("stall_timeout = 12.5", 'stall_timeout = "soon"', r"\[staging\] stall_timeout"),
        ("stall_timeout = 12.5", "placement = 'disk'", r"\[staging\] placement"),
        ("[batches]", "[batches", "not readable as TOML"),
    ],
)
def test_a_wrong_file_is_refused(config, old, new, text):
    config.write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError, match=text):
        Stager.from_config(config)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such configuration file"):
        Stager.from_config(tmp_path / "none.toml")


def test_an_override_that_is_no_option_is_refused(config):
    with pytest.raises(ConfigError, match="windows is no option"):
        Stager.from_config(config, windows=3)


def test_a_missing_source_names_the_path_beside_the_file(config):
    from stager.errors import PackError

    config.write_text(TOML.replace("data/bars.pack", "data/other.pack"))
    with pytest.raises(PackError, match=r"data/other\.pack"):
        Stager.from_config(config)


# -------------------------------------------------------------------------------- staging on the CPU


def test_a_table_is_staged_as_it_is_packed(table):
    with stager.stage(table, device="cpu", progress=None) as resident:
        np.testing.assert_array_equal(resident.rows, Cut(table, STEPS, 1).x[:, 0])
        assert resident.nbytes == resident.rows.nbytes
        assert not resident.rows.flags.writeable
        assert "on cpu" in repr(resident)
    assert "closed" in repr(resident)


def test_the_environment_names_the_device(table, monkeypatch):
    monkeypatch.setenv("STAGER_STAGING_DEVICE", "cpu")
    with stager.stage(table) as resident:
        assert str(resident.device) == "cpu"
    monkeypatch.setenv("STAGER_STAGING_DEVICE", "abacus")
    with pytest.raises(ConfigError, match="abacus"):
        stager.stage(table)


def test_incomplete_bars_are_excluded_from_windows():
    values = np.arange(30.0)
    values[[4, 17]] = np.nan
    table = bar_table({"A": range(30)}).append_column("extra", pa.array(values, from_pandas=True))
    with Stager(table, window=3, batch_size=100, shuffle=False, device="cpu") as one:
        (batch,) = one.batches()
        assert np.isfinite(batch.x).all()
        assert one.n_samples == 28 - 6
        assert sum(one.plan.reasons.values()) + one.n_samples == 30


def test_a_bar_file_that_needs_options_is_read_with_them_and_packed(tmp_path, table, make):
    text = csv_text(table).replace("close", "last_px", 1)
    (tmp_path / "bars.csv").write_text(text)
    pack = stager.pack(tmp_path / "bars.csv", read=ReadOptions(columns={"close": "last_px"}))
    x, _, ids, _ = serve(make(pack))
    np.testing.assert_array_equal(x, Cut(table, STEPS, 7).x[ids])
