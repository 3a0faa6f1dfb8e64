"""``stager check`` as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bars.test_barfiles import CASES, FOLDER, Case, inputs_of
from bars_fixtures import bar_table, csv_text
from click.testing import CliRunner, Result

from stager.bars.findings import Report
from stager.cli import main

OPTIONS = {"zone": "--zone", "symbol": "--symbol", "label": "--label", "format": "--format", "field": "--field",
           "date_order": "--date-order", "time_pattern": "--time-pattern"}  # fmt: skip


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def told(case: Case) -> list[str]:
    """A case's options as a user writes them."""
    words: list[str] = []
    for name, value in case.told.items():
        if name == "columns":
            words += [f"--column={role}={column}" for role, column in value.items()]
        elif name == "allow_years":
            words += ["--allow-years", *map(str, value)]
        else:
            words += [OPTIONS[name], value]
    return words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with bars.csv in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bars.csv").write_text(csv_text(bar_table({"AAPL": range(50), "MSFT": [*range(20), *range(30, 50)]})))
    return tmp_path


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_folder_is_checked_or_refused(name: str, tmp_path: Path) -> None:
    """Without a traceback, with one line where it can't be read; and what is printed is what JSON and page say."""
    case = CASES[name]
    found = inputs_of(FOLDER / name)
    files = [found] if isinstance(found, Path) else found
    page = tmp_path / "page.html"
    result = run("check", *files, *told(case), "--json", "--html", page)
    if result.stdout == "":
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        assert not page.exists()
        # What can be read is refused for want of an interval or of prices.
        assert case.refused is not None or "interval" in result.stderr or name == "v_wide_close_only"
        return
    report = msgspec.json.decode(result.stdout, type=Report)
    assert result.exit_code == report.is_refused
    assert report.n_bars == sum(one.n_bars for one in report.symbols)
    text = page.read_text(encoding="utf-8")
    assert all(f"<b>{one.check}</b>" in text for one in report.findings)
    assert "http" not in text.replace("http://www.w3.org", "")
    shown = run("check", *files, *told(case))
    assert shown.exit_code == result.exit_code
    for one in report.findings:
        assert any(line.startswith(one.check) and one.severity in line for line in shown.stdout.splitlines())


def test_prints_a_line_for_each_check(folder: Path) -> None:
    result = run("check", "bars.csv")
    assert result.exit_code == 0, result.output
    title, *lines = result.stdout.splitlines()
    assert title == "bars.csv"
    cells = [line.split(maxsplit=1) for line in lines]
    assert cells[0][1].startswith("90 bars of 2 symbols, 2024-01-01 00:00Z to 2024-01-01 00:49Z (UTC, bar opens)")
    assert [name for name, _ in cells[1:11]] == [
        "bars", "duplicates", "order", "relation", "grid", "signs", "volume", "jumps", "gaps", "unfinished",
    ]  # fmt: skip
    assert "MSFT: 10 bars missing (another symbol has 10 of them)" in result.stdout
    assert os.listdir(folder) == ["bars.csv"]


def test_prints_json_and_nothing_else(folder: Path) -> None:
    result = run("check", "bars.csv", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["n_bars"], found["n_gaps"]) == (90, 1)
    assert found["worst_gaps"][0]["symbol"] == "MSFT"


def test_a_page(folder: Path) -> None:
    result = run("check", "bars.csv", "--html", "report.html")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "page: report.html"
    assert "<h2>Coverage</h2>" in Path("report.html").read_text(encoding="utf-8")
    before = Path("bars.csv").read_bytes()
    assert run("check", "bars.csv", "--html", "./bars.csv").exit_code == 2
    assert Path("bars.csv").read_bytes() == before
    refused = run("check", "bars.csv", "--html", "nowhere/report.html")
    assert refused.exit_code == 1
    assert "nowhere/report.html" in refused.stderr


def test_conflicting_rows_end_with_1_and_are_shown(folder: Path) -> None:
    with open("bars.csv", "a") as file:
        file.write("AAPL,2024-01-01T00:00:00Z,1,1,1,1,1\n")
    result = run("check", "bars.csv")
    assert result.exit_code == 1
    assert "duplicates  error  1 row dropped that differed" in result.stdout.replace("    ", "  ")
    assert run("check", "bars.csv", "--duplicates", "first").exit_code == 0
    assert run("pack", "bars.csv").exit_code == 1
    assert run("pack", "bars.csv", "--duplicates", "last").exit_code == 0


def test_several_files(folder: Path) -> None:
    Path("more.csv").write_text(csv_text(bar_table({"IBM": range(9)})))
    found = json.loads(run("check", "bars.csv", "more.csv", "--json").stdout)
    assert [one["name"] for one in found["inputs"]] == ["bars.csv", "more.csv"]
    assert found["n_symbols"] == 3


def test_what_a_terminal_would_obey_is_shown_as_text(folder: Path) -> None:
    Path("odd.csv").write_text(csv_text(bar_table({"A\x1b[31m": [0, 1, 2, 5], "B": range(6)})))
    result = run("check", "odd.csv")
    assert "\x1b" not in result.stdout
    assert "A\\x1b[31m" in result.stdout


def test_on_a_terminal_lines_fit_its_width(folder: Path) -> None:
    primary, secondary = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "stager.cli", "check", "bars.csv"],
        stdout=secondary,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"COLUMNS": "70", "TERM": "xterm"},
    )
    os.close(secondary)
    shown = b""
    while True:
        try:
            piece = os.read(primary, 1 << 16)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(primary)
    assert done.wait() == 0
    text = shown.decode()
    assert "\x1b[32mfine" in text
    plain = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    assert max(map(len, plain)) <= 70
