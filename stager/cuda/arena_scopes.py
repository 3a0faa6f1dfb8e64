"""Scopes inside an arena: steps, captured graphs, and measuring."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from cupy.cuda import MemoryPointer, UnownedMemory, using_allocator

from stager.config import format_nbytes
from stager.cuda.arena_facts import failure, logger, owner_of, tokens
from stager.cuda.arena_pool import Pool
from stager.cuda.arena_tokens import Owner, Visit, check_size, token_type
from stager.cuda.blocks import UNIT, Blocks, round_up
from stager.cuda.overflow import Overflow, OverflowMemoryError
from stager.cuda.report import Holder, largest_sites
from stager.errors import ArenaError, ArenaEscapeError


class Step:
    """One training step: ``with arena.step() as step:``. Nests; each thread has its own.

    Attributes
    ----------
    number : int
        Number of the step in its arena, counted from 1; 0 before it was entered.
    """

    def __init__(self, pool: Pool, on_escape: str) -> None:
        self.number = 0
        self._pool: Pool | None = pool
        self._on_escape = on_escape
        self._owner: Owner | None = None
        self._before: Owner | None = None

    def __enter__(self) -> Step:
        pool = self._pool
        if pool is None or self._owner is not None:
            raise ArenaError("a step is entered once; call arena.step() again for the next one")
        visit = pool.visit()
        _judge(pool, self._on_escape)
        self._owner = pool.new_owner()
        self.number = self._owner.number
        self._before, visit.owner = visit.owner, self._owner
        visit.steps.append(self)
        if pool.recorder is not None:
            pool.recorder.step(self.number, "begin")
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        pool = self._pool
        assert pool is not None
        visit = pool.visit()
        if not visit.steps or visit.steps[-1] is not self:
            raise ArenaError(f"step {self.number} ends out of turn: steps end in the thread and the order they nest in")
        visit.steps.pop()
        assert self._before is not None
        visit.owner, self._before = self._before, None
        pool.open_steps.discard(self.number)
        # Loop variables of the step are still alive here, so what outlives it is judged when the next one begins. What
        # waits for that must not hold the pool, which holds it.
        self._pool = None
        pool.local.__dict__.setdefault("ended", []).append(self)
        if pool.overflow is not None:
            pool.overflow.drain()
        if pool.recorder is not None:
            pool.recorder.step(self.number, "end")

    @property
    def live_blocks(self) -> int:
        """Allocations of this step that something still points into; nested steps count their own."""
        if self._owner is None:
            return 0
        return _references(self) - _NO_TOKENS - (self._pool is not None)


class _Probe:
    def __init__(self) -> None:
        self._owner = Owner(None, 0)


def _references(holder: Any) -> int:
    return sys.getrefcount(holder._owner) + sys.getrefcount(holder._owner.outside)


_NO_TOKENS = _references(_Probe())


def _judge(pool: Pool, on_escape: str) -> None:
    """Count what outlived the steps that ended in this thread, and say so if asked to."""
    ended: list[Step] = pool.local.__dict__.pop("ended", [])
    if pool.overflow is not None:
        pool.overflow.drain()
    escaped = {step.number: count for step in ended if (count := step.live_blocks)}
    if not escaped:
        return
    total = sum(escaped.values())
    pool.escaped_blocks += total
    if on_escape == "keep" or (on_escape == "warn" and pool.escape_reported):
        return
    holders = _made_by(pool, set(escaped))
    nbytes = sum(holder.nbytes for holder in holders)
    numbers = ", ".join(map(str, escaped))
    text = f"{total:,} blocks ({format_nbytes(nbytes)}) outlived step {numbers}, still alive as the next one begins"
    sites = largest_sites(holders, most=5)
    text += f", made by {sites}" if sites else "; Arena(trace=True) names the lines that made them"
    # An exception on its way (a step inside a finally block) must not be replaced by this one.
    if on_escape == "raise" and sys.exception() is None:
        raise ArenaEscapeError(text)
    pool.escape_reported = True
    logger.warning("arena escape: %s", text)


def _made_by(pool: Pool, numbers: set[int]) -> list[Holder]:
    outside = None if pool.overflow is None else pool.overflow.token
    found = []
    for token in tokens(pool):
        owner, site = (token._owner[1], None) if type(token) is outside else owner_of(token)
        if owner.number in numbers:
            found.append(Holder(token.size, "earlier", site))
    return found


class Capture:
    """A CUDA graph and the memory it uses: ``with arena.capture(stream) as c:``.

    The scope captures ``stream``, unless it is capturing already. Everything the arena gives out inside, and the arrays
    named with :meth:`inputs`, stays allocated until :meth:`release`.

    Attributes
    ----------
    graph : cupy.cuda.Graph or None
        The captured graph, after the scope; None when the stream was already capturing on entry.
    """

    def __init__(self, pool: Pool, stream: Any) -> None:
        self._pool, self._stream = pool, stream
        self._held: list[Any] = []
        self._begun = False
        self._scope: Any = None
        self.graph: Any = None

    def inputs(self, *arrays: Any) -> Capture:
        """Hold arrays that the graph reads or writes and that were made before; returns the capture."""
        for array in arrays:
            self.hold(array)
        return self

    def hold(self, thing: Any) -> None:
        """Keep ``thing`` alive until :meth:`release`."""
        self._held.append(thing)
        self._pool.captured_blocks += 1

    def release(self) -> None:
        """Let the memory go. The graph must not be launched afterwards, and its last launch must have been queued on a
        stream that the arena's stream waits for. May be called twice."""
        self._pool.captured_blocks -= len(self._held)
        self._held.clear()

    def __enter__(self) -> Capture:
        pool = self._pool
        visit = pool.visit()
        if visit.capture is not None:
            raise ArenaError("captures don't nest")
        if self._stream.ptr != pool.stream.ptr:
            raise ArenaError(
                f"the arena is bound to stream {pool.stream.ptr}, not to {self._stream.ptr}: enter it under the stream "
                "that captures, `with stream, arena:`"
            )
        if pool.overflow is not None:
            pool.overflow.drain()  # frees that would have to wait until the capture ends
        scope = self._stream if pool.driver.stream() is not self._stream else None
        if scope is not None:
            scope.__enter__()
        try:
            if not pool.driver.capturing(self._stream):
                self._stream.begin_capture()
                self._begun = True
        except BaseException:
            if scope is not None:
                scope.__exit__(*sys.exc_info())
            raise
        self._scope = scope
        visit.capture = self
        pool.captures += 1
        pool.regate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pool = self._pool
        pool.visit().capture = None
        pool.captures -= 1
        pool.regate()
        try:
            if self._begun:
                self.graph = self._stream.end_capture()
        except Exception:
            if error is None:  # a broken capture can't be ended; the reason for it is the exception on its way
                raise
        finally:
            if self._scope is not None:
                self._scope.__exit__(kind, error, traceback)
            if error is not None:
                self.graph = None
                self.release()


