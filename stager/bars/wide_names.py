"""The names of a wide file's columns: which symbol and which field each holds."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stager.bars.options import PRICES, Role

FIELDS: tuple[Role, ...] = (*PRICES, "volume")


@dataclass(frozen=True)
class Wide:
    """Position of every symbol's columns: symbol to role to position."""

    symbols: dict[str, dict[Role, int]]


def find_wide(names: Sequence[str], field: Role | None) -> Wide | None:
    """The columns of a wide file by their names; None: it is none.

    Names are texts of pairs as pandas writes them, ``('Close', 'AAPL')``, or joined, ``AAPL:close``; with ``field``
    every column but the first is a symbol.
    """
    symbols: dict[str, dict[Role, int]] = {}
    for i, name in enumerate(names):
        pair = _pair(name)
        if pair is not None:
            symbol, role = pair
            if role in symbols.setdefault(symbol, {}):
                return None
            symbols[symbol][role] = i
    complete = {symbol: roles for symbol, roles in symbols.items() if all(role in roles for role in PRICES)}
    if complete:
        return Wide(complete)
    if field is not None:
        return Wide({name: {field: i} for i, name in enumerate(names) if i and name.strip()})
    return None


def _pair(name: str) -> tuple[str, Role] | None:
    """Symbol and role in a column's name."""
    if name.startswith("('"):
        try:
            parts = ast.literal_eval(name)
        except (ValueError, SyntaxError):
            return None
    else:
        parts = tuple(name.rsplit(":", 1))
    if not isinstance(parts, tuple) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        return None
    for place, other in ((0, 1), (1, 0)):
        role: Any = parts[place].strip().lower()
        if role in FIELDS and parts[other].strip():
            return parts[other].strip(), role
    return None
