"""Everything a program can do to an arena, in any order, against a plain list of who holds what.

``STAGER_DEEP=1`` makes it look for much longer.
"""

import contextlib
import gc
import os
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

cupy = pytest.importorskip("cupy")
sys.path.append(str(Path(__file__).parent))

from arena_fakes import BASE, FakeDriver, Stream, fake_arena  # noqa: E402
from cupy.cuda import runtime  # noqa: E402
from cupy.cuda.memory import OutOfMemoryError  # noqa: E402

DEEP = os.environ.get("STAGER_DEEP") == "1"
UNITS = 64
SIZES = st.one_of(st.integers(0, 8 * 512), st.integers(1, 20 * 512), st.sampled_from([512, 1000, 4096, 30_000, 40_000]))


class Held:
    """One allocation in the model: where it is, and everything of the program that points into it."""

    def __init__(self, pointer, step):
        self.start, self.size, self.step = pointer.ptr, pointer.mem.size, step
        self.holders = [pointer]
        self.cyclic = False
        self.captured = False

    @property
    def alive(self):
        return bool(self.holders) or self.cyclic or self.captured

    @property
    def inside(self):
        return BASE <= self.start < BASE + UNITS * 512


class Knot:
    def __init__(self, thing):
        self.thing, self.self = thing, self


