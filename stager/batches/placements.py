"""Where rows go on a GPU, where that is left open: its own memory, then other GPUs', then the host's; and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stager.config import format_nbytes


def choose_placement(
    nbytes: int,
    free: int,
    peers: Callable[[], Sequence[int]],
    block_nbytes: Callable[[int], int],
    *,
    shares_memory: bool,
    in_place: bool,
) -> tuple[str, str]:
    """What placement "auto" means.

    Parameters
    ----------
    nbytes, free : int
        Of the rows, and free on the GPU.
    peers : callable
        Gives the free bytes on each other GPU whose memory it reads; asked only if the rows don't fit, since asking
        takes some memory there.
    block_nbytes : callable(n)
        Gives what each of n GPUs would hold of rows that are spread.
    shares_memory : bool
        CPU and GPU have one memory.
    in_place : bool
        The rows can be read where they lie, in order, on the host.

    Returns
    -------
    placement : {"device", "spread", "host"}
    why : str
        Empty where the rows just fit.
    """
    if shares_memory:
        return "host", "CPU and GPU share one memory"
    if nbytes <= free:
        return "device", ""
    too_many = f"{format_nbytes(nbytes)} do not fit the {format_nbytes(free)} free on the GPU"
    if not in_place:
        # What is left tells how much is lacking, and the remedy.
        return "device", ""
    others = peers()
    if others and block_nbytes(1 + len(others)) <= min(free, *others):
        return "spread", f"{too_many}, but fit {1 + len(others)} GPUs"
    return "host", f"{too_many}, {f'nor {1 + len(others)} GPUs' if others else 'which reads no other GPU'}"
