"""Draw docs/serving.svg from benchmarks/results: samples a second against batch size, a line a peer.

python benchmarks/plot.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from tables import short

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "serving.svg"
SHAPE = "64 x 8, "
# Bound by the bus as the one that is drawn.
LEFT_OUT = [
    f"Stager, {how}, host" for how in ("CuPy", "torch", "CUDA graph", "CUDA graph of 8 batches", "CUDA graph of torch")
]
MARKERS = "osD^vP<>X*hp"
OURS, THEIRS = ("#0b3d91", "#1f77b4", "#17a2c9", "#62c3d0"), ("#b2182b", "#e08214", "#8c510a", "#7f7f7f", "#9467bd")


def panels() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Title and rows of each panel, where they were measured: a GPU with rows beyond its cache, and a CPU.

    Qlib and neuralforecast are measured with the smaller rows alone.
    """
    for name, choose in (("serve", max), ("serve_cpu", min)):
        path = RESULTS / f"{name}.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tables": {}}
        mains = {title: rows for title, rows in result["tables"].items() if title.startswith(SHAPE)}
        if not mains:
            continue
        title = choose(mains, key=lambda one, mains=mains: mains[one][0]["rows_nbytes"])
        where = result["machine"]["gpu"] if name == "serve" else f"CPU, {result['machine']['cores']} cores"
        yield f"{where}: windows of {title}", mains[title]


def draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """One line a peer, least to most as bars."""
    measured = [row for row in rows if "seconds" in row and row["name"] not in LEFT_OUT]
    names = list(dict.fromkeys(row["name"] for row in measured))
    counts = {True: 0, False: 0}
    for name in names:
        found = sorted((row for row in measured if row["name"] == name), key=lambda row: row["batch"])
        middle = [row["batch"] / row["seconds"] for row in found]
        spread = [
            [there - row["batch"] / row["max"] for there, row in zip(middle, found, strict=True)],
            [row["batch"] / row["min"] - there for there, row in zip(middle, found, strict=True)],
        ]
        ours = name.startswith("Stager")
        colours, index = OURS if ours else THEIRS, counts[ours]
        counts[ours] += 1
        axes.errorbar(
            [row["batch"] for row in found], middle, spread, label=name, capsize=2, markersize=5,
            color=colours[index % len(colours)], marker=MARKERS[index % len(MARKERS)],
            linestyle="--" if name.endswith(", host") or index >= len(colours) else "-", linewidth=2 if ours else 1.2,
        )  # fmt: skip
    batches = sorted({row["batch"] for row in measured})
    axes.set(xscale="log", yscale="log", xlabel="batch size")
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    # In the order in which the lines end, so that the legend reads as the picture does.
    handles, labels = axes.get_legend_handles_labels()
    ends = {name: max((row["batch"], row["batch"] / row["seconds"]) for row in measured if row["name"] == name)[1]
            for name in names}  # fmt: skip
    order = sorted(range(len(labels)), key=lambda index: -ends[labels[index]])
    axes.legend(
        [handles[index] for index in order], [labels[index] for index in order],
        fontsize=7.5, loc="upper left", bbox_to_anchor=(0, -0.16), frameon=False,
    )  # fmt: skip


def main() -> None:
    found = list(panels())
    if not found:
        sys.exit("nothing is measured yet: run benchmarks/serve.py")
    # The same picture from the same figures, byte for byte.
    plt.rcParams |= {"svg.hashsalt": "stager", "font.size": 9, "svg.fonttype": "none"}
    figure, axes = plt.subplots(1, len(found), figsize=(5.2 * len(found), 7.2), squeeze=False, layout="constrained")
    for (title, rows), one in zip(found, axes[0], strict=True):
        draw(one, rows)
        one.set_title(title, fontsize=9)
    axes[0][0].set_ylabel("samples a second, in a Python loop")
    figure.savefig(PICTURE, metadata={"Date": None})
    print("written:", PICTURE)


if __name__ == "__main__":
    main()
