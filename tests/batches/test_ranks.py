"""Several ranks: equally many batches, together those of one; the last batch filled up and marked; tests unsharded."""

from __future__ import annotations

import json
import tracemalloc
from itertools import chain
from typing import Any

import numpy as np
import pytest
from bars_fixtures import bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

import stager
from stager import Panel, PurgedKFold, Ranks, Select, Stager, Target, WalkForward, panel
from stager.batches import host
from stager.errors import ConfigError, SampleError
from stager.samples.index import SampleIndex
from stager.samples.order import Order
from stager.samples.schedule import Schedule

STEPS = {"B": [*range(40), *range(43, 70)], "A": range(50), "C": [*range(5), *range(7, 80)]}
PACK = memory_pack(STEPS)
RESIDENT = stager.stage(PACK, device="cpu")


def make(**options: Any) -> Stager:
    return Stager(RESIDENT, **{"window": 4, "target": Target(horizon=2), "batch_size": 8, "seed": 5, **options})


def ids_of(part: Stager, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [batch.sample_ids.tolist() for batch in part.batches(epoch, start=start)]


# -------------------------------------------------------------------------------- Ranks


def test_ranks_are_told():
    assert Ranks() == Ranks(rank=0, world_size=1, local_rank=None)
    assert Ranks(np.int64(2), np.int32(4), np.int8(1)) == Ranks(2, 4, 1)
    with pytest.raises(AttributeError):
        Ranks().rank = 3


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((4, 4), "rank is 4 and world_size 4; it must be from 0 to world_size - 1, here 3"),
        ((-1, 4), "rank is -1"),
        ((0, 0), "world_size is 0; there is at least 1 rank"),
        ((0, -2), "world_size is -2"),
        ((0.0, 2), "rank is 0.0; it must be an integer"),
        ((True, 2), "rank is True"),
        ((0, "2"), "world_size is '2'"),
        ((0, 2, 2), "local_rank is 2 and world_size 2"),
        ((0, 2, -1), "local_rank is -1"),
        ((0, 2, "0"), "local_rank is '0'"),
        ((None, 2), "rank is None"),
    ],
)
def test_what_are_no_ranks_is_refused(values, text):
    with pytest.raises(ConfigError, match=text):
        Ranks(*values)