class Measure:
    """What a step needs: ``with arena.measure() as m:`` serves every request outside the slab, without a limit.

    Attributes
    ----------
    capacity_nbytes : int
        Capacity in which the same requests, freed in the same order, fit without a merge and without overflow.
    peak_nbytes : int
        Most bytes alive at one time; a smaller capacity can't do.
    allocations, largest_nbytes : int
        Requests, and the largest of them (rounded).
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks = Blocks(UNIT, 1 << 60)
        self._overflow = pool.overflow or Overflow(pool.driver, pool.device, 0)
        self._scope: AbstractContextManager[Any] | None = None
        self.allocations = self.largest_nbytes = self.peak_nbytes = 0
        self._token = token_type()

    @property
    def capacity_nbytes(self) -> int:
        return self._blocks.high - UNIT

    def __enter__(self) -> Measure:
        visit = self._pool.visit()
        self._scope = using_allocator(lambda nbytes: self._malloc(nbytes, visit))
        self._scope.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        assert self._scope is not None
        self._scope.__exit__(*exception)
        self._overflow.drain()

    def _malloc(self, nbytes: Any, visit: Visit) -> Any:
        nbytes = check_size(nbytes)
        pool, blocks = self._pool, self._blocks
        pool.check_alive()
        stream, device = pool.driver.stream(), pool.driver.device()
        if nbytes == 0:
            return MemoryPointer(UnownedMemory(0, 0, pool.owner, device), 0)
        if pool.driver.capturing(stream):
            raise ArenaError("a stream is capturing a graph; measure the step without capturing it")
        size = round_up(nbytes)
        try:
            memory = self._overflow.allocate(size, stream, device, pool.owner.outside)
        except OverflowMemoryError:
            raise failure(pool, nbytes, size, "the device ran out of memory while the step was measured") from None
        try:
            place = blocks.bins[size].pop()
        except (KeyError, IndexError):
            taken = blocks.take(size)
            assert taken is not None
            place = taken
        token = self._token(memory.ptr, size, (memory, visit.owner), device)
        token.__del__ = place[2]
        self.allocations += 1
        self.largest_nbytes = max(self.largest_nbytes, size)
        self.peak_nbytes = max(self.peak_nbytes, blocks.live()[1])
        return MemoryPointer(token, 0)
