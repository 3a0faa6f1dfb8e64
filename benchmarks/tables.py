"""Write the tables of README.md from benchmarks/results; with ``--check`` only compare.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MARKED = re.compile(r"(<!-- table: (?P<file>\w+) / (?P<title>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))

HEADINGS = {
    "gbps": "GB/s",
    "of_ceiling": "of the pinned copy",
    "of_copy": "speed, of the copy",
    "of_read_csv": "time, of read_csv",
    "times_ours": "time, of stager",
    "bytes_a_row": "bytes a row",
}


def seconds(value: float) -> str:
    """A time with three digits in the unit that suits it."""
    scale, unit = next((pair for pair in UNITS if value >= pair[0]), UNITS[-1])
    return f"{value / scale:.3g} {unit}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of one result table as Markdown."""
    extra = [key for key in HEADINGS if any(key in row for row in rows)]
    lines = [
        "| | median | least to most, n | " + " | ".join(HEADINGS[key] for key in extra) + " |",
        "| --- " * (3 + len(extra)) + "|",
    ]
    for row in rows:
        known = row["min"] is not None
        spread = (f"{seconds(row['min'])} to {seconds(row['max'])}, " if known else "not kept, ") + str(row["n"])
        cells = [_shown(key, row[key]) if key in row else "" for key in extra]
        lines.append("| " + " | ".join([row["name"], seconds(row["seconds"]), spread, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _shown(key: str, value: float) -> str:
    if key == "gbps":
        return f"{value:.1f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def by_allocator(rows: list[dict[str, Any]]) -> str:
    """The rows of the arena's benchmark as Markdown: an allocator a line, a figure a column."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = ["| | " + " | ".join(names) + " |", "| --- " * (1 + len(names)) + "|"]
    for allocator in dict.fromkeys(row["allocator"] for row in rows):
        found = {row["name"]: row for row in rows if row["allocator"] == allocator}
        cells = [_measured(found[name]) if name in found else "" for name in names]
        lines.append("| " + " | ".join([allocator, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _measured(row: dict[str, Any]) -> str:
    parts = []
    if "nanoseconds" in row:
        low, middle, high = (seconds(row[key] * 1e-9) for key in ("min", "nanoseconds", "max"))
        parts.append(f"{middle} ({low} to {high})")
    if "seconds" in row:
        parts.append(seconds(row["seconds"]))
    if "device_nbytes" in row:
        parts.append(f"{row['device_nbytes'] / 2**20:.1f} MiB")
    return ", ".join(parts)


def machine(facts: dict[str, Any]) -> str:
    """One line that says what the figures depend on."""
    packages = [
        f"{name} {facts[name]}" for name in facts if name.startswith(("numpy", "pyarrow", "pandas", "torch", "cupy"))
    ]
    where = f"{facts.get('gpu', 'no GPU')}, driver {facts.get('driver', '-')}, {facts['cores']} cores"
    return f"Measured {facts['date']} on {where}; Python {facts['python']}, {', '.join(packages)}.\n"


def fill(text: str) -> str:
    """README's text with every marked table written anew."""

    def write(match: re.Match[str]) -> str:
        result = json.loads((ROOT / "benchmarks" / "results" / f"{match['file']}.json").read_text(encoding="utf-8"))
        if match["title"] == "machine":
            body = machine(result["machine"])
        else:
            rows = result["tables"][match["title"]]
            body = by_allocator(rows) if "allocator" in rows[0] else table(rows)
            body += f"\nMeasured at commit {result['commits'][match['title']]}.\n"
        return f"{match[1]}{body}{match[4]}"

    return MARKED.sub(write, text)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    filled = fill(text)
    if "--check" not in sys.argv:
        README.write_text(filled, encoding="utf-8")
    elif filled != text:
        sys.exit("README.md: its tables are not those of benchmarks/results; run benchmarks/tables.py")


if __name__ == "__main__":
    main()
