"""Slots of memory: never taken while something refers to them, by counts of references alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.cuda.slots import Slots


class Memory:
    pass


class Array:
    def __init__(self, memory):
        self.data = Pointer(memory)


class Pointer:
    def __init__(self, memory):
        self.mem = memory


class Driver:
    def __init__(self):
        self.n_allocations, self.waited, self.capturing = 0, [], set()

    def allocate(self, nbytes):
        self.n_allocations += 1
        return Memory()

    def wait_for(self, streams):
        streams = list(streams)
        if self.capturing & set(streams):
            return False
        self.waited.append(streams)
        return True


@pytest.fixture
def driver():
    return Driver()


def test_a_slot_comes_again_when_its_last_array_has_died(driver):
    slots = Slots(driver)
    one = slots.take(100)
    array = Array(one.memory)
    slots.give_back(one)
    other = slots.take(100)
    assert other is not one
    del array
    assert slots.take(100) is one
    assert driver.n_allocations == 2


def test_the_gather_waits_for_every_stream_that_had_it(driver):
    slots = Slots(driver)
    slot = slots.take(1)
    slot.streams.update({1: "a", 2: "b"})
    slots.give_back(slot)
    driver.capturing = {"b"}
    assert slots.take(1) is not slot
    driver.capturing = set()
    assert slots.take(1) is slot
    assert driver.waited == [["a", "b"]]
    assert slot.streams == {}


def test_slots_too_small_are_let_go(driver):
    slots = Slots(driver)
    small = slots.take(10)
    array = Array(small.memory)
    slots.give_back(small)
    slots.give_back(slots.take(20))
    assert slots.take(5) is not small
    del array
    large = slots.take(100)
    slots.give_back(large)
    assert slots.take(10) is large


@pytest.mark.parametrize("held", ["array", "pointer", "memory"])
def test_kept_arrays_are_handed_out_again_unless_something_refers_to_them(driver, held):
    slots = Slots(driver)
    slot = slots.take(1)
    slot.keep("layout", [(Array(slot.memory), Array(slot.memory)) for _ in range(3)])
    assert slot.is_free
    slots.give_back(slot)
    x = slot.kept("layout")[1][0]
    thing = {"array": x, "pointer": x.data, "memory": Array(x.data.mem)}[held]
    del x
    assert not slot.is_free
    assert slots.take(1) is not slot
    del thing
    assert slots.take(1) is slot
    assert slot.kept("another layout") == []
    assert slot.is_free
    array = Array(slot.memory)
    assert not slot.is_free
    assert slot.n_alive == 1
    del array


@pytest.mark.parametrize(("n_kept", "wasted"), [(0, False), (1, True), (4, True), (5, False), (10, False)])
def test_a_slot_that_few_arrays_hold_is_wasted(driver, n_kept, wasted):
    slots = Slots(driver)
    slot = slots.take(1)
    arrays = [Array(slot.memory) for _ in range(10)]
    slot.n_handed = 10
    del arrays[n_kept:]
    assert slot.is_wasted is wasted
    slots.give_back(slot)
    assert slots.n_wasted == 0, "the caller's loop still refers to its last batch"
    slots.give_back(slots.take(10))
    assert slots.n_wasted == wasted


def test_a_slot_may_be_given_back_inside_take(driver):
    """As when garbage is collected there, and an iterator that nobody refers to is closed."""
    slots = Slots(driver)
    other = slots.take(1)

    class Closing(Driver):
        def allocate(self, nbytes):
            slots.give_back(other)
            return super().allocate(nbytes)

    slots._driver = Closing()
    assert slots.take(1) is not other
    assert slots.take(1) is other


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_nothing_is_handed_out_while_something_refers_to_it(steps):
    """Groups of batches come and go; of each some batches are kept for a while."""
    driver = Driver()
    slots, kept, served = Slots(driver), [], []
    for n_kept, size in steps:
        slot = slots.take(size)
        assert all(array.data.mem is not slot.memory for _, array in kept)
        batches = [Array(slot.memory) for _ in range(5)]
        slot.n_handed = 5
        kept += [(len(served), array) for array in batches[:n_kept]]
        del batches
        served.append(slot)
        slots.give_back(slot)
        kept = [(group, array) for group, array in kept if len(served) - group < 4]
    assert driver.n_allocations <= 5 + 4 * 4
