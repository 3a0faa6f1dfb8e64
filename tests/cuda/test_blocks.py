"""Blocks against a map of the slab, one entry per unit."""

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from stager.cuda.blocks import UNIT, Blocks, round_up

BASE = 0x10000


def give(blocks, start, size):
    blocks.bins[size].append(start)


def ask(blocks, size):
    stack = blocks.bins.get(size)
    return stack.pop() if stack else blocks.take(size)


def test_rounding():
    assert [round_up(n) for n in (0, 1, 511, 512, 513)] == [0, 512, 512, 512, 1024]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=200), st.integers(1, 64))
def test_blocks_never_overlap_and_nothing_is_lost(operations, units):
    blocks = Blocks(BASE, units * UNIT)
    live: list[tuple[int, int]] = []
    owner = [False] * units
    for allocate, number in operations:
        if allocate:
            size = number * UNIT
            start = ask(blocks, size)
            at = None if start is None else (start - BASE) // UNIT
            if at is None:
                free = "".join("x" if taken else "." for taken in owner)
                assert "." * number not in free  # only refused when no gap is long enough
            else:
                assert not any(owner[at : at + number])
                owner[at : at + number] = [True] * number
                live.append((start, size))
        elif live:
            start, size = live.pop(number % len(live))
            at = (start - BASE) // UNIT
            owner[at : at + size // UNIT] = [False] * (size // UNIT)
            give(blocks, start, size)
        used = sum(size for _, size in live)
        assert blocks.live() == (len(live), used)
        assert sum(size for _, size in blocks.free_blocks()) == units * UNIT - used
        assert BASE <= blocks.top <= blocks.high <= blocks.end
    while live:
        give(blocks, *live.pop())
    blocks.merge()
    assert blocks.top == BASE
    assert blocks.cut() == (0, 0)
    assert not blocks.bins


def test_a_size_that_recurs_gets_the_block_freed_last():
    blocks = Blocks(BASE, 64 * UNIT)
    first, second = blocks.take(UNIT), blocks.take(UNIT)
    give(blocks, first, UNIT)
    give(blocks, second, UNIT)
    assert ask(blocks, UNIT) == second


def test_many_ranges_at_once():
    blocks = Blocks(BASE, 4000 * UNIT)
    starts = [blocks.take(UNIT) for _ in range(4000)]
    for start in starts[::2]:
        give(blocks, start, UNIT)
    assert blocks.take(2 * UNIT) is None
    assert len(blocks.free_blocks()) == 2000
    for start in starts[1::2]:
        give(blocks, start, UNIT)
    assert blocks.take(4000 * UNIT) == BASE


def test_sizes_that_never_repeat_stay_fast():
    blocks = Blocks(BASE, 64 << 20)
    draw = random.Random(1)
    live: list[tuple[int, int]] = []
    parts = []
    for _ in range(6):
        began = time.process_time()
        for _ in range(4000):
            if len(live) == 20:
                give(blocks, *live.pop(draw.randrange(20)))
            size = round_up(draw.randrange(1, 2 << 20))
            start = ask(blocks, size)
            assert start is not None
            live.append((start, size))
        parts.append(time.process_time() - began)
    assert min(parts[-3:]) < 2 * max(parts[:3])
    assert len(blocks.bins) < 200
