"""Packing whose rows all go to the scratch file, and what a kill leaves of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stager.packs.packing import pack
from stager.packs.usage import Budget


@contextmanager
def in_scratch() -> Iterator[None]:
    """As if there were memory for a few rows only."""
    of = Budget.of
    Budget.of = classmethod(lambda cls, memory, workers, files: Budget(1 << 30, 2, 1 << 30, 0, 20_000))  # type: ignore[assignment]
    try:
        yield
    finally:
        Budget.of = of  # type: ignore[method-assign]


def leave_unfinished(source: str) -> None:
    """Leave what a pack leaves that is killed while it is written."""

    def end(phase: str, done: int, total: int) -> None:
        if phase == "write":
            raise SystemExit

    with in_scratch(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            pack(source, progress=end)
