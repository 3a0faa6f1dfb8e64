"""The examples that need a GPU: a graph trains as the loop over batches does, and learns the planted signal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(*command, cwd):
    command = [sys.executable, *map(str, command)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_captured_step_reaches_the_loss_of_the_loop(tmp_path):
    pytest.importorskip("torch")
    run(EXAMPLES / "make_bars.py", "bars.csv", "--minutes", 3000, cwd=tmp_path)
    told = run(EXAMPLES / "torch_graph.py", "bars.csv", "--epochs", 4, "--batch-size", 64, cwd=tmp_path)
    pair = r" +([\d.]+) +([\d.]+)% +([\d,]+)"
    rows = re.findall(rf"^ +(\d){pair}{pair}$", told, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"], told
    for _, loss, accuracy, _, graph_loss, graph_accuracy, _ in rows:
        # The same batches in the same order; sums in another order at most.
        assert float(graph_loss) == pytest.approx(float(loss), abs=2e-3)
        assert float(graph_accuracy) == pytest.approx(float(accuracy), abs=1.0)
    assert float(rows[-1][4]) < 0.66
    assert float(rows[-1][5]) > 60
