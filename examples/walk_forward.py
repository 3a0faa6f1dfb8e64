"""Walk forward: train on the past, judge on what follows, move on; a new classifier for each fold.

The classifier is that of train.py. Each fold trains on all bars before its test, without those whose label reaches into
it, and weighs samples by the uniqueness of their labels. Written are a table of results, the out-of-sample predictions
with symbols and instants, and a picture of the accuracy by fold. Needs matplotlib: pip install 'stager[plot]'.

    python examples/walk_forward.py bars.pack --out results
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from matplotlib.figure import Figure
from train import BATCH, HORIZON, WINDOW, Classifier, array_module, features_of

from stager import Fold, Stager, Target, WalkForward


def train(fold: Fold, xp: Any, n_epochs: int) -> Classifier:
    model = Classifier(xp, WINDOW - 1)
    for epoch in range(n_epochs):
        for batch in fold.train.batches(epoch):
            model.step(features_of(batch.x), (batch.y > 0).astype(xp.float32), weight=xp.asarray(batch.weight))
    return model


def predict(fold: Fold, model: Classifier, xp: Any) -> pa.Table:
    """The test samples in the order of time, each with its logit."""
    logits = xp.concatenate([model.logits(features_of(batch.x))[1] for batch in fold.test.batches()])
    return fold.test.to_table(logits)


def judge(fold: Fold, table: pa.Table) -> dict[str, Any]:
    """A row of the table of results."""
    up, said = table["target"].to_numpy() > 0, table["prediction"].to_numpy() > 0
    # Labels of neighbours overlap, so there are about as many independent ones as horizons.
    n_independent = max(1.0, len(up) / HORIZON)
    decisions = table["decision"]
    return {
        "fold": fold.number + 1,
        "test_from": decisions[0].as_py().isoformat(),
        "test_to": decisions[-1].as_py().isoformat(),
        "n_train": fold.counts["train"],
        "n_purged": fold.counts["purge"],
        "n_test": fold.counts["test"],
        "accuracy": float((up == said).mean()),
        "standard_error": 0.5 / n_independent**0.5,
        "majority": float(max(up.mean(), 1 - up.mean())),
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Out-of-sample accuracy by fold, with two standard errors, beside always saying the more frequent direction."""
    numbers = np.array([row["fold"] for row in results])
    figure = Figure(figsize=(max(7, 1.1 * len(results)), 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(50, color="#888888", linewidth=1)
    axes.errorbar(
        numbers,
        [100 * row["accuracy"] for row in results],
        yerr=[200 * row["standard_error"] for row in results],
        fmt="o",
        color="#1f3d7a",
        capsize=4,
        label="classifier, two standard errors",
    )
    axes.plot(
        numbers, [100 * row["majority"] for row in results], "_", color="#f2711c", markersize=18, markeredgewidth=2,
        label="always the more frequent direction",
    )  # fmt: skip
    axes.set_xticks(numbers, [f"fold {row['fold']}\n{row['test_from'][:10]}" for row in results])
    axes.set_ylabel("right directions out of sample, %")
    axes.margins(y=0.1)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a pack, or a bar file")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda [%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("walk_forward"), help="directory to write to [%(default)s]")
    options = parser.parse_args()

    target = Target("close", horizon=HORIZON, kind="direction", classes=2)
    with Stager(options.source, window=WINDOW, target=target, batch_size=BATCH, seed=7, device=options.device) as st:
        xp = array_module(st.resident)
        results, tables = [], []
        print(f"{'fold':>4}  {'train':>9}  {'purged':>6}  {'test':>8}  {'accuracy':>8}  {'majority':>8}")
        for fold in st.split(WalkForward(options.folds)):
            table = predict(fold, train(fold, xp, options.epochs), xp)
            row = judge(fold, table)
            print(
                f"{row['fold']:>4}  {row['n_train']:>9,}  {row['n_purged']:>6,}  {row['n_test']:>8,}  "
                f"{row['accuracy']:>8.1%}  {row['majority']:>8.1%}"
            )
            results.append(row)
            tables.append(table.append_column("fold", pa.array(np.full(len(table), row["fold"]))))
    options.out.mkdir(parents=True, exist_ok=True)
    pyarrow.csv.write_csv(pa.Table.from_pylist(results), options.out / "results.csv")
    pyarrow.parquet.write_table(pa.concat_tables(tables), options.out / "predictions.parquet")
    draw(results, options.out / "accuracy.png")
    print(f"written: {options.out}/results.csv, predictions.parquet, accuracy.png")


if __name__ == "__main__":
    main()
