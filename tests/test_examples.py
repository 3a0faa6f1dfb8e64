"""The examples run, and the planted signal is learnt, its shuffled-label twin not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from stager import Stager, Target, WalkForward

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


def test_eight_processes_sweep_over_one_copy(tmp_path: Path) -> None:
    examples = ROOT / "examples"
    run(sys.executable, examples / "make_bars.py", "bars.csv", "--minutes", 2000, cwd=tmp_path)
    run(sys.executable, "-m", "stager.cli", "pack", "bars.csv", cwd=tmp_path)
    told = run(
        sys.executable,
        examples / "sweep.py",
        "bars.pack",
        "--epochs",
        1,
        "--processes",
        8,
        "--device",
        "cpu",
        cwd=tmp_path,
    )
    found = re.findall(r"^ +([\d.]+) +(\d+) +([\d.]+)% +([\d.]+) ms +([\d,]+)$", told, re.MULTILINE)
    assert len(found) == 8, told
    accuracies = [float(one[2]) for one in found]
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] > 60
    assert re.search(r"8 trainings in \d processes, one copy of the bars", told)


def test_walking_forward_writes_results_predictions_and_a_picture(tmp_path: Path) -> None:
    examples = ROOT / "examples"
    run(sys.executable, examples / "make_bars.py", "bars.csv", "--minutes", 3000, cwd=tmp_path)
    told = run(sys.executable, examples / "walk_forward.py", "bars.csv", "--folds", 3, "--out", "out", cwd=tmp_path)
    results = pyarrow.csv.read_csv(tmp_path / "out" / "results.csv").to_pylist()
    predictions = pyarrow.parquet.read_table(tmp_path / "out" / "predictions.parquet")
    target = Target("close", horizon=5, kind="direction", classes=2)
    with Stager(tmp_path / "bars.csv", window=32, target=target, batch_size=256, device="cpu") as st:
        folds = st.split(WalkForward(3))
        for row, fold in zip(results, folds, strict=True):
            counts = fold.counts
            assert (row["n_train"], row["n_purged"], row["n_test"]) == (
                counts["train"], counts["purge"], counts["test"]
            )  # fmt: skip
            some = predictions.filter(pyarrow.compute.equal(predictions["fold"], row["fold"]))
            assert some.drop_columns(["prediction", "fold"]).equals(fold.test.to_table())
            right = (some["target"].to_numpy() > 0) == (some["prediction"].to_numpy() > 0)
            assert row["accuracy"] == right.mean()
            assert f"{row['accuracy']:.1%}" in told
            # The planted signal is found in every fold, well beyond the more frequent direction.
            assert row["accuracy"] > row["majority"] + 4 * row["standard_error"]
    assert (tmp_path / "out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_without_torch_and_a_gpu_the_graph_example_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "torch_graph.py", "bars.pack"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"torch_graph\.py needs torch and a GPU: .+; (pip install .+|see .+)\n", result.stderr)