def test_ranks_come_from_the_environment_when_asked_for(monkeypatch):
    environ = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert Ranks.from_env(environ) == Ranks(3, 8, 1)
    del environ["LOCAL_RANK"]
    assert Ranks.from_env(environ) == Ranks(3, 8)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert Ranks.from_env() == Ranks(1, 2)
    with make() as alone:  # and never by itself
        assert alone.ranks == Ranks()


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "RANK is not set; start the processes with torchrun"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment; it must be an integer"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is ''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank is 2 and world_size 2.*the environment says RANK=2, WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "5"}, "local_rank is 5.*LOCAL_RANK=5"),
    ],
)
def test_a_wrong_environment_is_refused(environ, text):
    with pytest.raises(ConfigError, match=text):
        Ranks.from_env(environ)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, Ranks(5, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, Ranks(5, 8)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            Ranks(3, 4, 0),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, Ranks(2, 4, 1)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"}, Ranks(2, 4, 1)),
        # The launcher that was started last.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
         Ranks(3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
         Ranks(5, 8, 1)),
        # torchrun numbers nodes as they come, also in a job of more tasks than it was given.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
         Ranks(1, 2)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 2)),
        # salloc tells the number of tasks to come.
        ({"SLURM_NTASKS": "8", "RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 2)),
    ],
)  # fmt: skip
def test_ranks_of_other_launchers(environ, ranks):
    assert Ranks.from_env(environ) == ranks


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"SLURM_NTASKS": "8"}, "SLURM_PROCID is not set, and SLURM_NTASKS is; start the processes with srun"),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "SLURM_NTASKS is not set, and SLURM_PROCID, SLURM_LOCALID are"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set, .*mpirun"),
        ({"PMI_RANK": "2"}, "PMI_SIZE is not set"),
        ({"WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "RANK is not set, and WORLD_SIZE is"),
        ({"LOCAL_RANK": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "RANK is not set, and LOCAL_RANK is"),
        ({"SLURM_PROCID": "4", "SLURM_NTASKS": "4"}, "rank is 4 .*SLURM_PROCID=4, SLURM_NTASKS=4"),
        ({"PMI_RANK": "0", "PMI_SIZE": "many"}, "PMI_SIZE is 'many'"),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"},
         "RANK=0 and WORLD_SIZE=1, but SLURM_PROCID=2 and SLURM_NTASKS=4; unset"),
        ({"RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
         "RANK=0 and WORLD_SIZE=2, but OMPI_COMM_WORLD_RANK=1"),
    ],
)  # fmt: skip
def test_partial_and_contradictory_variables_are_refused_by_name(environ, text):
    with pytest.raises(ConfigError, match=text):
        Ranks.from_env(environ)


# -------------------------------------------------------------------------------- batches


@settings(deadline=None, max_examples=80)
@given(
    shuffle=st.sampled_from(["full", "block", "time", False]),
    last=st.sampled_from(["drop", "pad"]),
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 6),
    epoch=st.integers(0, 3),
    weighted=st.booleans(),
)
def test_ranks_share_every_batch(shuffle, last, batch_size, world_size, epoch, weighted):
    options: dict[str, Any] = {"shuffle": shuffle, "last": last}
    if shuffle == "block":
        options["block"] = 16
    if weighted and shuffle == "full":
        options |= {"sampling": "weighted", "weights": "uniqueness"}
    together = batch_size * world_size
    try:
        alone = make(batch_size=together, **options)
    except SampleError:
        with pytest.raises(SampleError, match="last='drop' serves no shorter one"):
            make(batch_size=batch_size, ranks=Ranks(0, world_size), **options)
        return
    parts = [make(batch_size=batch_size, ranks=Ranks(rank, world_size), **options) for rank in range(world_size)]
    assert {len(part) for part in parts} == {len(alone)}
    served = [list(part.batches(epoch)) for part in parts]
    assert {len(batches) for batches in served} == {len(alone)}
    whole, valid = [], []
    for number, batch in enumerate(alone.batches(epoch)):
        mine = [batches[number] for batches in served]
        assert all(one.number == number for one in mine)
        np.testing.assert_array_equal(np.concatenate([one.sample_ids for one in mine]), batch.sample_ids)
        np.testing.assert_array_equal(np.concatenate([one.x for one in mine]), batch.x)
        np.testing.assert_array_equal(np.concatenate([one.y for one in mine]), batch.y)
        np.testing.assert_array_equal(np.concatenate([one.valid for one in mine]), batch.valid)
        for part, one in zip(parts, mine, strict=True):
            place = len(one) - 1
            assert part.sample_id(epoch, number, place) == one.sample_ids[place]
        whole.append(batch.sample_ids)
        valid.append(batch.valid)
        assert number == len(alone) - 1 or batch.valid.all()
    if not weighted or shuffle != "full":
        kept = np.concatenate(whole)[np.concatenate(valid)]
        assert len(np.unique(kept)) == len(kept)
        assert last == "drop" or len(kept) == alone.n_samples
    for part in (alone, *parts):
        part.close()


