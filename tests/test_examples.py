"""The examples run, and the planted signal is learnt, its shuffled-label twin not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_example_learns_and_its_shuffled_twin_does_not(tmp_path: Path) -> None:
    examples = ROOT / "examples"
    made = run(sys.executable, examples / "make_bars.py", "bars.csv", cwd=tmp_path)
    assert "20 symbols" in made
    run(sys.executable, "-m", "stager.cli", "pack", "bars.csv", cwd=tmp_path)
    told = run(sys.executable, examples / "train.py", "bars.pack", "--epochs", 2, cwd=tmp_path)
    last = re.findall(r"^ +1 +([\d.]+) +([\d.]+)% +([\d.]+) +([\d.]+)% +([\d,]+)$", told, re.MULTILINE)
    assert len(last) == 1, told
    loss, accuracy, twin_loss, twin_accuracy = map(float, last[0][:4])
    assert accuracy > 64
    assert loss < 0.65
    # About 30,000 samples are judged: three standard deviations of chance are 0.9 %.
    assert abs(twin_accuracy - 50) < 1.5
    assert twin_loss > 0.69
