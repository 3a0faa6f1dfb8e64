"""One device allocation, filled or given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stager.config import format_nbytes
from stager.cuda.ring import Driver
from stager.cuda.watch import Watch, forget
from stager.errors import StagingMemoryError


def load(driver: Driver, nbytes: int, watch: Watch, remedy: str, copy: Callable[[Any], str]) -> tuple[Any, str]:
    """Allocate device memory and have `copy` fill it; after a failure nothing refers to it any more.

    Returns
    -------
    memory : one allocation
    path : str
        What `copy` returned.

    Raises
    ------
    StagingMemoryError
        With needed and free bytes, and the remedy.
    StagingError
        As `copy`.
    """
    memory = allocate(driver, nbytes, watch, remedy)
    try:
        return memory, copy(memory)
    except BaseException as error:
        del memory
        forget(error)
        raise


def allocate(driver: Driver, nbytes: int, watch: Watch, remedy: str) -> Any:
    """One device allocation, checked against free memory first.

    Raises
    ------
    StagingMemoryError
        With needed and free bytes, and the remedy.
    """

    def job() -> Any:
        watch.enter("allocate")
        free = driver.free_nbytes()
        needed = f"{format_nbytes(nbytes)} ({nbytes:,} bytes) are needed on the GPU"
        if nbytes > free:
            raise StagingMemoryError(f"{needed}, {format_nbytes(free)} are free; {remedy}")
        try:
            return driver.allocate(nbytes)
        except MemoryError as error:
            raise StagingMemoryError(
                f"{needed} in one piece; {format_nbytes(free)} are free, but the driver refused ({error}); {remedy}"
            ) from error

    return watch.run([job])[0]
