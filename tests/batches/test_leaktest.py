"""The leak test: honest pipelines pass whatever they are made of, and each planted leak is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import MINUTE, START, bar_table, memory_pack
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stager
from stager import (
    Combinatorial,
    Derive,
    Feature,
    Labels,
    Normalize,
    PurgedKFold,
    ReadOptions,
    Select,
    Target,
    TimeFrame,
)
from stager.batches import fold_leaks, leaks
from stager.batches.leaktest import leaktest
from stager.cli import main
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory
from stager.samples.index import SampleIndex


def bars(seed: int = 3, n: int = 160, symbols: str = "ABC") -> Pack:
    """Symbols with gaps, one listed late and one that ends early."""
    random = np.random.default_rng(seed)
    steps = {}
    for number, symbol in enumerate(symbols):
        first, last = (40 if number == 1 else 0), (n - 50 if number == 2 else n)
        steps[symbol] = [step for step in range(first, last) if random.random() < 0.97]
    rows = sum(map(len, steps.values()))
    return memory_pack(steps, close=100 * np.exp(np.cumsum(random.normal(0, 0.01, rows))))


def column(pack: Pack, name: str, make: Callable[[Pack], Any]) -> Pack:
    """The bars with one column more."""
    table = pack.bars.append_column(name, pa.array(make(pack), pa.float64()))
    return pack_in_memory(table, ReadOptions(interval=pack.manifest.interval))


def kinds(report: Any) -> set[str]:
    return {leak.kind for leak in report.leaks}


# ------------------------------------------------------------------------------------------------------- honest


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    fill=st.booleans(),
    normalize=st.sampled_from(["none", "last", "zscore", Normalize(other="zscore", fit="train")]),
    target=st.sampled_from(
        [
            None,
            Target(horizon=3),
            [Target(horizon=2, kind="direction"), Target(horizon=5, scale="volatility", scale_window=4)],
            Target(horizon=2, scale="rank"),
            Target(horizon=2, delay=0, scale="demean"),
            Target(price="open", horizon=1, across_gaps="allow"),
        ]
    ),
    select=st.sampled_from(
        [
            Select(),
            Select(symbols=("A", "B"), max_gap=2),
            Select(session="00:05-02:10 UTC", stride=2),
            Select(min_history=30, max_gap=1, columns=["close", "volume"]),
        ]
    ),
    split=st.sampled_from([None, PurgedKFold(3), Combinatorial(4, 2, embargo="0min")]),
)
def test_an_honest_pipeline_has_no_leak(seed, fill, normalize, target, select, split):
    mean = Feature("mean", lambda bars: np.convolve(bars["close"].to_numpy(), [0.5, 0.5])[: bars.num_rows], lookback=1)
    recipe = Derive(
        ["log_return", TimeFrame("5min"), mean], fill="previous" if fill else "none", cap=2 if fill else None
    )
    if split is None and isinstance(normalize, Normalize):
        normalize = "last"  # what is fitted on all samples knows the future
    try:
        report = leaktest(
            bars(seed), window=4, target=target, select=select, normalize=normalize, prepare=recipe, split=split,
            decisions=2, seed=seed,
        )  # fmt: skip
    except SampleError as error:
        # A choice of sessions, strides and gaps may leave too little to split, or nothing.
        assert "no sample" in str(error) or "fold" in str(error) or "block" in str(error)  # noqa: PT017
        return
    assert report.leaks == ()
    assert report.n_windows > 0
    assert (report.n_labels > 0) == (target is not None) or report.n_labels == 0
    assert (report.n_folds > 0) == (split is not None)


def test_labels_of_ones_own_with_honest_ends_pass():
    pack = bars()
    close, stamps = pack.column("close"), pack.times
    rows = np.arange(0, pack.n_rows - 6, 3)
    rows = rows[np.searchsorted(pack.first_rows, rows, "right") == np.searchsorted(pack.first_rows, rows + 5, "right")]
    owners = np.searchsorted(pack.first_rows, rows, "right") - 1
    table = pa.table(
        {
            "symbol": [pack.symbols[owner] for owner in owners],
            "time": pa.array(stamps[rows], pa.timestamp("ns", "UTC")),
            "label": close[rows + 5] / close[rows] - 1,
            "label_end": pa.array(pack.available_at(rows + 5), pa.timestamp("ns", "UTC")),
        }
    )
    report = leaktest(pack, window=3, target=Labels(table), split=PurgedKFold(3), decisions=3)
    assert report.leaks == ()
    assert report.n_folds == 3


def test_what_is_compared_is_told():
    report = leaktest(bars(), window=4, target=Target(horizon=2), split=PurgedKFold(3), decisions=5, seed=1)
    assert len(report.decisions) == 5
    assert report.n_folds == 3
    assert report.n_samples >= report.n_windows > 100
    told = dict(report.lines())
    assert told["leaks"] == "none found"
    assert f"{report.n_windows:,} windows" in told["compared"]
    assert leaktest(bars(), window=4, target=Target(horizon=2), decisions=5, seed=1).decisions == report.decisions


def test_a_derived_pack_says_what_it_can_not_show(tmp_path):
    derived = stager.derive(bars(), Derive(["log_return"]))
    (warning,) = leaktest(derived, window=3, decisions=1).warnings
    assert "log_return" in warning


# ------------------------------------------------------------------------------------------------------ planted


def test_a_derived_column_that_looks_ahead_is_found():
    def ahead(pack: Pack) -> np.ndarray:
        close = pack.column("close")
        return np.append(close[1:], close[-1]) / close - 1

    report = leaktest(bars(), window=4, prepare=lambda pack: column(pack, "ahead", ahead), decisions=6)
    assert kinds(report) == {"input"}
    leak = report.leaks[0]
    assert leak.text.startswith("ahead of ")
    assert "ahead 0 bars before" in leak.text
    assert dict(report.lines())["LEAK"]


def test_a_feature_that_looks_ahead_is_refused_as_it_is_derived():
    ahead = Feature("ahead", lambda table: np.append(table["close"].to_numpy()[1:], 0.0), lookback=0)
    with pytest.raises(SampleError, match="'ahead' looks ahead"):
        leaktest(bars(), window=4, prepare=Derive([ahead]), decisions=1)


def test_a_fill_that_needs_the_future_is_found():
    def filled(pack: Pack) -> Pack:
        """Fills a missing bar with the mean of its neighbours, where there is a bar behind it."""
        tables = []
        for symbol, first, n in zip(pack.symbols, pack.first_rows, pack.counts, strict=True):
            times, close = pack.times[first : first + n], pack.column("close")[first : first + n]
            holes = np.flatnonzero(np.diff(times) == 2 * MINUTE)
            times = np.concatenate([times, times[holes] + MINUTE])
            close = np.concatenate([close, (close[holes] + close[holes + 1]) / 2])
            steps = ((times - START) // MINUTE).tolist()
            tables.append(bar_table({symbol: steps}, close=close, volume=np.ones(len(close))))
        return pack_in_memory(pa.concat_tables(tables), ReadOptions(interval="1min"))

    report = leaktest(bars(n=400), window=4, prepare=filled, decisions=40)
    assert kinds(report) & {"input", "sample"}


def test_a_mask_that_knows_the_delisting_is_found():
    def bars_to_go(pack: Pack) -> np.ndarray:
        return np.concatenate([np.arange(n)[::-1] < 20 for n in pack.counts.tolist()]).astype(float)

    report = leaktest(bars(), window=4, prepare=lambda pack: column(pack, "ends_soon", bars_to_go), decisions=12)
    assert "input" in kinds(report)
    assert any("ends_soon" in leak.text for leak in report.leaks)


def test_a_selection_by_total_history_is_found():
    def long_ones(pack: Pack) -> Select:
        return Select(symbols=[name for name, n in zip(pack.symbols, pack.counts, strict=True) if n >= 110])

    report = leaktest(bars(), window=4, select=long_ones, decisions=6)
    assert kinds(report) == {"sample"}
    assert all("is not there" in leak.text or "is there only" in leak.text for leak in report.leaks)


def test_a_global_z_score_is_found():
    def scaled(pack: Pack) -> Pack:
        def standard(pack: Pack) -> np.ndarray:
            close = pack.column("close")
            return (close - close.mean()) / close.std()

        return column(pack, "z", standard)

    report = leaktest(bars(), window=4, prepare=scaled, decisions=2)
    assert {leak.change for leak in report.leaks} == {"altered", "deleted", "joined by another symbol"}
    assert all(leak.text.startswith("z of ") for leak in report.leaks)


def test_a_ranking_among_all_symbols_that_will_ever_be_is_found():
    def share(pack: Pack) -> Pack:
        return column(pack, "share", lambda pack: np.full(pack.n_rows, 1 / len(pack.symbols)))

    report = leaktest(bars(), window=4, prepare=share, decisions=4)
    assert "joined by another symbol" in {leak.change for leak in report.leaks}


def test_a_purge_one_bar_short_is_found(monkeypatch):
    honest = fold_leaks.cut_folds

    def short(pack: Pack, index: SampleIndex, ends: Any, scheme: Any) -> Any:
        """Labels are taken to end a bar before they do."""
        return honest(pack, index, lambda rows: ends(rows) - MINUTE, scheme)

    arguments: dict[str, Any] = {"window": 4, "target": Target(horizon=4), "split": PurgedKFold(4, embargo="0min")}
    assert not leaktest(bars(), **arguments, decisions=1).leaks
    monkeypatch.setattr(fold_leaks, "cut_folds", short)
    report = leaktest(bars(), **arguments, decisions=1)
    assert kinds(report) == {"fold"}
    assert {leak.change for leak in report.leaks} <= {f"fold {number}" for number in range(1, 5)}
    assert "labels overlap its test" in report.leaks[0].text


def test_a_label_that_is_known_later_than_it_says_is_found(monkeypatch):
    honest = SampleIndex.label_ends
    monkeypatch.setattr(SampleIndex, "label_ends", lambda index, rows: honest(index, rows) - 2 * MINUTE)
    report = leaktest(bars(), window=4, target=Target(horizon=3), decisions=6)
    assert kinds(report) <= {"label", "sample"}
    assert "label" in kinds(report)
    assert "said to be known by" in next(leak.text for leak in report.leaks if leak.kind == "label")


def test_statistics_of_all_samples_are_found():
    """With folds each fits its own; without them they are those of all samples, the later ones too."""
    fitted = Normalize("zscore", "zscore", "none", fit="train")
    report = leaktest(bars(), window=4, normalize=fitted, decisions=3)
    assert kinds(report) == {"input"}
    assert not leaktest(bars(), window=4, normalize=fitted, split=PurgedKFold(3), decisions=3).leaks


def test_statistics_of_more_than_the_training_are_found(monkeypatch):
    honest = SampleIndex.refit
    whole = bars()

    def fit_on_all(index: SampleIndex, pack: Pack) -> SampleIndex:
        everything = replace(index, span_rows=np.array([10]), span_ids=np.array([0, pack.n_rows - 10]))
        return replace(index, fitted=honest(everything, pack).fitted)

    monkeypatch.setattr(SampleIndex, "refit", fit_on_all)
    report = leaktest(
        whole, window=4, normalize=Normalize("zscore", "zscore", "none", fit="train"), split=PurgedKFold(3), decisions=1
    )
    assert kinds(report) == {"statistics"}
    assert "those of its training are" in report.leaks[0].text


def test_a_look_back_beyond_the_declared_one_is_no_leak_of_the_future():
    back = Feature(
        "back", lambda table: np.convolve(table["close"].to_numpy(), np.ones(3))[: table.num_rows], lookback=2
    )
    assert not leaktest(bars(), window=4, prepare=Derive([back]), decisions=4).leaks


# ------------------------------------------------------------------------------------------------------ command

CONFIG = """
[derive]
columns = ["log_return"]
[batches]
window = 8
batch_size = 32
[target]
horizon = 4
[select]
symbols = ["A", "C"]
[split]
scheme = "purged_kfold"
folds = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    stager.pack(bars().bars, tmp_path / "bars.pack", read=ReadOptions(interval="1min"))
    (tmp_path / "honest.toml").write_text(CONFIG)
    return tmp_path