class ArenaMachine(RuleBasedStateMachine):
    @initialize(poison=st.booleans(), trace=st.booleans())
    def start(self, poison, trace):
        gc.disable()
        gc.freeze()  # what exists already takes no part, so that collecting is quick
        self.driver = FakeDriver()
        self.stream = self.driver.now = Stream(0x50)
        self.elsewhere = Stream(0x60)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STAGER_ARENA_POISON", str(int(poison)))
            self.arena = fake_arena(self.driver, UNITS * 512, trace=trace)
        self.before = cupy.cuda.get_allocator()
        self.arena.__enter__()
        self.held = []
        self.steps = []
        self.ended = {}
        self.capture = None
        self.captures = []
        self.escaped = self.allocations = self.foreign = 0

    def teardown(self):
        try:
            if not hasattr(self, "arena"):
                return
            if self.capture is not None:
                self.end_capture()
            while self.steps:
                self.steps.pop()[1].__exit__(None, None, None)
            while self.captures:
                self.release_capture()
            self.drop_many(False)
            gc.collect()
            self.driver.fail_at = None
            self.arena.reset()
            stats = self.arena.stats()
            assert (stats.used_nbytes, stats.live_blocks, stats.overflow_live_blocks) == (0, 0, 0)
            assert stats.largest_free_nbytes == UNITS * 512
            assert not self.driver.outside
            self.arena.__exit__(None, None, None)
            assert cupy.cuda.get_allocator() is self.before
        finally:
            gc.unfreeze()
            gc.enable()

    def allocate_one(self, size, foreign=False):
        step = self.steps[-1][0] if self.steps else 0
        collected = self.driver.calls["release_other_pools"]
        try:
            pointer = cupy.cuda.alloc(size)
        except OutOfMemoryError:
            assert self.capture is not None or foreign
            return None
        except runtime.CUDARuntimeError:  # the call that was made to fail
            assert self.driver.fail_at is None
            return None
        finally:
            if self.driver.calls["release_other_pools"] > collected:  # making room collects garbage
                self.cycles_died()
        if size == 0:
            assert pointer.ptr == 0
            return None
        assert pointer.ptr % 512 == 0
        assert pointer.mem.size == (size + 511) // 512 * 512
        held = Held(pointer, step)
        for other in self.held:
            assert not (other.alive and other.start < held.start + held.size and held.start < other.start + other.size)
        if foreign:
            assert not held.inside
            self.foreign += 1
        elif self.capture is not None:
            assert held.inside
            held.captured = True
            self.capture.hold_for_model.append(held)
        self.allocations += 1
        self.held.append(held)
        return held

    @rule(size=SIZES)
    def allocate(self, size):
        self.allocate_one(size)

    @rule(size=SIZES, times=st.integers(2, 10))
    def allocate_and_drop_again_and_again(self, size, times):
        for _ in range(times):
            held = self.allocate_one(size)
            if held is not None:
                held.holders.clear()
            del held

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 1 << 20))
    def drop(self, which):
        held = self.held[which % len(self.held)]
        if held.holders:
            held.holders.pop()

    @rule(half=st.booleans())
    def drop_many(self, half):
        for held in self.held[:: 2 if half else 1]:
            held.holders.clear()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 1 << 20), at=st.integers(0, 400))
    def view(self, which, at):
        held = self.held[which % len(self.held)]
        if held.holders and isinstance(held.holders[0], cupy.cuda.MemoryPointer):
            array = cupy.ndarray((held.size // 4,), np.float32, held.holders[0])
            held.holders.append(array[at % array.size :])
            held.holders.append(array.reshape(-1, 2).T)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 1 << 20))
    def tie_into_a_cycle(self, which):
        held = self.held[which % len(self.held)]
        if held.holders:
            Knot(held.holders.pop())
            held.cyclic = True

    @rule()
    def collect(self):
        gc.collect()
        self.cycles_died()

    def cycles_died(self):
        for held in self.held:
            held.cyclic = False

    @precondition(lambda self: len(self.steps) < 3 and self.capture is None)
    @rule()
    def enter_step(self):
        self.settle_escapes()
        step = self.arena.step().__enter__()
        self.steps.append((step.number, step))

    def settle_escapes(self):
        self.forget()
        self.escaped += sum(held.step in self.ended for held in self.held)
        self.ended = {}

    @precondition(lambda self: self.steps and self.capture is None)
    @rule()
    def leave_step(self):
        number, step = self.steps.pop()
        step.__exit__(None, None, None)
        self.ended[number] = step
        self.forget()
        assert step.live_blocks == sum(held.step == number for held in self.held)

    @precondition(lambda self: self.capture is None)
    @rule(size=SIZES)
    def pause(self, size):
        inside = cupy.cuda.get_allocator()
        with self.arena.pause():
            assert cupy.cuda.get_allocator() is self.before
        assert cupy.cuda.get_allocator() is inside
        self.allocate_one(size)

    @rule(error=st.booleans())
    def enter_again(self, error):
        inside = cupy.cuda.get_allocator()
        with contextlib.suppress(KeyError), self.arena:
            if error:
                raise KeyError
        assert cupy.cuda.get_allocator() is inside

    @precondition(lambda self: self.capture is None)
    @rule(size=SIZES)
    def under_another_stream(self, size):
        with self.elsewhere:
            self.allocate_one(size, foreign=True)

    @precondition(lambda self: self.capture is None)
    @rule(size=SIZES)
    def under_another_device(self, size):
        self.driver.now_device = 1
        self.allocate_one(size, foreign=True)
        self.driver.now_device = 0

    @precondition(lambda self: self.capture is None)
    @rule(size=SIZES, drop=st.booleans())
    def in_another_thread(self, size, drop):
        errors = []
        steps, self.steps = self.steps, []

        def work():
            try:
                with self.arena:
                    held = self.allocate_one(size)
                    if drop and held is not None:
                        held.holders.clear()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.steps = steps
        assert not errors

    @precondition(lambda self: self.capture is None)
    @rule()
    def begin_capture(self):
        self.capture = self.arena.capture(self.stream)
        self.capture.hold_for_model = []
        self.capture.__enter__()

    @precondition(lambda self: self.capture is not None)
    @rule()
    def end_capture(self):
        self.capture.__exit__(None, None, None)
        self.captures.append(self.capture)
        self.capture = None

    @precondition(lambda self: self.captures)
    @rule()
    def release_capture(self):
        capture = self.captures.pop()
        capture.release()
        for held in capture.hold_for_model:
            held.captured = False

    @precondition(lambda self: self.capture is None)
    @rule(size=SIZES)
    def bare_capture(self, size):
        self.stream.is_capturing = True
        try:
            self.allocate_one_or_refuse(size)
        finally:
            self.stream.is_capturing = False

    def allocate_one_or_refuse(self, size):
        refused = self.arena.stats().refused
        try:
            pointer = cupy.cuda.alloc(size)
        except OutOfMemoryError:
            assert self.arena.stats().refused == refused + 1
        except runtime.CUDARuntimeError:
            assert self.driver.fail_at is None
        else:
            assert pointer.ptr == 0 or BASE <= pointer.ptr < BASE + UNITS * 512
            self.allocations += size > 0

    @rule(after=st.integers(1, 3))
    def fail_a_driver_call(self, after):
        self.driver.fail_at = self.driver.calls["all"] + after

    @precondition(lambda self: self.capture is None)
    @rule()
    def reset(self):
        self.arena.reset()
        self.escaped = self.allocations = self.foreign = 0

    @rule()
    def fork(self):
        if not DEEP and self.allocations % 4:
            return
        calls = self.driver.calls["all"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                self.held.clear()
                try:
                    cupy.cuda.alloc(100)
                except RuntimeError:
                    code = 0 if self.driver.calls["all"] == calls else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def forget(self):
        self.held = [held for held in self.held if held.alive]

    @invariant()
    def counters_equal_the_models(self):
        if not hasattr(self, "arena"):
            return
        self.forget()
        calls = self.driver.calls["all"]
        stats = self.arena.stats()
        assert self.driver.calls["all"] == calls
        inside = [held for held in self.held if held.inside]
        outside = [held for held in self.held if not held.inside]
        assert stats.live_blocks == len(inside)
        assert stats.used_nbytes == sum(held.size for held in inside)
        assert stats.free_nbytes == UNITS * 512 - stats.used_nbytes
        assert stats.peak_nbytes >= stats.used_nbytes
        assert stats.overflow_live_blocks == len(outside)
        assert stats.overflow_live_nbytes == sum(held.size for held in outside)
        assert stats.allocations == self.allocations
        assert stats.foreign_requests >= self.foreign
        assert stats.escaped_blocks == self.escaped
        assert 0 <= stats.hits <= stats.allocations
        assert stats.captured_blocks == sum(held.captured for held in self.held)
        free = sorted((held.start, held.size) for held in inside)
        gaps, at = 0, BASE
        for start, size in [*free, (BASE + UNITS * 512, 0)]:
            gaps = max(gaps, start - at)
            at = start + size
        assert stats.largest_free_nbytes == gaps


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(
    max_examples=5000 if DEEP else 200,
    stateful_step_count=100 if DEEP else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestArenaMachine.pytestmark = [pytest.mark.timeout(3600 if DEEP else 300)]


def test_a_million_calls_hand_out_nothing_twice():
    """Recurring and ever-new sizes, 300 alive, in an arena that is sometimes full; every byte has one owner."""
    capacity = 8 << 20
    units = capacity // 512
    draw = np.random.default_rng(11)
    n = 1_000_000
    recurring = np.array([4, 700, 3_000, 48_000])[draw.integers(0, 4, n)]
    sizes = np.where(draw.random(n) < 0.9, recurring, draw.integers(1, 100_000, n)).tolist()
    victims = draw.integers(0, 300, n).tolist()
    taken, none, all_of = bytearray(units), bytes(units), bytes([1]) * units
    driver = FakeDriver()
    arena = fake_arena(driver, capacity)
    alive, places = [None] * 300, [(0, 0)] * 300
    with arena:
        malloc = cupy.cuda.get_allocator()
        for size, victim in zip(sizes, victims, strict=True):
            alive[victim] = None
            first, end = places[victim]
            taken[first:end] = none[first:end]
            alive[victim] = pointer = malloc(size)
            first = (pointer.ptr - BASE) >> 9
            end = first + ((size + 511) >> 9)
            if not 0 <= first < units:
                first = end = 0  # overflow
            assert taken.find(1, first, end) == -1
            assert end <= units
            taken[first:end] = all_of[first:end]
            places[victim] = first, end
        stats = arena.stats()
        assert stats.used_nbytes == 512 * sum(taken)
        assert stats.allocations == n
        assert 0 < stats.overflows < n // 10
        pointer = None
        alive.clear()
        assert (arena.stats().used_nbytes, arena.stats().overflow_live_nbytes) == (0, 0)
