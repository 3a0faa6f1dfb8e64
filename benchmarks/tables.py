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
    "mrows": "million rows a second",
    "of_reading": "time, of reading alone",
    "memory_gib": "memory, GiB",
    "scratch_gib": "scratch, GiB",
    "besides_seconds": "s, own tables apart",
    "used_gib": "GiB in use",
    "each": "samples/s each",
    "together": "samples/s together",
    "of_one_worker": "speed, of one worker",
    "of_one_rank": "speed, of one rank",
}


def seconds(value: float) -> str:
    """A time with three digits in the unit that suits it."""
    scale, unit = next((pair for pair in UNITS if value >= pair[0]), UNITS[-1])
    return f"{value / scale:.3g} {unit}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of one result table as Markdown."""
    extra = [key for key in HEADINGS if any(key in row for row in rows)]
    headings = ["", "median", "least to most, n", *(HEADINGS[key] for key in extra)]
    lines = ["| " + " | ".join(headings).lstrip() + " |", "| --- " * len(headings) + "|"]
    for row in rows:
        if "seconds" not in row:
            lines.append("| " + " | ".join([row["name"], why_not(row), *[""] * (len(headings) - 2)]) + " |")
            continue
        known = row["min"] is not None
        spread = (f"{seconds(row['min'])} to {seconds(row['max'])}, " if known else "not kept, ") + str(row["n"])
        cells = [_shown(key, row[key]) if key in row else "" for key in extra]
        lines.append("| " + " | ".join([row["name"], seconds(row["seconds"]), spread, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _shown(key: str, value: float) -> str:
    if key == "gbps":
        return f"{value:.1f}"
    if key in ("each", "together"):
        return short(value)
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


def by_batch(rows: list[dict[str, Any]]) -> str:
    """The rows of the serving benchmark in one shape as Markdown: a peer a line, a size of batch a column."""
    batches = sorted({row["batch"] for row in rows})
    measured = [row for row in rows if "seconds" in row]
    ratios = {"of_copy": "of the copy", "of_bus": "of the bus"}
    ratios = {key: heading for key, heading in ratios.items() if any(key in row for row in measured)}
    on_device = any("device_nbytes" in row for row in measured)
    headings = [f"batch {batch:,}" for batch in batches]
    headings += [*ratios.values(), *["device memory"] * on_device, "to the first batch"]
    lines = ["| | " + " | ".join(headings) + " |", "| --- " * (1 + len(headings)) + "|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        found = sorted((row for row in rows if row["name"] == name), key=lambda row: row["batch"])
        if (reason := left_out(found)) is not None:
            cells = [reason, *[""] * (len(headings) - 1)]
        else:
            of_batch = {row["batch"]: row for row in found}
            cells = [a_second(of_batch[batch]) if batch in of_batch else "" for batch in batches]
            cells += [" / ".join(f"{row[key]:.2f}" for row in found if key in row) for key in ratios]
            # The largest batch takes most, and comes when all else has been used once.
            largest = found[-1] if "seconds" in found[-1] else {}
            taken = f"{largest['device_nbytes'] / 2**20:,.0f} MiB" if "device_nbytes" in largest else ""
            first = seconds(largest["open_seconds"] + largest["first_seconds"]) if largest else ""
            cells += [*[taken] * on_device, first]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def by_shape(rows: list[dict[str, Any]]) -> str:
    """The rows of the serving benchmark in other shapes as Markdown: a shape a line, a peer a column, all batches."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = ["| window x columns | " + " | ".join(names) + " |", "| --- " * (1 + len(names)) + "|"]
    for shape in sorted({(row["columns"], row["window"]) for row in rows}):
        cells = []
        for name in names:
            found = [row for row in rows if (row["columns"], row["window"]) == shape and row["name"] == name]
            found.sort(key=lambda row: row["batch"])
            cell = " / ".join(a_second(row, spread=False) for row in found)
            if found and "of_copy" in found[-1]:
                cell += f" ({found[-1]['of_copy']:.2f})"
            reason = left_out(found)
            cells.append(cell if reason is None else reason)
        lines.append("| " + " | ".join([f"{shape[1]} x {shape[0]}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def left_out(rows: list[dict[str, Any]]) -> str | None:
    """The one reason why none of the rows has figures; None if one has."""
    reasons = {why_not(row) for row in rows}
    return reasons.pop() if len(reasons) == 1 and "" not in reasons else None


def why_not(row: dict[str, Any]) -> str:
    """Why a row has no figures; empty where it has."""
    if "error" in row:
        return "failed"
    return row.get("left_out", "").partition(" (")[0].partition(":")[0]


def a_second(row: dict[str, Any], spread: bool = True) -> str:
    """Samples a second, with least and most."""
    if "seconds" not in row:
        return why_not(row)
    low, middle, high = (short(row["batch"] / row[key]) for key in ("max", "seconds", "min"))
    return f"{middle} ({low} to {high})" if spread else middle


def short(value: float) -> str:
    """A count with three digits: 1.25 M."""
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1, "")):
        if value >= 0.9995 * scale:
            digits = value / scale
            return f"{digits:.0f}{unit}" if digits >= 99.95 else f"{digits:.3g}{unit}"
    return f"{value:.3g}"


def machine(facts: dict[str, Any]) -> str:
    """One line that says what the figures depend on."""
    packages = [
        f"{name} {facts[name]}" for name in facts if name.startswith(("numpy", "pyarrow", "pandas", "torch", "cupy"))
    ]
    where = f"{facts.get('gpu', 'no GPU')}, driver {facts.get('driver', '-')}, {facts['cores']} cores"
    return f"Measured {facts['date']} on {where}; Python {facts['python']}, {', '.join(packages)}.\n"


def formatted(rows: list[dict[str, Any]]) -> str:
    """The rows of one result table as Markdown, in the form that suits what they hold."""
    if "allocator" in rows[0]:
        return by_allocator(rows)
    if "batch" in rows[0]:
        return by_batch(rows) if len({(row["window"], row["columns"]) for row in rows}) == 1 else by_shape(rows)
    return table(rows)


def fill(text: str) -> str:
    """README's text with every marked table written anew."""

    def write(match: re.Match[str]) -> str:
        path = ROOT / "benchmarks" / "results" / f"{match['file']}.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tables": {}}
        if match["title"] == "picture":
            drawn = (ROOT / "docs" / "serving.svg").exists()
            body = "![samples a second against batch size](docs/serving.svg)\n" if drawn else "Not drawn yet.\n"
        elif match["title"] == "machine" and "machine" in result:
            body = machine(result["machine"])
        elif match["title"] not in result["tables"]:
            body = "Not measured yet.\n"
        else:
            rows = result["tables"][match["title"]]
            body = formatted(rows)
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
