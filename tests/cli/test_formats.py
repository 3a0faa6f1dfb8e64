"""``stager formats`` and the options of ``stager pack`` that answer what a file can't tell."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stager.cli import main

FOLDER = Path(__file__).parent.parent / "data" / "barfiles"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_list() -> None:
    assert "binance-klines" in run("formats").stdout
    listed = json.loads(run("formats", "--json").stdout)
    assert {"name": "kibot", "title": "Kibot intraday"} in listed


def test_one_is_explained() -> None:
    assert tomllib.loads(run("formats", "show", "kibot").stdout)["time"]["zone"] == "America/New_York"
    assert "numbers.price_scale" in run("formats", "show").stdout
    wrong = run("formats", "show", "nothing")
    assert wrong.exit_code == 1
    assert "kibot" in wrong.stderr


@pytest.mark.parametrize("name", ["dukascopy_gmt", "kibot_intraday", "backtrader_generic", "v_plain", "v_ampm"])
def test_a_draft_is_valid_toml_and_names_the_columns(name: str) -> None:
    file = next(path for path in (FOLDER / name).iterdir() if path.suffix in (".csv", ".txt") and path.name not in
                ("expected.csv", "expected_naive.csv", "about.txt"))  # fmt: skip
    result = run("formats", "new", file)
    assert result.exit_code == 0, result.output
    drafted = tomllib.loads(result.stdout)
    assert {"time", "open", "high", "low", "close"} <= set(drafted["columns"])
    assert "header" in drafted or "positions" in drafted


def test_a_question_is_answered_and_what_was_decided_is_kept(tmp_path: Path) -> None:
    file = next((FOLDER / "metatrader5_m15").glob("EURUSD*.csv"))
    asked = run("pack", file, "-o", tmp_path / "a.pack")
    assert asked.exit_code == 1
    assert "--column volume=NAME" in asked.stderr
    answered = ("--column", "volume=<TICKVOL>", "--zone", "Europe/Helsinki", "-o", tmp_path / "a.pack")
    done = run("pack", file, *answered)
    assert done.exit_code == 0, done.output
    decisions = json.loads((tmp_path / "a.pack" / "manifest.json").read_text())["decisions"]
    assert {"what": "format", "value": "metatrader5", "source": "the header"} in decisions
    assert {"what": "zone", "value": "Europe/Helsinki", "source": "as told"} in decisions
    assert {"what": "time", "value": "%Y.%m.%d %H:%M:%S", "source": "the only pattern that all times fit"} in decisions
