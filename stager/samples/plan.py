"""The plan: what will be served and what it takes, known before anything is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stager.config import format_nbytes
from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.labelling import AnyTarget, Targets, as_targets
from stager.samples.labels import Labels
from stager.samples.normalize import RAW, Normalize
from stager.samples.panel_index import Cells, PanelIndex

GAPS = (0, 1, 5, 30)
# Reasons that the user chose.
SELECTION = (
    "symbol not selected",
    "outside the interval",
    "outside the session",
    "history too short",
    "not in the universe",
    "decision at a filled bar",
    "not on the stride",
)
# Of a fold, those that the fold has not: what bars lose is told by the plan of the whole set.
OF_THE_FOLD = ("purge", "embargo")


@dataclass(frozen=True)
class Plan:
    """What a Stager serves. ``str(plan)`` is a table for people, ``plan.as_dict()`` for programs.

    Attributes
    ----------
    n_rows, n_symbols, n_runs, longest_run : int
    n_samples, n_batches : int
        Samples and batches of an epoch.
    window, dilation, batch_size : int
        `batch_size` is in samples, or in instants where there are any.
    columns : tuple of str
        Those that are served.
    adjustment : {"raw", "split", "total", "unknown"}
        What the pack says its prices and volume are adjusted for.
    normalize : str
        How columns are normalised, by role.
    target : str
        "none", or what is predicted.
    reasons : dict of str to int
        Rows that end no sample, by reason; with `n_samples` they add up to `n_rows`.
    samples_at_gap : dict of int to int
        Complete windows with room for the label if runs could span so many missing bars; empty for a fold.
    rows_nbytes, tables_nbytes, batch_nbytes, disk_nbytes : int
        The staged rows, the sample tables of this Stager, one batch, and the files of the pack.
    device, placement : str
    path : str
        How the rows came to their place.
    fold : str
        Which part of which fold; empty for the whole set.
    n_instants : int or None
        Decision instants of an epoch, where batches hold whole ones.
    panel : Cells or None
        Of a panel, what its places hold; rows and `reasons` are about its instants.
    world_size : int
        Ranks that share an epoch; `n_batches` and `batch_size` are of each.
    weighted : bool
        Whether samples are drawn by weight.
    shard : str
        Which part of the pack is held here; empty for all of it.
    doubts : tuple of str
        What the bars contradict; part of `warnings`.
    """

    n_rows: int
    n_symbols: int
    n_runs: int
    longest_run: int
    n_samples: int
    n_batches: int
    window: int
    dilation: int
    batch_size: int
    columns: tuple[str, ...]
    adjustment: str
    normalize: str
    target: str
    reasons: dict[str, int]
    samples_at_gap: dict[int, int]
    rows_nbytes: int
    tables_nbytes: int
    batch_nbytes: int
    disk_nbytes: int
    device: str
    placement: str
    path: str
    fold: str = ""
    n_instants: int | None = None
    panel: Cells | None = None
    world_size: int = 1
    weighted: bool = False
    shard: str = ""
    doubts: tuple[str, ...] = ()

    @property
    def usable(self) -> float:
        """Share of the selected rows that end a sample; of a fold, of the samples in its intervals."""
        return self.n_samples / (self.n_samples + sum(self._lost.values()))

    @property
    def _panel_lines(self) -> list[tuple[str, str]]:
        if self.panel is None:
            return []
        cells = self.panel
        return [
            ("panel", f"{cells.fill:.1%} filled: {cells.n_bars:,} bars, {cells.n_cells:,} served at their decision"),
            *((f"- {where}", f"{n:,} places") for where, n in cells.empty.items() if n),
            *((f"- {reason}", f"{n:,} bars") for reason, n in cells.reasons.items() if n),
        ]

    @property
    def _batch(self) -> str:
        text = str(self.batch_size)
        if self.n_instants is not None:
            text += f" of {self.n_instants:,} instants"
        return f"{text} an epoch" + (f" on each of {self.world_size} ranks" if self.world_size > 1 else "")

    @property
    def _lost(self) -> dict[str, int]:
        if self.fold:
            return {reason: self.reasons[reason] for reason in OF_THE_FOLD}
        return {reason: n for reason, n in self.reasons.items() if reason not in SELECTION}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should look at before training."""
        if self.usable >= 0.7:
            return self.doubts
        worst = max(self._lost, key=lambda reason: self._lost[reason])
        rows = "samples of the fold are left" if self.fold else "selected rows end a sample"
        return (f"only {self.usable:.0%} of the {rows}; most are lost to: {worst}", *self.doubts)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {**asdict(self), "usable": self.usable, "warnings": list(self.warnings)}

    @property
    def _apart(self) -> str:
        return f", each {self.dilation} after the other," if self.dilation > 1 else ""

    def lines(self) -> list[tuple[str, str]]:
        """The table for people."""
        return [
            *((("fold", self.fold),) if self.fold else ()),
            *((("shard", self.shard),) if self.shard else ()),
            ("samples", f"{self.n_samples:,} of {self.n_rows:,} rows, {self.n_symbols:,} symbols"),
            *self._panel_lines,
            ("usable", f"{self.usable:.1%} of the {'samples of the fold' if self.fold else 'selected rows'}"),
            ("window", f"{self.window} rows{self._apart} of {', '.join(self.columns)}"),
            ("normalize", self.normalize),
            ("adjustment", self.adjustment),
            ("target", self.target),
            ("batches", f"{self.n_batches:,} of {self._batch}, {format_nbytes(self.batch_nbytes)} each"),
            *((("sampling", "drawn by weight, with replacement"),) if self.weighted else ()),
            ("runs", f"{self.n_runs:,}, the longest of {self.longest_run:,} rows"),
            *((f"- {reason}", f"{n:,} rows") for reason, n in self.reasons.items() if n),
            *(
                (("at max_gap", ", ".join(f"{gap}: {n:,}" for gap, n in self.samples_at_gap.items())),)
                if self.samples_at_gap
                else ()
            ),
            (
                "memory",
                f"{format_nbytes(self.rows_nbytes)} rows, {format_nbytes(self.tables_nbytes)} tables; "
                f"{format_nbytes(self.disk_nbytes)} on disk",
            ),
            ("device", f"{self.device}, placement {self.placement} ({self.path})"),
            *(("warning", text) for text in self.warnings),
        ]

    def __str__(self) -> str:
        lines = self.lines()
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def describe(target: Targets) -> str:
    """One line that says what is predicted."""
    return "; ".join(map(_describe, as_targets(target))) or "none"