def test_the_command_passes_an_honest_configuration(folder):
    done = CliRunner().invoke(main, ["leaktest", "bars.pack", "--config", "honest.toml", "--decisions", "3"])
    assert done.exit_code == 0, done.output
    assert "none found" in done.output
    assert "folds" in done.output


def test_the_command_tells_programs(folder):
    done = CliRunner().invoke(main, ["leaktest", "bars.pack", "--config", "honest.toml", "--decisions", "2", "--json"])
    told = json.loads(done.stdout)
    assert told["leaks"] == []
    assert told["n_folds"] == 3
    assert len(told["decisions"]) == 2


def test_the_command_ends_with_1_where_a_leak_is_found(folder, monkeypatch):
    honest = leaks.Request.prepared

    def scaled(request: leaks.Request, pack: Pack) -> Pack:
        made = honest(replace(request), pack)
        return column(made, "z", lambda pack: pack.column("close") / pack.column("close").max())

    monkeypatch.setattr(leaks.Request, "prepared", scaled)
    done = CliRunner().invoke(main, ["leaktest", "bars.pack", "--config", "honest.toml", "--decisions", "2"])
    assert done.exit_code == 1
    assert "LEAK" in done.output
    assert "z of" in done.output


def test_bad_requests_are_told(folder):
    with pytest.raises(SampleError, match="decisions is 0"):
        leaktest(bars(), window=3, decisions=0)
    with pytest.raises(SampleError, match="no sample"):
        leaktest(bars(), window=10_000)
    done = CliRunner().invoke(main, ["leaktest", "bars.pack", "--config", "nowhere.toml"])
    assert done.exit_code == 1
    assert "nowhere.toml" in done.output
