"""Damage to the files of every dialect ends in bars or in a BarsError that names the file, and in nothing else."""

from __future__ import annotations

import random
import shutil
import zlib
from pathlib import Path

import pytest
from bars.test_barfiles import CASES, FOLDER, inputs_of

from stager.bars.read import Bars, ReadOptions, read
from stager.errors import BarsError

# What strangers' files hold: marks, words, control characters, halves of something.
SCRAPS = (b"", b",", b'"', b"\n", b"\r", b"\0", b"\xff", b"-", b"nan", b"1e309", b"NULL", b";", b"\t", b"#", b"{", b"]",
          b"=", b"0", b"9" * 25, b"\xef\xbb\xbf", b"(", b"'", b":", b"%")  # fmt: skip
MOST_TOUCHED = 4


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content with a few cuts, swaps and insertions."""
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(content) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            content = content[:place]
        elif kind == 1:
            content = content[:place] + rng.choice(SCRAPS) + content[place:]
        elif kind == 2:
            content = content[:place] + rng.choice(SCRAPS) + content[place + rng.randint(1, 4) :]
        elif kind == 3:
            end = min(len(content), place + rng.randint(1, 60))
            content = content[:end] + content[place:end] + content[end:]
        else:
            content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
    return content


def is_read(name: str) -> bool:
    """Whether the folder's files are bars of all four prices, unique by symbol and time."""
    return CASES[name].refused is None and name not in ("v_wide_close_only", "nse_bhavcopy_udiff")


def rows_of(bars: Bars) -> set[tuple[object, ...]]:
    """Times and prices; a symbol may be the file's name where a damaged header leaves the format unknown."""
    columns = [bars.table[name].to_pylist() for name in ("open", "high", "low", "close")]
    return set(zip(bars.table["time"].cast("int64").to_pylist(), *columns, strict=True))


@pytest.mark.parametrize("name", sorted(CASES))
def test_damage(tmp_path: Path, name: str) -> None:
    rng = random.Random(zlib.crc32(name.encode()))
    right = rows_of(read(inputs_of(FOLDER / name), ReadOptions(**CASES[name].told))) if is_read(name) else set()
    for turn in range(60):
        # A copy each time: a reader that another file stopped may still have its file mapped.
        copy = tmp_path / str(turn)
        shutil.copytree(FOLDER / name, copy)
        inputs = inputs_of(copy)
        file = rng.choice(inputs if isinstance(inputs, list) else sorted(copy.glob("*/*.parquet")))
        file.write_bytes(damaged(file.read_bytes(), rng))
        told = CASES[name].told if rng.random() < 0.8 else {}
        refused = None
        try:
            bars = read(inputs, ReadOptions(**told))
        except BarsError as error:
            refused = str(error)
        if refused is not None:
            assert str(copy) in refused
            assert len(refused.splitlines()) == 1, refused
        else:
            bars.table.validate(full=True)
            assert sum(column.null_count for column in bars.table.columns) == 0
            if right and told:
                # Every edit may make other valid rows of those that it touches, and of no others.
                assert len(rows_of(bars) - right) <= MOST_TOUCHED