@pytest.mark.parametrize("shuffle", ["full", "block", "time", False])
@pytest.mark.parametrize("ranks", [Ranks(), Ranks(1, 3), Ranks(2, 3)])
def test_padding_goes_on_at_the_beginning(shuffle, ranks):
    """Also where a batch of all ranks is larger than the epoch, several times over."""
    with make(shuffle=shuffle, batch_size=1) as one:
        units = ids_of(one, 2)
    for batch_size in (7, 64, len(units), 2 * len(units) + 3):
        with make(shuffle=shuffle, batch_size=batch_size, ranks=ranks, last="pad") as part:
            together = batch_size * ranks.world_size
            assert len(part) == -(-len(units) // together)
            for batch in part.batches(2):
                begin = batch.number * together + ranks.rank * batch_size
                places = range(begin, begin + batch_size)
                assert batch.sample_ids.tolist() == [s for p in places for s in units[p % len(units)]]
                assert batch.valid.tolist() == [p < len(units) for p in places for _ in units[p % len(units)]]
                assert batch.x.shape[0] == len(batch.valid) == len(batch)


@pytest.mark.parametrize("how", ["full", "block"])
def test_a_billion_samples_cost_nothing(how):
    """From the index to the gathered rows; what is touched of the rows is what a batch reads."""
    n_rows, window = 1_000_000_063, 64
    rows = np.zeros((n_rows, 1), np.float32)  # not touched, so it takes no memory
    index = SampleIndex(
        window, np.array([window - 1]), np.array([0, n_rows - window + 1]), None, {}, n_rows, 1, breaks=None
    )  # fmt: skip
    gather = host.HostGather(rows, index)
    tracemalloc.start()
    for epoch in range(2):
        schedule = Schedule(Order(index.n_samples, 7, epoch, how), 16, None, 64, 16, pad=True)
        last = -(-index.n_samples // 64) - 1
        for batch in (0, last // 2, last):
            ids = schedule.sample_ids(batch, batch + 1)
            rows[index.rows(ids), 0] = ids.astype(np.float32)
            ((x,),) = gather.batches(schedule, batch, batch + 1)
            np.testing.assert_array_equal(x[:, -1, 0], ids.astype(np.float32))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gather.close()
    assert index.nbytes == 24
    assert peak < 4 << 20


def test_a_shorter_last_batch_is_marked_valid():
    with make() as one:
        *_, batch = one.batches()
        assert 0 < len(batch) < 8
        assert batch.valid.all()


def test_threads_and_groups_serve_ranks_alike(monkeypatch):
    options: dict[str, Any] = {"ranks": Ranks(1, 3), "last": "pad", "batch_size": 3}
    with make(**options) as one, make(**options) as other:
        whole = [(batch.x, batch.y) for batch in one.batches(1)]
        monkeypatch.setattr(host, "_TASK_NBYTES", 700)
        monkeypatch.setattr(host, "_ORDER_POSITIONS", 16)
        for batch, (x, y) in zip(other.batches(1), whole, strict=True):
            np.testing.assert_array_equal(batch.x, x)
            np.testing.assert_array_equal(batch.y, y)


def test_a_panel_is_shared_alike(tmp_path):
    pack = stager.pack(bar_table(STEPS), tmp_path / "bars.pack")
    options: dict[str, Any] = {"window": 4, "target": Target(horizon=2), "seed": 1, "device": "cpu", "last": "pad"}
    wide = panel(pack, Panel())
    with Stager(wide, batch_size=12, **options) as whole:
        parts = [Stager(wide, batch_size=4, ranks=Ranks(rank, 3), **options) for rank in range(3)]
        for batch, *mine in zip(whole.batches(1), *(part.batches(1) for part in parts), strict=True):
            for name in ("x", "y", "mask", "valid", "sample_ids"):
                np.testing.assert_array_equal(
                    np.concatenate([getattr(one, name) for one in mine]), getattr(batch, name)
                )


def test_the_plan_tells_the_ranks():
    with make(ranks=Ranks(1, 4), last="drop") as one, make() as alone:
        assert (one.plan.world_size, one.plan.n_batches, one.plan.batch_size) == (4, len(one), 8)
        assert "8 an epoch on each of 4 ranks" in str(one.plan)
        assert "ranks" not in str(alone.plan)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ranks": Ranks(0, 2)}, SampleError, "last is 'keep' on 2 ranks, .* use last='drop', or last='pad'"),
        ({"ranks": 2}, ConfigError, r"ranks is 2; give Ranks\(rank, world_size\) or Ranks.from_env\(\)"),
        ({"ranks": (0, 2)}, ConfigError, r"ranks is \(0, 2\)"),
        ({"ranks": Ranks(0, 1 << 40), "batch_size": 1 << 40, "last": "pad"}, SampleError, "less than 2\\*\\*62"),
        ({"ranks": Ranks(0, 200), "last": "drop"}, SampleError, "fill no batch of 1,600.*last='pad'"),
        ({"last": "fill"}, SampleError, "last is 'fill'; there are 'keep', 'drop' and 'pad'"),
        ({"block": 4}, SampleError, "block is 4 and shuffle 'full'; blocks are for shuffle='block'"),
        ({"shuffle": "block", "block": 0}, SampleError, "block is 0; it must be an integer of at least 1"),
    ],
)
def test_refusals(options, error, text):
    with pytest.raises(error, match=text):
        make(**options)


# -------------------------------------------------------------------------------- folds


@pytest.mark.parametrize("shuffle", ["full", "block", "time"])
def test_folds_train_on_ranks_and_test_on_each(shuffle):
    with make(shuffle=shuffle, batch_size=6) as one:
        wanted = [(ids_of(fold.train, 1), ids_of(fold.test)) for fold in one.split(WalkForward(2))]
    parts = [make(shuffle=shuffle, batch_size=2, ranks=Ranks(rank, 3), last="pad") for rank in range(3)]
    for number, (train, _) in enumerate(wanted):
        folds = [part.split(WalkForward(2))[number] for part in parts]
        shared = [ids_of(fold.train, 1) for fold in folds]
        together = [list(chain(*mine)) for mine in zip(*shared, strict=True)]
        assert together[:-1] == train[:-1]
        assert together[-1][: len(train[-1])] == train[-1]
        for fold in folds:
            assert fold.test.ranks == Ranks()
            assert fold.train.ranks.world_size == 3
            batches = list(fold.test.batches())
            assert all(batch.valid.all() for batch in batches)
            assert list(chain(*(batch.sample_ids for batch in batches))) == list(range(fold.test.n_samples))
            times = np.concatenate([batch.times for batch in batches])
            assert (np.diff(times.view(np.int64)) >= 0).all()
            predictions = np.concatenate([batch.y for batch in batches])
            table = fold.test.to_table(predictions)
            np.testing.assert_array_equal(table["prediction"].to_numpy(), table["target"].to_numpy())
            # What is split again is a training again, on one rank.
            assert fold.test.split(PurgedKFold(2))[0].train.ranks == Ranks()


def test_predictions_of_a_padded_epoch_are_counted_once():
    with make(shuffle=False, last="pad", batch_size=50) as one:
        batches = list(one.batches())
        everything = np.concatenate([batch.y for batch in batches])
        kept = np.concatenate([batch.valid for batch in batches])
        assert len(everything) > one.n_samples == kept.sum()
        with pytest.raises(SampleError, match=r"one for each sample; leave out what batch.valid marks false"):
            one.to_table(everything)
        table = one.to_table(everything[kept])
        np.testing.assert_array_equal(table["prediction"].to_numpy(), table["target"].to_numpy())


def test_the_newest_windows_ignore_ranks():
    with make(target=None, ranks=Ranks(2, 3), last="pad") as one, make(target=None) as alone:
        np.testing.assert_array_equal(one.latest().x, alone.latest().x)
        assert one.latest().valid.all()


# -------------------------------------------------------------------------------- going on with other ranks


@settings(deadline=None, max_examples=60)
@given(
    shuffle=st.sampled_from(["full", "block", "time", False]),
    last=st.sampled_from(["drop", "pad"]),
    before=st.sampled_from([1, 2, 3, 4, 6, 12]),
    after=st.sampled_from([1, 2, 3, 4, 6, 12]),
    place=st.floats(0, 1),
)
def test_a_training_goes_on_with_another_number_of_ranks(shuffle, last, before, after, place):
    def those(n: int) -> list[Stager]:
        return [make(shuffle=shuffle, last=last, batch_size=12 // n, ranks=Ranks(rank, n)) for rank in range(n)]

    def served(parts: list[Stager], epoch: int, start: int, stop: int | None = None) -> list[list[int]]:
        mine = [ids_of(part, epoch, start)[: None if stop is None else stop - start] for part in parts]
        return [list(chain(*batches)) for batches in zip(*mine, strict=True)]

    first, second = those(before), those(after)
    stop = round(place * len(first[0]))
    whole = served(first, 1, 0) + served(first, 2, 0)
    states = {json.dumps(part.state_dict(1, stop)) for part in first}
    assert len(states) == 1
    places = {part.resume(json.loads(*states)) for part in second}
    assert len(places) == 1
    ((epoch, start),) = places
    assert (epoch, start) == ((2, 0) if stop == len(first[0]) else (1, stop))
    rest = served(second, epoch, start) + (served(second, 2, 0) if epoch == 1 else [])
    assert served(first, 1, 0, stop) + rest == whole


def test_after_a_break():
    with make(batch_size=3, ranks=Ranks(1, 2), last="pad") as one, make(batch_size=6, last="pad") as other:
        for batch in one.batches(4):
            if batch.number == 3:
                break
        epoch, start = other.resume(one.state_dict(4, batch.number + 1))
        assert (epoch, start) == (4, 4)
        assert next(other.batches(epoch, start=start)).sample_ids[3:].tolist() == ids_of(one, 4)[4]


def test_one_rank_that_kept_goes_on_as_several_that_pad():
    with make(batch_size=8) as one, make(batch_size=4, ranks=Ranks(1, 2), last="pad") as other:
        assert other.resume(one.state_dict(1, 3)) == (1, 3)
        assert one.resume(other.state_dict(1, 3)) == (1, 3)
        assert other.resume(one.state_dict(1, len(one))) == (2, 0)


def test_another_global_batch_is_refused_by_name():
    with (
        make(batch_size=4, ranks=Ranks(0, 2), last="pad") as one,
        make(batch_size=4, ranks=Ranks(0, 3), last="pad") as other,
        pytest.raises(SampleError, match="another global batch, world_size \\* batch_size: 8, and this Stager has 12"),
    ):
        other.resume(one.state_dict(0, 1))


# -------------------------------------------------------------------------------- weights


def test_samples_are_drawn_by_weight():
    with make() as plain:
        n = plain.n_samples
    weights = np.where(np.arange(n) % 4 == 0, 3.0, np.where(np.arange(n) % 4 == 1, 0.0, 1.0))
    with make(sampling="weighted", weights=weights) as one:
        assert one.n_samples == n
        assert len(one) == -(-n // 8)
        counts = np.zeros(n)
        for epoch in range(300):
            for ids in ids_of(one, epoch):
                counts += np.bincount(ids, minlength=n)
        assert counts.sum() == 300 * n
        assert (counts[weights == 0] == 0).all()
        assert abs(counts[weights == 3].mean() / counts[weights == 1].mean() - 3) < 0.05
        assert ids_of(one, 3) == ids_of(one, 3) != ids_of(one, 4)
        for batch in one.batches(1):
            np.testing.assert_array_equal(batch.x[0], one.view(1, batch.number, 0))
            assert batch.valid.all()
        assert one.plan.weighted
        assert "drawn by weight" in str(one.plan)
        with make() as plain:
            assert one.plan.tables_nbytes == plain.plan.tables_nbytes + 16 * n


def test_uniqueness_is_a_weight():
    with make(target=Target(horizon=20), sampling="weighted", weights="uniqueness") as one:
        weights = np.empty(one.n_samples)
        with make(target=Target(horizon=20)) as plain:
            for batch in plain.batches():
                weights[batch.sample_ids] = batch.weight
        with make(target=Target(horizon=20), sampling="weighted", weights=weights) as other:
            assert ids_of(one, 2) == ids_of(other, 2)
        assert len(np.unique(weights)) > 10


def test_weights_follow_their_samples_into_folds():
    with make() as plain:
        n = plain.n_samples
        key = {(s, t): i for batch in plain.batches() for s, t, i in
               zip(batch.symbols, batch.times.tolist(), batch.sample_ids.tolist(), strict=True)}  # fmt: skip
    weights = np.random.default_rng(1).random(n) * (np.arange(n) % 3 > 0)
    with make(sampling="weighted", weights=weights) as one:
        for fold in one.split(PurgedKFold(3)):
            table = fold.train._epochs._weights
            for i, (s, t) in enumerate(zip(fold.train._about.symbols(np.arange(fold.train.n_samples)),
                                           fold.train._about.times(np.arange(fold.train.n_samples)).tolist(),
                                           strict=True)):  # fmt: skip
                assert table[i] == weights[key[s, t]]
            drawn = np.concatenate([batch.sample_ids for batch in fold.train.batches(1)])
            assert len(drawn) == fold.train.n_samples > len(np.unique(drawn))
            assert (table[drawn] > 0).all()
            # A test is not drawn.
            assert list(chain(*ids_of(fold.test))) == list(range(fold.test.n_samples))
            assert not fold.test.plan.weighted


def test_a_fold_without_weight_is_refused():
    with make() as plain:
        early = np.concatenate([batch.times for batch in make(shuffle=False).batches()])
    weights = (early < np.sort(early)[len(early) // 3]).astype(float)
    with make(sampling="weighted", weights=weights) as one:
        fold = one.split(PurgedKFold(2))[0]
        with pytest.raises(SampleError, match="weights of fold 1 of 2, train are 0"):
            fold.train  # noqa: B018
    assert plain.n_samples == len(weights)


def test_weights_are_part_of_the_state():
    with make() as plain:
        n = plain.n_samples
        state = plain.state_dict(0, 1)
    with (
        make(sampling="weighted", weights=np.arange(n)) as one,
        make(sampling="weighted", weights=np.arange(n) * 2.0) as same,
        make(sampling="weighted", weights=np.arange(n) + 1) as other,
    ):
        assert one.resume(json.loads(json.dumps(one.state_dict(2, 1)))) == (2, 1)
        assert same.resume(one.state_dict(2, 1)) == (2, 1)  # the same shares
        with pytest.raises(SampleError, match="digest of window, target, selection, normalisation, weights and fold"):
            other.resume(one.state_dict(2, 1))
        with pytest.raises(SampleError, match="algorithm of the order: 'feistel32-1', and this Stager has 'alias64-1'"):
            one.resume(state)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sampling": "weighted"}, "sampling is 'weighted' and weights None; give an array"),
        ({"sampling": "weighted", "weights": "volume"}, "weights 'volume'; give an array .* or 'uniqueness'"),
        ({"weights": "uniqueness"}, "weights are given; .* with sampling='weighted'"),
        ({"sampling": "random"}, "sampling is 'random'; there are 'once' and 'weighted'"),
        ({"sampling": "weighted", "weights": "uniqueness", "shuffle": "time"}, "leave shuffle at 'full'"),
        ({"sampling": "weighted", "weights": "uniqueness", "shuffle": False}, "leave shuffle at 'full'"),
        ({"sampling": "weighted", "weights": [1.0, 2.0]}, r"weights have shape \(2,\); give \("),
    ],
)
def test_refusals_of_weights(options, text):
    with pytest.raises(SampleError, match=text):
        make(**options)


# -------------------------------------------------------------------------------- configuration


def test_a_configuration_tells_all_but_the_rank(tmp_path, monkeypatch):
    stager.pack(bar_table(STEPS), tmp_path / "bars.pack")
    text = 'source = "bars.pack"\n[batches]\nwindow = 4\nbatch_size = 8\n{}\n[staging]\ndevice = "cpu"\n'
    config = tmp_path / "my.toml"
    config.write_text(text.format('shuffle = "block"\nblock = 16\nlast = "pad"'))
    with Stager.from_config(config, ranks=Ranks(1, 2)) as one, Stager.from_config(config) as alone:
        assert (one.ranks, alone.ranks) == (Ranks(1, 2), Ranks())
        assert len(one) == -(-alone.n_samples // 16)
        assert one.state_dict(0, 0)["block"] == 16
    config.write_text(text.format('sampling = "weighted"\nweights = "uniqueness"'))
    with Stager.from_config(config) as one:
        assert one.plan.weighted
        weights = np.arange(one.n_samples)
    with Stager.from_config(config, weights=weights) as one:
        assert 0 not in list(chain(*ids_of(one)))
    config.write_text(text.format("block = 0"))
    with pytest.raises(ConfigError, match="block"):
        Stager.from_config(config)
    config.write_text(text.format(""))
    monkeypatch.setenv("STAGER_BATCHES_LAST", "pad")
    with Stager.from_config(config, ranks=Ranks(0, 2)) as one:
        assert one.ranks.world_size == 2


def test_selection_and_ranks_compose():
    options: dict[str, Any] = {"select": Select(symbols=["A", "C"]), "last": "drop"}
    with make(batch_size=10, **options) as whole:
        parts = [make(batch_size=5, ranks=Ranks(rank, 2), **options) for rank in range(2)]
        assert [a + b for a, b in zip(*map(ids_of, parts), strict=True)] == ids_of(whole)