def _describe(target: AnyTarget) -> str:
    if isinstance(target, Labels):
        text = f"given labels {target.value!r} until {target.end!r}"
    else:
        entry, leave = f"{target.price} of bar t+{target.delay}", f"{target.exit_column} of bar t+{target.reach}"
        extra = f", threshold {target.threshold}, {target.classes} classes" if target.kind == "direction" else ""
        across = ", across gaps" if target.across_gaps == "allow" else ""
        text = f"{target.kind} from {entry} to {leave}{extra}{across}"
    if target.scale == "volatility":
        return f"{text}, by the volatility of {target.scale_window} bars"
    return text if target.scale is None else f"{text}, {target.scale} across symbols"


def make_plan(
    pack: Pack,
    index: SampleIndex,
    target: Targets,
    normalize: Normalize = RAW,
    *,
    batch_size: int,
    n_batches: int,
    device: str,
    placement: str,
    path: str,
    fold: str = "",
    n_instants: int | None = None,
    world_size: int = 1,
    draws_nbytes: int = 0,
) -> Plan:
    """The plan of a Stager; touches no device."""
    cells, width, mask = None, 1, 0
    if isinstance(index, PanelIndex):
        cells, width, mask = index.counts, len(index.symbols), index.length * len(index.symbols)
    typical = batch_size if n_instants is None else index.n_samples * batch_size // n_instants
    wanted = as_targets(target)
    served = pack.columns if index.columns is None else tuple(pack.columns[column] for column in index.columns)
    reach = min((_bound_by_run(one) for one in wanted), default=0)
    return Plan(
        n_rows=pack.n_rows,
        n_symbols=len(pack.symbols) if cells is None else cells.n_symbols,
        n_runs=index.n_runs,
        longest_run=index.longest_run,
        n_samples=index.n_samples,
        n_batches=n_batches,
        window=index.length,
        dilation=index.dilation,
        batch_size=batch_size,
        columns=served,
        adjustment=pack.manifest.adjustment,
        normalize=str(normalize),
        target=describe(target),
        reasons=dict(index.reasons),
        samples_at_gap={} if fold else {gap: index.at_gap(gap, reach) for gap in GAPS},
        rows_nbytes=pack.rows_nbytes,
        tables_nbytes=index.nbytes + draws_nbytes,
        disk_nbytes=sum(file.size_nbytes for part in pack.manifest.segments for file in part.files.values()),
        batch_nbytes=typical * ((index.length * len(served) + len(wanted)) * width * 4 + mask),
        device=device,
        placement=placement,
        path=path,
        fold=fold,
        n_instants=n_instants,
        panel=cells,
        world_size=world_size,
        weighted=draws_nbytes > 0,
        shard="" if pack.shard is None else str(pack.shard),
        doubts=index.warnings,
    )


def _bound_by_run(target: AnyTarget) -> int:
    """Bars after the decision that must lie in its run."""
    return 0 if isinstance(target, Labels) or target.across_gaps == "allow" else target.reach
