"""The plan of a configuration and its folds, before anything is staged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stager.bars.clock import instant_text
from stager.batches.configured import read_configuration
from stager.batches.folds import Fold
from stager.batches.resident import PackSource, StagingOptions
from stager.batches.stager import Stager
from stager.samples.panel import PanelPlan, panel_plan
from stager.samples.plan import Plan
from stager.samples.schemes import read_scheme


@dataclass(frozen=True)
class Planned:
    """What a configuration serves.

    Attributes
    ----------
    plan : Plan
        Of the whole set.
    panel : PanelPlan or None
        What setting the symbols side by side takes.
    folds : tuple of Fold
        Empty if the configuration has no table ``[split]``. They can be described, but serve nothing.
    """

    plan: Plan
    panel: PanelPlan | None
    folds: tuple[Fold, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "plan": self.plan.as_dict(),
            "panel": None if self.panel is None else self.panel.as_dict(),
            "folds": [fold.as_dict() for fold in self.folds],
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """The table for people."""
        if self.panel is not None:
            yield from self.panel.lines()
        yield from self.plan.lines()
        if self.folds:
            yield "split", str(self.folds[0].scheme)
        for fold in self.folds:
            tests = ", ".join(
                f"{instant_text(zone.first)} to {instant_text(zone.last)}" for zone in fold.zones if zone.kind == "test"
            )
            counts = ", ".join(f"{kind} {n:,}" for kind, n in fold.counts.items())
            yield f"fold {fold.number + 1}", f"{counts}; tests {tests}"


def plan_of(source: PackSource, config: str | Path) -> Planned:
    """What a configuration would serve from a pack or bar file; needs no GPU and stages nothing.

    Parameters
    ----------
    source : path, Pack, pyarrow.Table or data frame
    config : str or Path
        As in :meth:`stager.Stager.from_config`; its own source is not used.

    Raises
    ------
    ConfigError, PackError, BarsError, SampleError
    """
    told = read_configuration(config, {"source": source})
    scheme = read_scheme(config)
    # Before the panel is made, which takes memory.
    side_by_side = None if told.panel is None else panel_plan(told.derived, told.panel)
    wanted = told.staging or StagingOptions()
    with Stager(told.prepared(), **told.arguments, device="cpu", placement="host") as st:
        folds = () if scheme is None else tuple(st.split(scheme))
        plan = replace(st.plan, device=wanted.device, placement=wanted.placement, path="nothing is staged yet")
    return Planned(plan, side_by_side, folds)
