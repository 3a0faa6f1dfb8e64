"""Reading one file in parts, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stager.bars.checks import Piece
from stager.bars.inputs import find_inputs, take_inputs
from stager.bars.options import ReadOptions
from stager.bars.taken import Taken


@dataclass
class Rows:
    """All rows of a file that was read in so many parts, and what is known of it."""

    taken: Taken
    n_parts: int
    symbols: list[str]
    times: np.ndarray
    columns: dict[str, np.ndarray]


class _Keeper:
    def begin(self, number: int) -> None:
        self.parts: list[tuple[tuple[str, ...], list[Piece]]] = []

    def keep(self, number: int, symbols: tuple[str, ...], pieces: list[Piece]) -> None:
        self.parts.append((symbols, pieces))

    def end(self, number: int, taken: Taken) -> None:
        pass


def read_in_parts(file: Path, options: ReadOptions, room_nbytes: int = 3000) -> Rows:
    """All rows, in the order of the file."""
    keeper = _Keeper()
    (taken,) = take_inputs(find_inputs(file), options, keeper, room_nbytes=room_nbytes)
    pieces = [(symbols, piece) for symbols, some in keeper.parts for piece in some]
    return Rows(
        taken,
        len(keeper.parts),
        [symbols[code] for symbols, piece in pieces for code in piece.codes],
        np.concatenate([piece.times for _, piece in pieces]),
        {
            name: np.concatenate([piece.columns[number] for _, piece in pieces])
            for number, name in enumerate(taken.names)
        },
    )
