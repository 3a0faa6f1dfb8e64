"""Blocks against a map of the slab, one entry per unit."""

import gc
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from stager.cuda.blocks import UNIT, Blocks, round_up

BASE = 0x10000


def ask(blocks, size):
    stack = blocks.bins.get(size)
    return stack.pop() if stack else blocks.take(size)


def test_rounding():
    assert [round_up(n) for n in (0, 1, 511, 512, 513)] == [0, 512, 512, 512, 1024]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=200), st.integers(1, 64))
def test_blocks_never_overlap_and_nothing_is_lost(operations, units):
    blocks = Blocks(BASE, units * UNIT)
    live: list[list] = []
    owner = [False] * units
    for allocate, number in operations:
        if allocate:
            block = ask(blocks, number * UNIT)
            if block is None:
                free = "".join("x" if taken else "." for taken in owner)
                assert "." * number not in free  # only refused when no gap is long enough
            else:
                at = (block[0] - BASE) // UNIT
                assert block[1] == number * UNIT
                assert not any(owner[at : at + number])
                owner[at : at + number] = [True] * number
                live.append(block)
        elif live:
            start, size, give_back = live.pop(number % len(live))
            at = (start - BASE) // UNIT
            owner[at : at + size // UNIT] = [False] * (size // UNIT)
            give_back()
        used = sum(size for _, size, _ in live)
        assert blocks.live() == (len(live), used)
        assert sum(size for _, size in blocks.free_blocks()) == units * UNIT - used
        assert BASE <= blocks.top <= blocks.high <= blocks.end
    while live:
        live.pop()[2]()
    blocks.merge()
    assert blocks.top == BASE
    assert blocks.live() == (0, 0)
    assert not blocks.bins
    assert not blocks.of_size


def test_a_size_that_recurs_gets_the_block_freed_last():
    blocks = Blocks(BASE, 64 * UNIT)
    for block in [blocks.take(UNIT) for _ in range(2)]:
        block[2]()
    first, second = ask(blocks, UNIT), ask(blocks, UNIT)
    first[2]()
    second[2]()
    assert ask(blocks, UNIT) is second


def test_a_size_that_recurs_gets_a_bin_and_others_leave_none():
    blocks = Blocks(BASE, 1 << 30)
    for number in range(1, 200):
        blocks.take(number * UNIT)[2]()
    assert not blocks.bins
    ask(blocks, 7 * UNIT)[2]()
    assert list(blocks.bins) == [7 * UNIT]
    assert len(blocks.bins[7 * UNIT]) == 1


def test_merged_blocks_leave_no_garbage():
    blocks = Blocks(BASE, 64 * UNIT)
    gc.collect()
    gc.disable()
    try:
        for number in range(100):
            blocks.take((number % 7 + 1) * UNIT)[2]()
            blocks.merge()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_many_ranges_at_once():
    blocks = Blocks(BASE, 4000 * UNIT)
    taken = [blocks.take(UNIT) for _ in range(4000)]
    for block in taken[::2]:
        block[2]()
    assert blocks.take(2 * UNIT) is None
    assert len(blocks.free_blocks()) == 2000
    for block in taken[1::2]:
        block[2]()
    assert blocks.take(4000 * UNIT)[0] == BASE


def test_sizes_that_never_repeat_stay_fast():
    blocks = Blocks(BASE, 64 << 20)
    draw = random.Random(1)
    live: list[list] = []
    parts = []
    for _ in range(6):
        began = time.process_time()
        for _ in range(4000):
            if len(live) == 20:
                live.pop(draw.randrange(20))[2]()
            block = ask(blocks, round_up(draw.randrange(1, 2 << 20)))
            assert block is not None
            live.append(block)
        parts.append(time.process_time() - began)
    assert min(parts[-3:]) < 2 * max(parts[:3])
    assert len(blocks.bins) < 200
