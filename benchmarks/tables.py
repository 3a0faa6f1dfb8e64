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
    "times_ours": "time, of stage_arrays",
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
        cells = [f"{row[key]:.1f}" if key == "gbps" else f"{row[key]:.2f}" if key in row else "" for key in extra]
        lines.append("| " + " | ".join([row["name"], seconds(row["seconds"]), spread, *cells]) + " |")
    return "\n".join(lines) + "\n"


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
            body = table(result["tables"][match["title"]])
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
