"""Preloaded by Dask workers of the tests: makes one fail where a test says, by variables of the environment.

STAGER_FAULT_AT tells after which call, STAGER_FAULT what happens then: "die" or "sleep". It happens once in all workers
together, to the one that makes the file STAGER_FAULT_ONCE. STAGER_FAULT_MARK is the mark that workers look for, and
STAGER_FAULT_LOSE an input that is removed before it is looked at.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from stager.cluster import shared, tasks
from stager.packs.placing import Placing
from stager.packs.scratch import Scratch
from stager.packs.segment import SegmentFiles

CALLS: dict[str, tuple[Any, str]] = {
    "take": (Scratch, "keep"),
    "look": (Placing, "_look_first"),
    "write": (SegmentFiles, "put"),
    "digest": (Placing, "_digest"),
    "again": (Placing, "_look_again"),
    "checksum": (tasks, "block_checksum"),
}


def fail() -> None:
    try:
        os.close(os.open(os.environ["STAGER_FAULT_ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if os.environ["STAGER_FAULT"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def dask_setup(worker: Any) -> None:
    if at := os.environ.get("STAGER_FAULT_AT"):
        owner, name = CALLS[at]
        call = getattr(owner, name)

        def then_fail(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            fail()
            return result

        setattr(owner, name, then_fail)
    shared.MARK = os.environ.get("STAGER_FAULT_MARK", shared.MARK)
    if lost := os.environ.get("STAGER_FAULT_LOSE"):
        check = tasks._check_seen

        def lose(*arguments: Any) -> None:
            Path(lost).unlink(missing_ok=True)
            check(*arguments)

        tasks._check_seen = lose
