"""A test for leaks: bars after a decision are changed, everything is rebuilt from the bars, and nothing may differ.

What a trainer sees at a decision may depend on bars that are available then and on nothing else. So for some decisions
all later bars are altered, deleted, delayed, or joined by those of a symbol listed later; filling, derived columns,
selection, masks and normalisation are built anew; and every sample decided by then must be there again with the same
bits. Labels that were known by then must be the same too. Labels of a fold's training must not overlap its test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stager.bars.clock import instant_text
from stager.batches.built import Built, Chosen, Prepare, Request
from stager.batches.configured import read_configuration
from stager.batches.fold_leaks import check_folds
from stager.batches.leaks import Change, Findings, Leak, compare
from stager.batches.resident import PackSource, as_pack
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.changes import CHANGES
from stager.samples.labelling import Targets
from stager.samples.normalize import Normalize, as_normalize
from stager.samples.panel import Panel
from stager.samples.schemes import Scheme, read_scheme
from stager.samples.select import Select


@dataclass(frozen=True)
class LeakReport:
    """What :func:`leaktest` compared and found.

    Attributes
    ----------
    decisions : tuple of numpy.datetime64
        After which bars were changed.
    n_samples, n_windows, n_labels, n_folds : int
        Samples whose presence was compared, windows and labels compared bit by bit, folds checked, over all changes.
    leaks : tuple of Leak
        One of each kind and change, the earliest.
    warnings : tuple of str
    """

    decisions: tuple[np.datetime64, ...]
    n_samples: int
    n_windows: int
    n_labels: int
    n_folds: int
    leaks: tuple[Leak, ...]
    warnings: tuple[str, ...]

    def lines(self) -> Iterator[tuple[str, str]]:
        """A table for people."""
        some = ", ".join(instant_text(int(instant.astype(np.int64))) for instant in self.decisions[:3])
        yield "decisions", f"{len(self.decisions)}: {some}{', ...' if len(self.decisions) > 3 else ''}"
        yield "later bars", ", ".join(CHANGES)
        yield "compared", f"{self.n_samples:,} samples, {self.n_windows:,} windows, {self.n_labels:,} labels"
        yield "folds", f"{self.n_folds}" if self.n_folds else "none asked for"
        for warning in self.warnings:
            yield "note", warning
        for leak in self.leaks:
            yield "LEAK", leak.text
        if not self.leaks:
            yield "leaks", "none found"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            **asdict(self),
            "decisions": [f"{instant}Z" for instant in self.decisions],
            "leaks": [asdict(leak) | {"decision": f"{leak.decision}Z"} for leak in self.leaks],
        }


def leaktest(
    source: PackSource,
    *,
    window: int,
    dilation: int = 1,
    target: Targets = None,
    select: Chosen = Select(),  # noqa: B008 - frozen
    normalize: str | Normalize = "none",
    prepare: Prepare = None,
    panel: Panel | None = None,
    split: Scheme | None = None,
    decisions: int = 8,
    seed: int = 0,
) -> LeakReport:
    """Look for inputs, samples and labels that depend on bars after their decision.

    Parameters
    ----------
    source : Pack, path, pyarrow.Table or data frame
        The bars themselves, before anything is derived from them.
    window, dilation, target, normalize
        As of a :class:`stager.Stager`.
    select : Select or callable
        A function of the prepared pack, if you choose by what is in it.
    prepare : Derive or callable, optional
        What you make of the bars before a Stager serves them: a recipe, or a function from a Pack to a Pack, which
        may be a panel.
    panel : Panel, optional
        How all symbols are then set side by side. What each instant shows of each symbol, the mask and which symbols
        are served are compared too.
    split : WalkForward, PurgedKFold or Combinatorial, optional
        Folds whose training labels are checked against their tests, and whose fitted statistics against their training.
    decisions : int
        How many, drawn at random; each costs four rebuilds of everything.
    seed : int
        Of the draw, and of the changes.

    Returns
    -------
    LeakReport

    Raises
    ------
    SampleError
        If the request leaves no sample, or the source is a panel.
    BarsError, PackError
        As :func:`stager.stage`.
    """
    if isinstance(decisions, bool) or not isinstance(decisions, (int, np.integer)) or decisions < 1:
        raise SampleError(f"decisions is {decisions!r}; it must be an integer of at least 1")
    bars = as_pack(source)
    if bars.manifest.panel is not None:
        raise SampleError(
            "the pack is a panel; give the bars that it was made of, and how: panel=Panel(...), or [panel] in a "
            "configuration"
        )
    request = Request(window, dilation, target, select, as_normalize(normalize), prepare, panel, split)
    now = Built(bars, request, strict=True)
    rng = np.random.default_rng(seed)
    instants = np.unique(now.samples.decisions)
    drawn = np.sort(rng.choice(instants, min(decisions, len(instants)), replace=False))
    found = Findings()
    for instant in drawn:
        for name, change in CHANGES.items():
            later = change(bars, int(instant), rng)
            if later is not None:
                compare(now, _rebuilt(later, request), Change(int(instant), name, rng, found))
    n_folds = check_folds(now, found)
    return LeakReport(
        tuple(drawn.view("datetime64[ns]")),
        found.n_samples,
        found.n_windows,
        found.n_labels,
        n_folds,
        tuple(found.leaks.values()),
        tuple(_warnings(bars)),
    )


def leaktest_of(source: PackSource, config: str | Path, *, decisions: int = 8, seed: int = 0) -> LeakReport:
    """:func:`leaktest` of what a configuration serves from a pack of bars, with the folds of its ``[split]``.

    Parameters
    ----------
    source : Pack, path, pyarrow.Table or data frame
        The bars that ``[derive]`` and ``[panel]`` begin with.
    config : str or Path
        As in :meth:`stager.Stager.from_config`; its own source is not used.
    decisions, seed : int
        As of :func:`leaktest`.

    Raises
    ------
    ConfigError, SampleError, BarsError, PackError
    """
    told = read_configuration(config, {"source": source})
    arguments = {name: told.arguments[name] for name in ("window", "dilation", "target", "select", "normalize")
                 if name in told.arguments}  # fmt: skip
    return leaktest(
        told.source, **arguments, prepare=told.recipe, panel=told.panel, split=read_scheme(config), decisions=decisions,
        seed=seed,
    )  # fmt: skip


def _rebuilt(bars: Pack, request: Request) -> Built | SampleError:
    """An error where the changed bars leave no sample at all."""
    try:
        return Built(bars, request.without_the_vanished(bars))
    except SampleError as error:
        return error


def _warnings(bars: Pack) -> Iterator[str]:
    for decision in bars.manifest.decisions:
        if decision.what == "derived":
            yield (
                f"the pack holds derived columns ({decision.value}), which were not rebuilt; test the bars that it "
                f"came from, with the recipe"
            )
