"""Small CSV files, written where a test says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stager.bars.read import Bars, ReadOptions, read

HEADER = "time,symbol,open,high,low,close,volume"
ROWS = (
    "2024-05-06T13:30:00Z,B,10.0,11.0,9.0,10.5,100",
    "2024-05-06T13:30:00Z,A,20.0,21.0,19.0,20.5,200",
    "2024-05-06T13:31:00Z,B,10.5,11.5,9.5,11.0,101",
    "2024-05-06T13:31:00Z,A,20.5,21.5,19.5,21.0,201",
    "2024-05-06T13:33:00Z,A,21.0,22.0,20.0,21.5,202",
)

ReadText = Callable[..., Bars]


@pytest.fixture
def read_text(tmp_path: Path) -> ReadText:
    """Write text (or bytes) to a file and read it; keywords are options."""

    def write_and_read(text: str | bytes, name: str = "bars.csv", **options: object) -> Bars:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read(path, ReadOptions(**options))  # type: ignore[arg-type]

    return write_and_read


def lines(*rows: str, header: str = HEADER, end: str = "\n") -> str:
    """A CSV file of a header and rows."""
    return end.join((header, *rows)) + end


def one_symbol(*cells: str, header: str = "time,open,high,low,close,volume") -> str:
    """A CSV file without a symbol column, of one-minute bars whose time cells are given."""
    return lines(*(f"{cell},{i}.5,{i}.75,{i}.25,{i}.5,{i}" for i, cell in enumerate(cells, start=1)), header=header)


def instants(bars: Bars) -> list[str]:
    """ISO text of the times."""
    return [str(value)[:19] for value in bars.table["time"].to_numpy().astype("datetime64[s]")]


def decided(bars: Bars) -> dict[str, tuple[str, str]]:
    """Decisions: what -> (value, source)."""
    return {decision.what: (decision.value, decision.source) for decision in bars.decisions}
