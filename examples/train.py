"""Train a small direction classifier from ``Stager.batches()``, beside the same on shuffled labels.

The classifier sees 32 bars and tells whether the close rises over the five bars after the next. It is trained on the
first part of the history and judged on the rest; the twin, trained and judged on shuffled labels, shows what chance
gives.

    python examples/train.py bars.pack
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import stager
from stager import PurgedKFold, Stager, Target

WINDOW, HORIZON, BATCH = 32, 5, 256
CLOSE = 3  # columns are open, high, low, close, volume


class Classifier:
    """One hidden layer, logistic loss, Adam; NumPy or CuPy, whatever `xp` is."""

    def __init__(self, xp: Any, n_inputs: int, n_hidden: int = 16, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.xp = xp
        shapes = ((n_inputs, n_hidden), (n_hidden,), (n_hidden, 1), (1,))
        self.weights = [xp.asarray(rng.standard_normal(s).astype(np.float32) / np.sqrt(s[0])) for s in shapes]
        self.moments = [(xp.zeros_like(w), xp.zeros_like(w)) for w in self.weights]
        self.n_steps = 0

    def logits(self, features: Any) -> tuple[Any, Any]:
        w1, b1, w2, b2 = self.weights
        hidden = self.xp.tanh(features @ w1 + b1)
        return hidden, (hidden @ w2 + b2)[:, 0]

    def step(self, features: Any, up: Any, rate: float = 2e-3, weight: Any = 1.0) -> Any:
        """One update; the loss. Samples count by their weight."""
        xp = self.xp
        hidden, z = self.logits(features)
        probability = 1 / (1 + xp.exp(-z))
        d_z = (weight * (probability - up) / len(up))[:, None]
        d_hidden = d_z @ self.weights[2].T * (1 - hidden**2)
        gradients = (features.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_z, d_z.sum(0))
        self.n_steps += 1
        for w, g, (m, v) in zip(self.weights, gradients, self.moments, strict=True):
            m += 0.1 * (g - m)
            v += 0.01 * (g * g - v)
            scale = np.sqrt(1 - 0.99**self.n_steps) / (1 - 0.9**self.n_steps)
            w -= rate * scale * m / (xp.sqrt(v) + 1e-8)
        return -(weight * xp.where(up > 0, xp.log(probability + 1e-7), xp.log(1 - probability + 1e-7))).mean()


def features_of(x: Any) -> Any:
    """(size, WINDOW - 1): returns to the last close, in units of a tenth of a percent."""
    close = x[:, :, CLOSE]
    return (close[:, :-1] / close[:, -1:] - 1) * 1000


def array_module(resident: stager.Resident) -> Any:
    """NumPy, or CuPy where the rows lie on a GPU."""
    if resident.device.index is None:
        return np
    import cupy

    return cupy


def accuracy(model: Classifier, st: Stager, labels: Any = lambda up: up) -> float:
    right = n = 0
    for batch in st.batches(0):
        right += int(((model.logits(features_of(batch.x))[1] > 0) == labels(batch.y > 0)).sum())
        n += len(batch)
    return right / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a pack, or a bar file")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda [%(default)s]")
    options = parser.parse_args()

    target = Target("close", horizon=HORIZON, kind="direction", classes=2)
    with Stager(options.source, window=WINDOW, target=target, batch_size=BATCH, seed=7, device=options.device) as st:
        # Judge on the last quarter of the history. No label of the first part ends inside it.
        fold = st.split(PurgedKFold(4))[-1]
        train, test, resident = fold.train, fold.test, st.resident
        print(st.plan)
        print(fold.describe())
        xp = array_module(resident)
        model, twin = Classifier(xp, WINDOW - 1), Classifier(xp, WINDOW - 1)
        rng = np.random.default_rng(0)

        def shuffled(labels: Any) -> Any:
            return labels[xp.asarray(rng.permutation(len(labels)))]

        print(f"\ntraining on {resident.device} ({resident.device.reason})")
        print(f"{'epoch':>5}  {'loss':>6}  {'accuracy':>8}  {'shuffled: loss':>14}  {'accuracy':>8}  samples/s")
        for epoch in range(options.epochs):
            losses, twin_losses = [], []
            started = time.perf_counter()
            for batch in train.batches(epoch):
                features, up = features_of(batch.x), (batch.y > 0).astype(xp.float32)
                losses.append(model.step(features, up))
                twin_losses.append(twin.step(features, shuffled(up)))
            loss, twin_loss = (float(sum(part) / len(part)) for part in (losses, twin_losses))
            rate = train.n_samples / (time.perf_counter() - started)
            print(
                f"{epoch:>5}  {loss:>6.4f}  {accuracy(model, test):>8.1%}  {twin_loss:>14.4f}  "
                f"{accuracy(twin, test, shuffled):>8.1%}  {rate:,.0f}"
            )
        print("accuracy is on later bars than any that was trained on; 50% is chance")


if __name__ == "__main__":
    main()
