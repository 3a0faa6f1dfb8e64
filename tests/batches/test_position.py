"""Going on with a training where it stopped, and only with the same data, order and samples."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager import Normalize, PurgedKFold, ReadOptions, Select, Stager, Target
from stager.errors import SampleError
from stager.packs.packing import pack_in_memory

STEPS = {"A": range(60), "B": [*range(25), *range(30, 55)]}
PACK = memory_pack(STEPS)


def make(source: Any = PACK, **options: Any) -> Stager:
    return Stager(source, **{"window": 4, "batch_size": 8, "seed": 5, "device": "cpu", **options})


@settings(deadline=None, max_examples=40)
@given(
    shuffle=st.sampled_from(["full", "block", "time", False]),
    last=st.sampled_from(["keep", "drop", "pad"]),
    batch_size=st.integers(1, 40),
    stop=st.integers(0, 60),
    epochs=st.integers(1, 3),
)
def test_what_comes_after_the_stop_is_what_would_have_come(shuffle, last, batch_size, stop, epochs):
    options = {"shuffle": shuffle, "last": last, "batch_size": batch_size, "target": Target(horizon=2)}
    whole, state = [], None
    with make(**options) as first:
        for epoch in range(epochs):
            for batch in first.batches(epoch):
                if state is None and len(whole) == stop:
                    state = json.dumps(first.state_dict(epoch, batch.number))
                whole.append(batch.x.tobytes())
        if state is None:
            stop, state = len(whole), json.dumps(first.state_dict(epochs - 1, len(first)))
    rest = []
    with make(memory_pack(STEPS), **options) as second:
        epoch, start = second.resume(json.loads(state))
        while epoch < epochs:
            rest += [batch.x.tobytes() for batch in second.batches(epoch, start=start)]
            epoch, start = epoch + 1, 0
    assert whole[:stop] + rest == whole


def test_a_state_is_a_few_plain_values():
    with make() as one:
        state = one.state_dict(np.int64(3), np.int32(2))
        assert json.loads(json.dumps(state)) == state
        assert len(json.dumps(state)) < 500
        assert (state["epoch"], state["next_batch"], state["seed"]) == (3, 2, 5)
        assert one.resume(state) == (3, 2)
        assert one.resume(one.state_dict(3, len(one))) == (4, 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 6}, "seed: 5, and this Stager has 6"),
        ({"batch_size": 9}, "batch_size: 8, and this Stager has 9"),
        ({"shuffle": False}, "shuffle: 'full'"),
        ({"last": "drop"}, "last: 'keep'"),
        ({"window": 5}, "number of samples"),
        ({"target": Target(horizon=2)}, "number of samples"),
        ({"select": Select(symbols=["A"])}, "number of samples"),
        ({"normalize": "last"}, "digest of window, target"),
        ({"select": Select(columns=["close"])}, "digest of window, target"),
        ({"normalize": Normalize("zscore", "none", "none", fit="train")}, "digest of window, target"),
    ],
)
def test_another_training_is_refused_by_name(options, named):
    with make() as one, make(**options) as other, pytest.raises(SampleError, match=named):
        other.resume(one.state_dict(0, 1))


def test_another_target_of_as_many_samples_is_refused():
    with (
        make(target=Target(horizon=2)) as one,
        make(target=Target(horizon=2, kind="log_return")) as other,
        pytest.raises(SampleError, match="target"),
    ):
        other.resume(one.state_dict(0, 1))


def test_other_data_are_refused():
    table = bar_table(STEPS)
    close = table["close"].to_numpy().copy()
    close[7] += 1e-9 * close[7]
    changed = pack_in_memory(
        table.set_column(table.column_names.index("close"), "close", pa.array(close)), ReadOptions(interval="1min")
    )
    with make() as one, make(changed) as other, pytest.raises(SampleError, match="fingerprint of the data"):
        other.resume(one.state_dict(0, 0))


def test_another_fold_is_refused():
    with make(target=Target(horizon=2)) as one:
        first, second = one.split(PurgedKFold(2))
        state = first.train.state_dict(0, 1)
        assert first.train.resume(state) == (0, 1)
        for other in (second.train, first.test, one):
            with pytest.raises(SampleError, match="the training was of another"):
                other.resume(state)


@pytest.mark.parametrize("shuffle", ["full", "time", False])
def test_a_state_of_version_1_is_read(shuffle):
    """It had the batch size of one process, and one name for the order, shuffled or not."""
    with make(shuffle=shuffle) as one:
        state = one.state_dict(2, 3)
        old = {"version": 1, "order": "feistel32-1", "seed": 5, "shuffle": shuffle, "last": "keep", "batch_size": 8,
               "n_samples": one.n_samples, "data": state["data"], "samples": one._index.digest,
               "epoch": 2, "next_batch": 3}  # fmt: skip
        assert one.resume(old) == (2, 3)
        with pytest.raises(SampleError, match="batch_size: 9, and this Stager has 8"):
            one.resume(old | {"batch_size": 9})
        with pytest.raises(SampleError, match="lacks 'global_batch'"):
            one.resume({key: value for key, value in old.items() if key != "batch_size"})


@pytest.mark.parametrize("state", [None, 3, "epoch 3", [1, 2], {}, {"epoch": 1, "next_batch": 2}])
def test_what_is_no_state_is_refused(state):
    with make() as one, pytest.raises(SampleError, match=r"takes what state_dict\(\) gave"):
        one.resume(state)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 3}, "version 3, this stager reads versions 1 and 2"),
        ({"version": 0}, "version 0"),
        ({"global_batch": 16}, "global batch"),
        ({"block": 4096}, "block: 4096"),
        ({"next_batch": 99}, "next_batch is 99; it must be an integer from 0 to"),
        ({"next_batch": -1}, "next_batch is -1"),
        ({"next_batch": 1.0}, "next_batch is 1.0"),
        ({"epoch": True}, "epoch is True"),
        ({"order": "feistel64-9"}, "algorithm of the order"),
    ],
)
def test_a_changed_state_is_refused(change, named):
    with make() as one, pytest.raises(SampleError, match=named):
        one.resume(one.state_dict(0, 1) | change)


def test_a_cut_state_is_refused():
    with make() as one:
        state = one.state_dict(0, 1)
        del state["data"]
        with pytest.raises(SampleError, match="lacks 'data'"):
            one.resume(state)


@pytest.mark.parametrize("place", [(-1, 0), (0, 99), (0, -1), (0.5, 0), (True, 0)])
def test_a_place_that_is_none_has_no_state(place):
    with make() as one, pytest.raises(SampleError, match="it must be an integer"):
        one.state_dict(*place)
