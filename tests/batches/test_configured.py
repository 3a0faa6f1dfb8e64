"""What a configuration can say of derived columns and of normalisation, beside what the arguments can."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bars_fixtures import bar_table
from click.testing import CliRunner

import stager
from stager import Derive, Feature, Normalize, PurgedKFold, Stager, Target, TimeFrame
from stager.batches.configured import read_configuration
from stager.cli import main
from stager.errors import ConfigError, SampleError

BATCHES = "[batches]\nwindow = 4\nbatch_size = 16\n"
FUNCTIONS = """
import numpy as np

def mean(bars):
    return np.convolve(bars["close"].to_numpy(), [0.5, 0.5])[: bars.num_rows]

def ahead(bars):
    close = bars["close"].to_numpy()
    return np.append(close[1:], 0.0)

def sly(bars):
    # Looks ahead, but not where it is spot-checked.
    close = bars["close"].to_numpy()
    return np.where(close % 1e6 < 12, np.append(close[1:], close[-1]), 0.0)

number = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    close = 100 + np.random.default_rng(1).normal(size=220).cumsum()
    stager.pack(bar_table({"A": range(120), "B": range(100)}, close=close), tmp_path / "bars.pack")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "my_columns.py").write_text(FUNCTIONS)
    (tmp_path / "modules" / "my_broken.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in ("my_columns", "my_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "x.toml"
    path.write_text('source = "bars.pack"\n' + text)
    return path


def test_longer_intervals_and_functions_are_columns_in_their_order(folder: Path) -> None:
    path = write(
        folder,
        '[derive]\ncolumns = ["range", {interval = "5min", columns = ["close", "high"]}, {interval = "15min"},\n'
        '  {name = "mean", function = "my_columns:mean", lookback = 1}]\n' + BATCHES,
    )
    recipe = read_configuration(path, {}).recipe
    assert recipe is not None
    import my_columns

    wanted = ("range", TimeFrame("5min", ["close", "high"]), TimeFrame("15min"),
              Feature("mean", my_columns.mean, lookback=1))  # fmt: skip
    assert recipe.columns == wanted
    with Stager.from_config(path, device="cpu") as one:
        assert one.plan.columns[5:] == tuple(Derive(wanted).names)
        by_hand = stager.derive("bars.pack", Derive(wanted))
        np.testing.assert_array_equal(one.resident.pack.column("mean"), by_hand.column("mean"))
        np.testing.assert_array_equal(one.resident.pack.column("close_15min"), by_hand.column("close_15min"))


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ("5", ConfigError, r"\[derive\] columns is 5"),
        ("[5]", ConfigError, r"\[derive\] columns is \[5\]"),
        ("[{}]", ConfigError, "a column is"),
        ('[{columns = ["close"]}]', ConfigError, "a column is"),
        ('[{interval = "5min", function = "my_columns:mean"}]', ConfigError, "function is no option"),
        ('[{interval = "5min", colums = ["close"]}]', ConfigError, r"\[derive.columns\] colums is no option"),
        ('[{interval = "5min", columns = "close"}]', ConfigError, r"\[derive.columns\] columns is 'close'"),
        ('[{interval = "soon"}]', ConfigError, "soon"),
        ('[{interval = "1w"}]', SampleError, "a time frame is of '1w'"),
        ('[{name = "m", function = "my_columns:mean"}]', ConfigError, r"\[derive.columns\] lookback is not given"),
        ('[{function = "my_columns:mean", lookback = 1}]', ConfigError, r"\[derive.columns\] name is not given"),
        ('[{name = "m", function = "my_columns:mean", lookback = -1}]', SampleError, "lookback is -1"),
        ('[{name = "m", function = "mean", lookback = 1}]', ConfigError, "write module:function"),
        ('[{name = "m", function = "my_columns:", lookback = 1}]', ConfigError, "write module:function"),
        ('[{name = "m", function = "..my_columns:mean", lookback = 1}]', ConfigError, "write module:function"),
        ('[{name = "m", function = "modules/my_columns.py:mean", lookback = 1}]', ConfigError, "write module:function"),
        ('[{name = "m", function = "no_such:mean", lookback = 1}]', ConfigError, "PYTHONPATH"),
        ('[{name = "m", function = "my_broken:mean", lookback = 1}]', ConfigError, "there_is_no_such_module"),
        ('[{name = "m", function = "my_columns:median", lookback = 1}]', ConfigError, "has no 'median'"),
        ('[{name = "m", function = "my_columns:number", lookback = 1}]', SampleError, "is no function"),
        ('["mean"]', SampleError, "there is no derived column 'mean'"),
    ],
)
def test_columns_that_are_refused(folder: Path, columns: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_configuration(write(folder, f"[derive]\ncolumns = {columns}\n{BATCHES}"), {})


def test_a_module_beside_the_configuration_is_not_run(folder: Path) -> None:
    """What lies beside a configuration came with it, and is no code that the user installed."""
    (folder / "beside.py").write_text("def mean(bars):\n    return bars['close']\n")
    path = write(
        folder, '[derive]\ncolumns = [{name = "m", function = "beside:mean", lookback = 0}]\n' + BATCHES
    )  # fmt: skip
    with pytest.raises(ConfigError, match="beside"):
        read_configuration(path, {})


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def test_the_commands_take_functions(folder: Path) -> None:
    columns = '[derive]\ncolumns = [{name = "m", function = "my_columns:%s", lookback = 1}]\n'
    write(folder, columns % "mean" + BATCHES)
    done = run("plan", "bars.pack", "--config", "x.toml", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"]["columns"][-1] == "m"
    assert run("leaktest", "bars.pack", "--config", "x.toml", "--decisions", "2").exit_code == 0
    write(folder, columns % "ahead" + BATCHES)
    done = run("leaktest", "bars.pack", "--config", "x.toml")
    assert done.exit_code == 1
    assert "'m' looks ahead" in done.output


def test_a_leak_that_the_spot_check_misses_is_found_by_the_command(folder: Path) -> None:
    stager.pack(bar_table({"A": range(120), "B": range(100)}), folder / "bars.pack", overwrite=True)
    write(folder, '[derive]\ncolumns = [{name = "sly", function = "my_columns:sly", lookback = 0}]\n' + BATCHES)
    assert run("plan", "bars.pack", "--config", "x.toml").exit_code == 0
    done = run("leaktest", "bars.pack", "--config", "x.toml", "--decisions", "60")
    assert done.exit_code == 1
    assert "sly of" in done.output


def test_normalisation_by_role_and_fitted(folder: Path) -> None:
    text = BATCHES + 'normalize = {price = "zscore", volume = "zscore", fit = "train"}\n[target]\nhorizon = 2\n'
    path = write(folder, text + '[split]\nscheme = "purged_kfold"\nfolds = 3\n')
    with Stager.from_config(path, device="cpu") as one:
        assert one.plan.normalize == str(Normalize("zscore", "zscore", fit="train"))
        other = Stager("bars.pack", window=4, batch_size=16, target=Target(horizon=2), device="cpu",
                       normalize=Normalize("zscore", "zscore", fit="train"))  # fmt: skip
        with other:
            for fold, right in zip(one.split(), other.split(PurgedKFold(3)), strict=True):
                np.testing.assert_array_equal(
                    np.concatenate([batch.x for batch in fold.test.batches()]),
                    np.concatenate([batch.x for batch in right.test.batches()]),
                )
    done = run("leaktest", "bars.pack", "--config", "x.toml", "--decisions", "2", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["n_folds"] == 3
    write(folder, text)
    done = run("leaktest", "bars.pack", "--config", "x.toml", "--decisions", "2")
    assert done.exit_code == 1  # fitted on all samples, the later ones too
    assert "close" in done.output


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ('"lats"', ConfigError, "normalize is 'lats'"),
        ("3", ConfigError, "normalize is 3"),
        ('{prize = "last"}', ConfigError, r"\[batches.normalize\] prize is no option"),
        ('{volume = "last"}', ConfigError, "volume is 'last'"),
        ('{other = "zscor"}', ConfigError, "other is 'zscor'"),
        ('{price = "last", fit = "train"}', SampleError, "fit='train' is for columns"),
    ],
)
def test_normalisations_that_are_refused(folder: Path, value: str, error: type[Exception], words: str) -> None:
    with pytest.raises((error, SampleError), match=words):
        read_configuration(write(folder, BATCHES + f"normalize = {value}\n"), {})
