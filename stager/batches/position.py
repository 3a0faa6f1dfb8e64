"""Where a training is, as a few values that JSON keeps, and what must be the same to go on from there.

Nothing in it depends on the rank, nor on how many there are: a training goes on with other ranks that have the same
batches together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stager.batches.epochs import Epochs
from stager.errors import SampleError
from stager.samples.order import ALGORITHM, UNSHUFFLED

_VERSION = 2

# What else must be the same, and how it is called in an error.
_SAME = {
    "seed": "seed",
    "shuffle": "shuffle",
    "block": "block",
    "order": "algorithm of the order",
    "last": "last",
    "global_batch": "global batch, world_size * batch_size",
    "n_samples": "number of samples",
    "data": "fingerprint of the data",
    "samples": "digest of window, target, selection, normalisation, weights and fold",
}


def begin_of(epochs: Epochs, data: str) -> dict[str, Any]:
    """The state before the first batch; `data` is the fingerprint."""
    options = epochs.options
    return {
        "version": _VERSION,
        "seed": options.seed,
        "shuffle": options.shuffle,
        "block": options.block_size,
        "order": epochs.order(0).algorithm,
        "last": options.last,
        "global_batch": options.global_batch,
        "n_samples": epochs.n_samples,
        "data": data,
        "samples": epochs.digest,
        "epoch": 0,
        "next_batch": 0,
    }


def state_of(begin: Mapping[str, Any], n_batches: int, epoch: int, next_batch: int) -> dict[str, Any]:
    """See :meth:`stager.Stager.state_dict`; of the state before the first batch, and the batches of an epoch."""
    place = {"epoch": epoch, "next_batch": next_batch}
    _check_place(n_batches, place)
    return {**begin, **{name: int(number) for name, number in place.items()}}


def go_on(begin: Mapping[str, Any], n_batches: int, state: Mapping[str, Any]) -> tuple[int, int]:
    """See :meth:`stager.Stager.resume`."""
    if not isinstance(state, Mapping) or type(state.get("version")) is not int:
        raise SampleError(f"resume() takes what state_dict() gave, not {type(state).__name__} {str(state)[:60]!r}")
    if state["version"] == 1:
        state = _of_version_1(state)
    elif state["version"] != _VERSION:
        raise SampleError(
            f"the state is of version {state['version']}, this stager reads versions 1 and {_VERSION}; resume with the "
            f"stager that wrote it"
        )
    if lost := sorted({"epoch", "next_batch", *_SAME} - set(state)):
        raise SampleError(f"the state lacks {lost[0]!r}; it was cut or changed")
    for key, what in _SAME.items():
        value = begin[key]
        # What the last batch is filled up with is marked, so it is the same batch.
        if key == "last" and {state[key], value} == {"keep", "pad"}:
            continue
        if state[key] != value or type(state[key]) is not type(value):
            raise SampleError(
                f"the training was of another {what}: {state[key]!r}, and this Stager has {value!r}; resume with "
                f"the same, or begin a new training"
            )
    _check_place(n_batches, state)
    epoch, batch = int(state["epoch"]), int(state["next_batch"])
    return (epoch + 1, 0) if batch == n_batches else (epoch, batch)


def _of_version_1(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state of version 1 as version 2 would have it: of one process, without blocks."""
    now = {**state, "block": None}
    if "batch_size" in state:
        now["global_batch"] = state["batch_size"]
    if state.get("shuffle") is False and state.get("order") == ALGORITHM:
        now["order"] = UNSHUFFLED
    return now


def _check_place(n_batches: int, place: Mapping[str, Any]) -> None:
    for name, most in (("epoch", (1 << 63) - 1), ("next_batch", n_batches)):
        number = place[name]
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not 0 <= number <= most:
            raise SampleError(f"{name} is {number!r}; it must be an integer from 0 to {most:,}")
