"""``stager plan``: what would be served, why the rest would not, the folds, and their picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bars_fixtures import DAY, bar_table
from click.testing import CliRunner, Result

from stager import Combinatorial, PurgedKFold, Stager, Target, WalkForward
from stager.cli import main
from stager.packs.packing import pack

STEPS = {"A": range(200), "B": [*range(90), *range(95, 180)]}
CONFIG = """
[batches]
window = 10
batch_size = 16
[target]
horizon = 3
[staging]
device = "cuda"
placement = "device"
"""
SPLITS = {
    'scheme = "walk_forward"\nfolds = 3\ntest = "30min"\nexpanding = false': WalkForward(
        3, test="30min", expanding=False
    ),
    'scheme = "purged_kfold"\nfolds = 4\nembargo = "5min"': PurgedKFold(4, embargo="5min"),
    'scheme = "combinatorial"\nn = 5\nk = 2': Combinatorial(5, 2),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    pack(bar_table(STEPS), tmp_path / "bars.pack")
    (tmp_path / "x.toml").write_text(CONFIG)
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["plan", "bars.pack", "--config", "x.toml", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_json(*arguments: str) -> Any:
    result = run("--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_every_row_is_accounted_for(folder: Path) -> None:
    plan = as_json()["plan"]
    assert plan["n_samples"] + sum(plan["reasons"].values()) == plan["n_rows"] == 375
    with Stager("bars.pack", window=10, batch_size=16, target=Target(horizon=3), device="cpu") as one:
        assert plan["reasons"] == one.plan.reasons
        assert plan["n_samples"] == one.n_samples
    # No GPU was needed to plan for one.
    assert (plan["device"], plan["placement"]) == ("cuda", "device")
    assert plan["disk_nbytes"] > plan["rows_nbytes"] > 0
    assert as_json()["folds"] == []


def test_the_table_tells_the_same(folder: Path) -> None:
    result = run()
    assert result.exit_code == 0
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines()[1:])
    assert result.stdout.startswith("plan of bars.pack\n")
    assert lines["samples"].strip() == "336 of 375 rows, 2 symbols"
    told = {name: text.strip() for name, text in lines.items() if name.startswith("- ")}
    assert told == {f"- {reason}": f"{n:,} rows" for reason, n in as_json()["plan"]["reasons"].items() if n}
    assert "nothing is staged yet" in lines["device"]
    assert "split" not in lines


@pytest.mark.parametrize("text", SPLITS)
def test_folds_are_those_of_the_scheme(folder: Path, text: str) -> None:
    (folder / "x.toml").write_text(f"{CONFIG}\n[split]\n{text}\n")
    told = as_json()
    with Stager("bars.pack", window=10, batch_size=16, target=Target(horizon=3), device="cpu") as one:
        folds = one.split(SPLITS[text])
        assert told["folds"] == [json.loads(json.dumps(fold.as_dict())) for fold in folds]
    for fold in told["folds"]:
        assert sum(fold["samples"].values()) == told["plan"]["n_samples"]
    lines = run().stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[-len(folds) :]] == [f"fold {i + 1}" for i in range(len(folds))]
    for line, fold in zip(lines[-len(folds) :], folds, strict=True):
        assert f"train {fold.counts['train']:,}, test {fold.counts['test']:,}, purge {fold.counts['purge']:,}" in line
        assert line.count(" to ") == len([zone for zone in fold.zones if zone.kind == "test"])
    assert next(iter(reversed(lines[: -len(folds)]))).endswith(str(SPLITS[text]))


def test_the_configured_scheme_is_the_stagers_too(folder: Path) -> None:
    (folder / "x.toml").write_text(f"{CONFIG}\n[split]\n{next(iter(SPLITS))}\n")
    with Stager.from_config("x.toml", source="bars.pack", device="cpu", placement="host") as one:
        assert [fold.counts for fold in one.split()] == [fold.counts for fold in one.split(SPLITS[next(iter(SPLITS))])]
        assert len(one.split(PurgedKFold(5))) == 5


@pytest.mark.parametrize("text", SPLITS)
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_folds_are_drawn(folder: Path, text: str, suffix: str) -> None:
    (folder / "x.toml").write_text(f"{CONFIG}\n[split]\n{text}\n")
    result = run("--plot", f"folds{suffix}")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"drawn: folds{suffix}\n")
    drawn = (folder / f"folds{suffix}").read_bytes()
    assert drawn.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])
    assert as_json("--plot", f"folds{suffix}")["folds"]


@pytest.mark.parametrize("text", SPLITS)
def test_a_picture_shows_every_zone_at_its_time(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each fold and kind, the bars that are drawn begin and end with the zones."""
    from matplotlib.axes import Axes

    from stager.batches.drawing import draw_folds

    drawn = []
    monkeypatch.setattr(Axes, "broken_barh", lambda self, bars, place, **style: drawn.append((bars, place)))
    with Stager("bars.pack", window=10, batch_size=16, target=Target(horizon=3), device="cpu") as one:
        folds = one.split(SPLITS[text])
        draw_folds(folds, "folds.svg")
    wanted = []
    for fold in folds:
        for kind in ("train", "test", "embargo", "purge"):
            zones = [zone for zone in fold.zones if zone.kind == kind]
            # A decision is drawn until the next bar closes, one minute later.
            bars = [(zone.first / DAY, (zone.last - zone.first + 60 * 10**9) / DAY) for zone in zones]
            wanted.append(bars)
    assert len(drawn) == len(wanted)
    for (bars, _), right in zip(drawn, wanted, strict=True):
        assert [part for bar in bars for part in bar] == pytest.approx([part for bar in right for part in bar])
    assert [place for _, place in drawn[::4]] == [(fold.number - 0.36, 0.72) for fold in folds]


