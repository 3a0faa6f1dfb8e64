"""Stage market bars on the GPU once; train at memory speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stager.bars.options import ReadOptions
from stager.bars.read import read
from stager.batches.arrays import StagedArrays, stage_arrays
from stager.batches.batch import Batch
from stager.batches.folds import Fold
from stager.batches.leaktest import leaktest
from stager.batches.ranks import Ranks
from stager.batches.resident import Resident, stage
from stager.batches.stager import Stager
from stager.batches.stats import ServingStats
from stager.errors import StagerError
from stager.packs.appending import append
from stager.packs.compacting import compact
from stager.packs.layout import Pack, open_pack
from stager.packs.packing import pack
from stager.packs.verify import verify
from stager.samples.derive import Derive, derive
from stager.samples.features import Feature
from stager.samples.labels import Labels
from stager.samples.normalize import Normalize
from stager.samples.panel import Panel, PanelPlan, panel, panel_plan
from stager.samples.plan import Plan
from stager.samples.schemes import Combinatorial, PurgedKFold, WalkForward
from stager.samples.select import Select
from stager.samples.targets import Target
from stager.samples.timeframes import TimeFrame

if TYPE_CHECKING:
    from stager.cuda.arena import Arena
    from stager.service.client import attach

__all__ = [
    "Arena",
    "Batch",
    "Combinatorial",
    "Derive",
    "Feature",
    "Fold",
    "Labels",
    "Normalize",
    "Pack",
    "Panel",
    "PanelPlan",
    "Plan",
    "PurgedKFold",
    "Ranks",
    "ReadOptions",
    "Resident",
    "Select",
    "ServingStats",
    "StagedArrays",
    "Stager",
    "StagerError",
    "Target",
    "TimeFrame",
    "WalkForward",
    "append",
    "attach",
    "compact",
    "derive",
    "leaktest",
    "open_pack",
    "pack",
    "panel",
    "panel_plan",
    "read",
    "stage",
    "stage_arrays",
    "verify",
]


def __getattr__(name: str) -> Any:
    # The arena imports CuPy, which `import stager` must not, and the service Arrow Flight, which few need.
    if name == "Arena":
        from stager.cuda.arena import Arena

        return Arena
    if name == "attach":
        from stager.service.client import attach

        return attach
    raise AttributeError(f"module 'stager' has no attribute {name!r}")
