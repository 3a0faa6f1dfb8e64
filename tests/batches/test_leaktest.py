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
    Panel,
    PurgedKFold,
    ReadOptions,
    Select,
    Target,
    TimeFrame,
)
from stager.batches import fold_leaks
from stager.batches.built import Request
from stager.batches.leaktest import leaktest
from stager.cli import main
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory
from stager.samples import panel_index
from stager.samples.index import SampleIndex
from stager.samples.panel_index import PanelIndex

SESSION = "00:05-02:10 UTC"
UNIVERSE = pa.table(
    {
        "symbol": ["A", "B", "C"],
        "start": pa.array(START + np.array([0, 60, 20]) * MINUTE, pa.timestamp("ns", "UTC")),
        "end": pa.array([START + 120 * MINUTE, None, None], pa.timestamp("ns", "UTC")),
    }
)


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


def test_tables_about_symbols_that_come_later_are_no_leak():
    """What is deleted takes all bars of B with it, and then nothing is known of the only symbol that has a split."""
    pack = bars()
    split = pa.table(
        {"symbol": ["B"], "time": pa.array([START + 90 * MINUTE], pa.timestamp("ns", "UTC")), "ratio": [2]}
    )
    for arguments in (
        {"select": Select(splits=split)},
        {"select": Select(rolls=split), "panel": Panel(["C", "B"])},
        {"prepare": Derive(["log_return"], splits=split, rolls=split)},
    ):
        report = leaktest(pack, window=4, decisions=12, **arguments)
        assert report.decisions[0] < np.datetime64(START + 30 * MINUTE, "ns")  # before B is listed
        assert report.leaks == ()


# ------------------------------------------------------------------------------------------------------- panels


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    side_by_side=st.sampled_from(
        [Panel(), Panel(["C", "A", "B"], columns=["close", "volume"]), Panel(["B", "A"]), Panel(session=SESSION)]
    ),
    cap=st.sampled_from([None, 2, 40]),
    target=st.sampled_from(
        [
            None,
            Target(horizon=3),
            [Target(horizon=2, kind="direction"), Target(horizon=5, scale="volatility", scale_window=4)],
            Target(horizon=2, scale="rank"),
            Target(horizon=1, delay=0, across_gaps="allow"),
        ]
    ),
    select=st.sampled_from(
        [
            Select(max_gap=3),
            Select(stride=3, max_gap=1, min_history=20),
            Select(symbols=["A", "B"], columns=["volume", "close"]),
            Select(universe=UNIVERSE, allow_filled=True),
        ]
    ),
    split=st.sampled_from([None, PurgedKFold(3), Combinatorial(4, 2, embargo="0min")]),
    normalize=st.sampled_from(["none", "last", "zscore", Normalize("zscore", other="zscore", fit="train")]),
)
def test_an_honest_panel_has_no_leak(seed, side_by_side, cap, target, select, split, normalize):
    recipe = None
    if split is None and isinstance(normalize, Normalize):
        normalize = "last"  # what is fitted on all samples knows the future
    if cap is not None and side_by_side.columns is None:
        recipe = Derive(["log_return", TimeFrame("5min", ["close"])], fill="previous", cap=cap)
    try:
        report = leaktest(
            bars(seed), window=4, target=target, select=select, normalize=normalize, prepare=recipe,
            panel=side_by_side, split=split, decisions=2, seed=seed,
        )  # fmt: skip
    except SampleError as error:
        assert "no sample" in str(error) or "fold" in str(error) or "block" in str(error)  # noqa: PT017
        return
    assert report.leaks == ()
    assert report.n_windows > 0
    assert (report.n_folds > 0) == (split is not None)


def test_labels_of_a_panel_are_compared_by_symbol():
    report = leaktest(bars(), window=4, target=Target(horizon=2), panel=Panel(), decisions=5, seed=1)
    assert report.leaks == ()
    assert report.n_labels > 1.5 * report.n_samples > 0


