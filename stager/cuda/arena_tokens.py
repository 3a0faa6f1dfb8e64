"""What the arena gives out and what goes with it: tokens, their owners, and the error when there is nothing to give."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from cupy.cuda import UnownedMemory
from cupy.cuda.memory import OutOfMemoryError

from stager.cuda.report import ArenaStats, Site
from stager.errors import ArenaError

Malloc = Callable[[int], Any]
_OWN_CODE = (os.path.dirname(__file__) + os.sep, os.path.dirname(sys.modules["cupy"].__file__ or "") + os.sep)


class ArenaOutOfMemoryError(OutOfMemoryError, ArenaError):  # type: ignore[misc]
    """A request was refused: there is no memory for it, or none may be taken now.

    CuPy catches exactly ``OutOfMemoryError``, so its own clean-up works.

    Attributes
    ----------
    stats : ArenaStats
        The arena at that moment.
    """

    def __init__(self, message: str, stats: ArenaStats | None = None, size: int = 0) -> None:
        OutOfMemoryError.__init__(self, size, stats.used_nbytes if stats else -1, stats.capacity_nbytes if stats else 0)
        self.args = (message,)
        self.stats = stats

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.stats, self._size)

    def __str__(self) -> str:
        return str(self.args[0])


class Outside:
    """What overflow tokens hold of their step, so that they don't keep the slab."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Owner:
    """What tokens hold: the slab, and the step they belong to (0: none).

    The reference counts of an owner and its ``outside`` are the number of live tokens: no bookkeeping per allocation.
    """

    __slots__ = ("number", "outside", "slab")

    def __init__(self, slab: Any, number: int) -> None:
        self.slab, self.number, self.outside = slab, number, Outside(number)


CLOSED = object()  # not None, which the look-up gives for another device


class Gate:
    """What the fast path reads and counts. ``stream`` is no stream while every request has to go the slow way."""

    __slots__ = ("allocations", "stream")

    def __init__(self) -> None:
        self.stream: Any = CLOSED
        self.allocations = 0


class Visit:
    """One thread inside ``with arena:``."""

    __slots__ = ("capture", "malloc", "owner", "previous", "scopes", "steps")

    def __init__(self, owner: Owner, previous: Any) -> None:
        self.owner, self.previous = owner, previous
        self.scopes: list[Any] = []
        self.steps: list[Any] = []
        self.capture: Any = None
        self.malloc: Malloc


def check_size(nbytes: Any) -> int:
    """A request as an integer.

    Raises
    ------
    TypeError, ValueError
        If it is no integer, or negative.
    """
    try:
        number = nbytes.__index__()
    except AttributeError:
        raise TypeError(f"the size of an allocation is {nbytes!r}; it must be an integer") from None
    if number < 0:
        raise ValueError(f"the size of an allocation is {number}; it must not be negative")
    return int(number)


def calling_line() -> Site:
    """File and line of the nearest frame that is neither CuPy's nor the arena's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def token_type() -> Any:
    """The type of an arena's tokens, made for one arena so that its tokens can be told from those of another.

    A token's destructor is an attribute: a callable that does one atomic step, without a Python frame of its own.
    Destructors run inside malloc, on any thread, during garbage collection and at exit: they append, and nothing else.
    """
    return type("Token", (UnownedMemory,), {"__slots__": ("__del__",)})


def give_back_told(give_back: Callable[[], None], freed: Any, what: tuple[int, Site]) -> None:
    """The destructor of a token whose end a recorder wants to know."""
    give_back()
    freed.append(what)