@pytest.mark.parametrize(
    ("split", "arguments", "words"),
    [
        ("", ["--plot", "folds.png"], ["no folds to draw", "[split]"]),
        ("", ["--plot", "folds.jpg"], ["folds.jpg", ".png, .svg or .pdf"]),
        ("[split]\nfolds = 3", [], ["[split] scheme is not given"]),
        ('[split]\nscheme = "random"', [], ["[split] scheme is 'random'", "walk_forward"]),
        ('[split]\nscheme = "walk_forward"', [], ["[split] folds is not given"]),
        ('[split]\nscheme = "walk_forward"\nfolds = 3\nn = 3', [], ["[split] n is no option", "expanding"]),
        ('[split]\nscheme = "walk_forward"\nfolds = "x"', [], ["[split] folds is 'x'"]),
        ('[split]\nscheme = "walk_forward"\nfolds = 3\ntest = "soon"', [], ["test is 'soon'", "'30d'"]),
        ('[split]\nscheme = "purged_kfold"\nfolds = 1000', [], ["decision instants are too few for 1,000 blocks"]),
    ],
)
def test_what_is_refused(folder: Path, split: str, arguments: list[str], words: list[str]) -> None:
    (folder / "x.toml").write_text(f"{CONFIG}\n{split}\n")
    refused(run(*arguments), *words)


def test_a_table_must_be_one(folder: Path) -> None:
    (folder / "x.toml").write_text(f"split = 3\n{CONFIG}")
    refused(run(), "[split] is the value 3")


def test_without_matplotlib_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "x.toml").write_text(f"{CONFIG}\n[split]\n{next(iter(SPLITS))}\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(run("--plot", "folds.png"), "needs matplotlib", "pip install 'stager[plot]'")
    assert run().exit_code == 0


def test_a_missing_configuration_and_pack(folder: Path) -> None:
    result = CliRunner().invoke(main, ["plan", "bars.pack"])
    assert result.exit_code == 2
    assert "--config" in result.stderr
    refused(CliRunner().invoke(main, ["plan", "bars.pack", "--config", "none.toml"]), "none.toml", "no such")
    refused(CliRunner().invoke(main, ["plan", "none.pack", "--config", "x.toml"]), "none.pack")


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_a_panel_is_planned_before_it_is_made(folder: Path) -> None:
    (folder / "panel.toml").write_text(
        '[panel]\ncolumns = ["close"]\n[target]\nhorizon = 3\n'
        '[batches]\nwindow = 10\nbatch_size = 16\nshuffle = "time"\n'
    )
    result = CliRunner().invoke(main, ["plan", "bars.pack", "--config", "panel.toml", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["panel"]["n_times"] == 200
    assert told["panel"]["n_bars"] == 200 + 90 + 85
    assert told["panel"]["fill"] == pytest.approx(375 / 400)
    assert told["panel"]["rows_nbytes"] == 4 * 200 * 2
    text = CliRunner().invoke(main, ["plan", "bars.pack", "--config", "panel.toml"]).stdout
    assert "200 instants of 2 symbols, close" in text
    with Stager.from_config(folder / "panel.toml", source=folder / "bars.pack", device="cpu") as st:
        batch = next(iter(st.batches()))
        assert batch.x.shape[1:] == (10, 2, 1)
