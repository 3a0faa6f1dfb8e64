"""``stager bench``: a table, JSON, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bars_fixtures import bar_table
from click.testing import CliRunner, Result

from stager.cli import main
from stager.packs.packing import pack

STEPS = {"A": range(200), "B": [*range(90), *range(95, 180)]}
CONFIG = """
[batches]
window = 10
batch_size = 16
[target]
horizon = 3
"""
BARS = "symbol,time,open,high,low,close,volume\n" + "".join(
    f"A,2024-01-02T10:{minute:02d}:00Z,1,2,1,{1 + minute / 100},5\n" for minute in range(60)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    pack(bar_table(STEPS), tmp_path / "bars.pack")
    (tmp_path / "x.toml").write_text(CONFIG)
    (tmp_path / "bars.csv").write_text(BARS)
    (tmp_path / "benched.py").write_text(
        "def step(batch):\n    return batch.x.sum() + batch.y.sum()\ndef wrong(batch):\n    return batch.z\n"
    )
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["bench", "--seconds", "0.1", "--device", "cpu", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_table_in_a_pipe_and_json_tell_the_same(folder: Path) -> None:
    arguments = ("bars.pack", "--config", "x.toml", "--step", "benched.py:step")
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    title, *rows = result.stdout.splitlines()
    assert title == "bench of bars.pack on cpu"
    lines = dict(row.split("  ", 1) for row in rows)
    assert lines["samples"].strip().startswith("336, found in ")
    assert lines["batches"].strip() == "21 of 16 an epoch, to numpy"
    assert "benched.py:step alone on one batch" in lines["step"]
    assert lines["bound"].strip().startswith("by the ")
    told = json.loads(run(*arguments, "--json").stdout)
    assert (told["n_samples"], told["n_batches"], told["step_name"]) == (336, 21, "benched.py:step")
    assert told["sample_nbytes"] == 10 * 5 * 4 + 4
    assert told["bound"] in ("step", "loader")
    assert 0 <= told["loader_share"] < 1


def test_a_bar_file_needs_no_configuration(folder: Path) -> None:
    told = json.loads(run("bars.csv", "--window", "8", "--batch-size", "4", "--json").stdout)
    assert (told["n_samples"], told["n_batches"], told["path"]) == (53, 14, "in memory")
    assert (told["step"], told["bound"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.pack"], ["nowhere.pack"]),
        (["bars.csv"], ["64"]),
        (["bars.pack", "--config", "y.toml"], ["y.toml: there is no such configuration file"]),
        (["bars.pack", "--step", "benched.py:stop"], ["benched.py has no 'stop'", "step, wrong"]),
        (["bars.pack", "--step", "benched.py:wrong"], ["the step benched.py:wrong raised AttributeError", "line 4"]),
        (["bars.pack", "--step", "nowhere.py:step"], ["there is no file nowhere.py"]),
        (["bars.pack", "--step", "step"], ["module:function or file.py:function"]),
        (["bars.pack", "--seconds", "inf"], ["seconds is inf"]),
        (["bars.pack", "--device", "tpu"], ["device is 'tpu'"]),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, arguments: list[str], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--to", "keras"], ["--window", "0"], []])
def test_wrong_usage_is_told(folder: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["bench", *(["bars.pack", *arguments] if arguments else [])])
    assert result.exit_code == 2


def test_the_command_finds_a_module_where_it_is_called(folder: Path) -> None:
    command = [sys.executable, "-m", "stager.cli", "bench", "bars.pack", "--seconds", "0.1", "--device", "cpu"]
    result = subprocess.run(
        [*command, "--config", "x.toml", "--step", "benched:step"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "benched:step" in result.stdout
