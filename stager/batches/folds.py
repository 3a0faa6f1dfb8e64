"""A fold: two Stagers over the rows that all folds share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stager.bars.clock import instant_text
from stager.packs.layout import Pack
from stager.samples.folds import FOLD_REASONS, FoldSamples, Zone, in_time
from stager.samples.index import SampleIndex
from stager.samples.schemes import Scheme, duration_text, embargo_of

if TYPE_CHECKING:
    from stager.batches.stager import Stager


class Fold:
    """One fold of :meth:`Stager.split`. Nothing is copied: both Stagers serve from the rows of the one that was split.

    Attributes
    ----------
    number : int
        From 0.
    n_folds : int
    scheme : WalkForward, PurgedKFold or Combinatorial
    interval : Interval
        Of the bars.
    zones : tuple of Zone
        What happens to which samples, by time.
    """

    def __init__(
        self,
        pack: Pack,
        index: SampleIndex,
        samples: FoldSamples,
        scheme: Scheme,
        serve: Callable[[SampleIndex, str, Literal["train", "test"]], Stager],
    ) -> None:
        self.number, self.n_folds, self.zones = samples.number, samples.n_folds, samples.zones
        self.scheme, self.interval = scheme, pack.interval
        self._pack, self._index, self._samples, self._serve = pack, index, samples, serve

    @cached_property
    def train(self) -> Stager:
        """Serves the training samples as the Stager that was split would; made when first asked for."""
        return self._serve(self._fitted, f"{self._name}, train", "train")

    @cached_property
    def test(self) -> Stager:
        """Serves the test samples in the order of their decisions, each once; made when first asked for."""
        index = replace(in_time(self._pack, self._index, self._samples), fitted=self._fitted.fitted)
        return self._serve(index, f"{self._name}, test", "test")

    @cached_property
    def _fitted(self) -> SampleIndex:
        """The training samples; what normalisation needs of a fold is fitted on them alone."""
        return self._samples.train.refit(self._pack)

    @property
    def counts(self) -> dict[str, int]:
        """Samples that train and test, and those that do neither by reason; they add up to those of the whole set."""
        found = {kind: self._samples.count(kind) for kind in ("train", "test", "purge", "embargo")}
        return found | {FOLD_REASONS[0]: self._index.n_samples - sum(found.values())}

    def describe(self) -> str:
        """A table for people: what trains, tests and is left out, by time. Instants are decisions, UTC."""
        embargo = embargo_of(self.scheme)
        after = "the clock span of each window" if embargo is None else duration_text(embargo)
        tested = self._samples.of("test")[0].last
        if not any(zone.last > tested for zone in self.zones if zone.kind != "test"):
            after = "no training follows a test"
        lines = [
            ("fold", f"{self._name}: {self.scheme}"),
            *((zone.kind, self._tell(zone)) for zone in self.zones),
            ("embargo is", after),
            ("samples", ", ".join(f"{kind} {n:,}" for kind, n in self.counts.items())),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            "number": self.number,
            "n_folds": self.n_folds,
            "scheme": str(self.scheme),
            "samples": self.counts,
            "zones": [
                {
                    "kind": zone.kind,
                    "first": f"{np.datetime64(zone.first, 'ns')}Z",
                    "last": f"{np.datetime64(zone.last, 'ns')}Z",
                    "label_end": f"{np.datetime64(zone.label_end, 'ns')}Z",
                    "n_samples": zone.n_samples,
                }
                for zone in self.zones
            ],
        }

    def __repr__(self) -> str:
        return f"<Fold {self._name}: {', '.join(f'{kind} {n:,}' for kind, n in self.counts.items())}>"

    @property
    def _name(self) -> str:
        return f"{self.number + 1} of {self.n_folds}"

    def _tell(self, zone: Zone) -> str:
        first, last, end = (instant_text(instant) for instant in (zone.first, zone.last, zone.label_end))
        return f"{first} to {last}, {zone.n_samples:,} samples, labels known by {end}"
