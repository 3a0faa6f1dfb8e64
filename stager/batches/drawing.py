"""A picture of folds: what trains, is purged, tests and lies in the embargo, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stager.batches.folds import Fold
from stager.errors import ConfigError

# Later ones are drawn on top. The last two are drawn with an outline, which keeps a few bars visible among thousands.
_COLOURS = {"train": "#a6cee3", "test": "#1f3d7a", "embargo": "#9a9a9a", "purge": "#f2711c"}
_OUTLINED = ("embargo", "purge")
_COUNTED = ("train", "test", "purge", "embargo")
_MOST_LABELS = 60


def draw_folds(folds: Sequence[Fold], path: str | Path) -> None:
    """Draw folds into a file.

    Parameters
    ----------
    folds : sequence of Fold
        At least one.
    path : str or Path
        The suffix tells the format: .png, .svg or .pdf.

    Raises
    ------
    ConfigError
        If matplotlib is not installed, if there is no fold, or if the suffix is none of these.
    OSError
        If the file can't be written.
    """
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: folds are drawn as .png, .svg or .pdf; choose such a name")
    if not folds:
        raise ConfigError("there are no folds to draw; write a table [split] into the configuration")
    try:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(f"drawing folds needs matplotlib ({error}): pip install 'stager[plot]'") from error
    figure = Figure(figsize=(10, min(60, 1.3 + 0.34 * len(folds))), layout="constrained")
    axes = figure.subplots()
    for fold in folds:
        for kind, colour in _COLOURS.items():
            bars = [_bar(fold, zone) for zone in fold.zones if zone.kind == kind]
            outline = 1.2 if kind in _OUTLINED else 0
            axes.broken_barh(bars, (fold.number - 0.36, 0.72), facecolor=colour, edgecolor=colour, linewidth=outline)
    kinds = [kind for kind in _COLOURS if any(zone.kind == kind for fold in folds for zone in fold.zones)]
    axes.legend(
        handles=[Patch(color=_COLOURS[kind], label=kind) for kind in kinds],
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(kinds), frameon=False,
    )  # fmt: skip
    axes.set_ylim(len(folds) - 0.5, -0.5)
    shown = folds[:: -(-len(folds) // _MOST_LABELS)]
    axes.set_yticks([fold.number for fold in shown], [f"fold {fold.number + 1}" for fold in shown])
    counts = axes.secondary_yaxis("right")
    counts.set_yticks([fold.number for fold in shown], [_counts(fold) for fold in shown])
    counts.tick_params(length=0, labelsize="small")
    counts.spines["right"].set_visible(False)
    axes.text(1.01, 1.0, "samples: " + " · ".join(_COUNTED), transform=axes.transAxes, fontsize="small", va="bottom")
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_xlabel("decision (UTC)")
    axes.margins(x=0.01)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)


def _bar(fold: Fold, zone: Any) -> tuple[float, float]:
    """Start and length of a zone in days, as matplotlib counts them; a decision is drawn as long as its bar."""
    ends = np.array([zone.first, fold.interval.available(np.array([zone.last]))[0]])
    first, last = (ends.astype("datetime64[ns]") - np.datetime64("1970-01-01", "ns")) / np.timedelta64(1, "D")
    return float(first), float(last - first)


def _counts(fold: Fold) -> str:
    return " · ".join(f"{fold.counts[kind]:,}" for kind in _COUNTED)