def test_a_fill_that_knows_the_delisting_is_found_in_a_panel():
    """Between two bars of a symbol it was halted and is filled; behind its last one it is not, for it was delisted."""

    def filled(pack: Pack) -> Pack:
        axis = np.unique(pack.times)
        tables = []
        for symbol, first, n in zip(pack.symbols, pack.first_rows, pack.counts, strict=True):
            times, close = pack.times[first : first + n], pack.column("close")[first : first + n]
            listed = axis[(axis >= times[0]) & (axis <= times[-1])]
            close = close[np.searchsorted(times, listed, side="right") - 1]
            tables.append(bar_table({symbol: ((listed - START) // MINUTE).tolist()}, close=close))
        return stager.panel(pack_in_memory(pa.concat_tables(tables), ReadOptions(interval="1min")), Panel())

    report = leaktest(bars(n=300), window=4, prepare=filled, decisions=30)
    assert kinds(report) >= {"input"}
    assert any("mask" in leak.text and leak.change == "deleted" for leak in report.leaks)


def test_a_mask_of_a_panel_that_knows_the_delisting_is_found(monkeypatch):
    """Every place up to a symbol's last bar counts as observed, so the mask says that more is to come."""
    honest = panel_index._there

    def listed(pack: Pack, names: list[str], needed: list[str], *, filled: bool) -> np.ndarray:
        there = honest(pack, names, needed, filled=filled)
        return there if filled else np.flip(np.maximum.accumulate(np.flip(there, 0)), 0)

    monkeypatch.setattr(panel_index, "_there", listed)
    report = leaktest(bars(), window=4, panel=Panel(), decisions=8)
    assert kinds(report) == {"input"}
    assert all(leak.text.startswith("mask of ") for leak in report.leaks)
    assert {leak.change for leak in report.leaks} >= {"deleted"}
    assert {leak.symbol for leak in report.leaks} <= {"A", "B", "C", "C~"}


def test_a_panel_aligned_by_position_is_found():
    """Symbols set side by side from their last bars back, so that rows are no instants."""

    def aligned(pack: Pack) -> Pack:
        times = pack.times[: int(pack.counts[0])]  # of A
        tables = []
        for symbol, first, n in zip(pack.symbols, pack.first_rows, pack.counts, strict=True):
            kept = min(n, len(times))
            close = pack.column("close")[first + n - kept : first + n]
            tables.append(bar_table({symbol: ((times[-kept:] - START) // MINUTE).tolist()}, close=close))
        return stager.panel(pack_in_memory(pa.concat_tables(tables), ReadOptions(interval="1min")), Panel())

    report = leaktest(bars(), window=4, select=Select(max_gap=5), prepare=aligned, decisions=6)
    assert "input" in kinds(report)


def test_a_universe_of_survivors_is_found_in_a_panel():
    def survivors(pack: Pack) -> Select:
        last = {symbol: np.isfinite(pack.column(f"{symbol}.close")).nonzero()[0][-1] for symbol in "ABC" if
                f"{symbol}.close" in pack.columns}  # fmt: skip
        return Select(symbols=[symbol for symbol, place in last.items() if place == pack.n_rows - 1], max_gap=5)

    report = leaktest(bars(), window=4, select=survivors, panel=Panel(), decisions=8)
    assert kinds(report) == {"sample"}
    assert any(leak.symbol in "ABC" for leak in report.leaks)


def test_a_label_of_a_panel_that_is_known_later_than_it_says_is_found(monkeypatch):
    honest = PanelIndex.label_ends

    def early(index: PanelIndex, rows: np.ndarray) -> np.ndarray:
        ends = honest(index, rows)
        return np.where(ends == np.iinfo(np.int64).min, ends, ends - 2 * MINUTE)

    monkeypatch.setattr(PanelIndex, "label_ends", early)
    report = leaktest(bars(), window=4, target=Target(horizon=3), panel=Panel(), decisions=6)
    assert "label" in kinds(report)
    assert "said to be known by" in next(leak.text for leak in report.leaks if leak.kind == "label")


def test_a_purge_one_bar_short_is_found_in_a_panel(monkeypatch):
    honest = fold_leaks.cut_folds
    arguments: dict[str, Any] = {
        "window": 4, "target": Target(horizon=4), "panel": Panel(), "split": PurgedKFold(4, embargo="0min"),
        "select": Select(max_gap=5), "decisions": 1,
    }  # fmt: skip
    assert not leaktest(bars(), **arguments).leaks
    monkeypatch.setattr(
        fold_leaks,
        "cut_folds",
        lambda pack, index, ends, scheme: honest(pack, index, lambda rows: ends(rows) - MINUTE, scheme),
    )
    assert kinds(leaktest(bars(), **arguments)) == {"fold"}


def test_statistics_of_a_panel_are_those_of_its_training(monkeypatch):
    arguments: dict[str, Any] = {
        "window": 4, "panel": Panel(), "normalize": Normalize("zscore", "zscore", fit="train"),
        "select": Select(max_gap=5), "decisions": 3,
    }  # fmt: skip
    assert kinds(leaktest(bars(), **arguments)) == {"input"}  # fitted on all samples
    assert not leaktest(bars(), **arguments, split=PurgedKFold(3)).leaks
    honest = PanelIndex.refit

    def fit_on_all(index: PanelIndex, pack: Pack) -> PanelIndex:
        everything = replace(index, span_rows=np.array([10]), span_ids=np.array([0, pack.n_rows - 10]))
        return replace(index, fitted=honest(everything, pack).fitted)

    monkeypatch.setattr(PanelIndex, "refit", fit_on_all)
    report = leaktest(bars(), **arguments, split=PurgedKFold(3))
    assert kinds(report) == {"statistics"}
    assert "normalises open by mean" in report.leaks[0].text


def test_a_panel_itself_can_not_be_rebuilt():
    with pytest.raises(SampleError, match="give the bars that it was made of"):
        leaktest(stager.panel(bars(), Panel()), window=4)


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


def test_the_command_passes_an_honest_panel(folder):
    (folder / "panel.toml").write_text(CONFIG + "[panel]\ncolumns = ['close', 'log_return']\n")
    done = CliRunner().invoke(main, ["leaktest", "bars.pack", "--config", "panel.toml", "--decisions", "2", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["leaks"] == []
    assert told["n_folds"] == 3
    assert told["n_windows"] > 0
    assert told["n_labels"] > 0


def test_the_command_finds_a_panels_leak(folder, monkeypatch):
    (folder / "panel.toml").write_text(CONFIG + "[panel]\n")
    honest = panel_index._there

    def listed(pack: Pack, names: list[str], needed: list[str], *, filled: bool) -> np.ndarray:
        there = honest(pack, names, needed, filled=filled)
        return there if filled else np.flip(np.maximum.accumulate(np.flip(there, 0)), 0)

    monkeypatch.setattr(panel_index, "_there", listed)
    done = CliRunner().invoke(main, ["leaktest", "bars.pack", "--config", "panel.toml", "--decisions", "6"])
    assert done.exit_code == 1
    assert "mask of" in done.output


def test_the_command_tells_programs(folder):
    done = CliRunner().invoke(main, ["leaktest", "bars.pack", "--config", "honest.toml", "--decisions", "2", "--json"])
    told = json.loads(done.stdout)
    assert told["leaks"] == []
    assert told["n_folds"] == 3
    assert len(told["decisions"]) == 2


def test_the_command_ends_with_1_where_a_leak_is_found(folder, monkeypatch):
    honest = Request.prepared

    def scaled(request: Request, pack: Pack) -> Pack:
        made = honest(replace(request), pack)
        return column(made, "z", lambda pack: pack.column("close") / pack.column("close").max())

    monkeypatch.setattr(Request, "prepared", scaled)
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
