"""Where a training is, as a few values that JSON keeps, and what must be the same to go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from stager.errors import SampleError
from stager.samples.index import SampleIndex
from stager.samples.order import ALGORITHM

if TYPE_CHECKING:
    from stager.batches.stager import Stager

_VERSION = 1

# What else must be the same, and how it is called in an error.
_SAME = {
    "order": "algorithm of the order",
    "seed": "seed",
    "shuffle": "shuffle",
    "last": "last",
    "batch_size": "batch_size",
    "n_samples": "number of samples",
    "data": "fingerprint of the data",
    "samples": "digest of window, target, selection, normalisation and fold",
}


def state_of(st: Stager, index: SampleIndex, epoch: int, next_batch: int) -> dict[str, Any]:
    """See :meth:`stager.Stager.state_dict`."""
    place = {"epoch": epoch, "next_batch": next_batch}
    _check_place(st, place)
    return {"version": _VERSION, **_facts(st, index), **{name: int(number) for name, number in place.items()}}


def go_on(st: Stager, index: SampleIndex, state: Mapping[str, Any]) -> tuple[int, int]:
    """See :meth:`stager.Stager.resume`."""
    if not isinstance(state, Mapping) or not isinstance(state.get("version"), int):
        raise SampleError(f"resume() takes what state_dict() gave, not {type(state).__name__} {str(state)[:60]!r}")
    if state["version"] != _VERSION:
        raise SampleError(
            f"the state is of version {state['version']}, this stager reads version {_VERSION}; resume with the stager "
            f"that wrote it"
        )
    wanted = {"version", "epoch", "next_batch", *_SAME}
    if lost := sorted(wanted - set(state)):
        raise SampleError(f"the state lacks {lost[0]!r}; it was cut or changed")
    for key, value in _facts(st, index).items():
        if state[key] != value:
            raise SampleError(
                f"the training was of another {_SAME[key]}: {state[key]!r}, and this Stager has {value!r}; resume with "
                f"the same, or begin a new training"
            )
    _check_place(st, state)
    epoch, batch = int(state["epoch"]), int(state["next_batch"])
    return (epoch + 1, 0) if batch == len(st) else (epoch, batch)


def _check_place(st: Stager, place: Mapping[str, Any]) -> None:
    for name, most in (("epoch", (1 << 63) - 1), ("next_batch", len(st))):
        number = place[name]
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not 0 <= number <= most:
            raise SampleError(f"{name} is {number!r}; it must be an integer from 0 to {most:,}")


def _facts(st: Stager, index: SampleIndex) -> dict[str, Any]:
    return {
        "order": ALGORITHM,
        "seed": st.seed,
        "shuffle": st.shuffle,
        "last": st.last,
        "batch_size": st.batch_size,
        "n_samples": st.n_samples,
        "data": st.resident.pack.fingerprint,
        "samples": index.digest,
    }
