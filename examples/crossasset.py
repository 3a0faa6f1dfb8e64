"""Train on cross-asset bars, one sample per gradient computation, in an arena that is never reset.

The way of training that once filled a 64 GiB arena in its first mini-batch: for every sample of a batch of 256, one
forward and one backward pass through a network with tanh layers, whose activations have 48 kB and 1 MiB; gradients add
up, weights move once a batch, and a loss is kept for every step. That is more than a million allocations. The arena
takes each one back as its last array dies, so 64 MiB are enough from the first fold to the last.

    python examples/crossasset.py --arena 64MiB --output results.json
    python examples/crossasset.py --arena 64MiB --hold-everything      # overflows, says why, and keeps running
    python examples/crossasset.py --pool cupy                          # the same with CuPy's own pool
    python examples/crossasset.py --bars 2000 --folds 2                # small, runs on NumPy too
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import stager
from stager import Select, Stager, StagerError, Target

WINDOW, HORIZON, BATCH = 32, 5, 256
HIDDEN_GPU = (375, 8192)  # activations of 32 x 375 and 32 x 8192 float32: 48,000 bytes and 1 MiB
HIDDEN_CPU = (24, 64)


def make_bars(n_bars: int, n_symbols: int = 16, seed: int = 7) -> pa.Table:
    """Minute bars of made-up currencies, indices and metals; each drifts up or down for about an hour at a time."""
    rng = np.random.default_rng(seed)
    n = max(n_bars // n_symbols, WINDOW + 60)
    sigma = rng.uniform(1e-4, 8e-4, (n_symbols, 1))
    drift = np.where(np.cumsum(rng.random((n_symbols, n)) < 1 / 60, axis=1) % 2, 1.0, -1.0)
    moves = sigma * (0.5 * drift + rng.standard_normal((n_symbols, n)))
    close = rng.uniform(1, 400, (n_symbols, 1)) * np.exp(np.cumsum(moves, axis=1))
    before = np.concatenate([close[:, :1], close[:, :-1]], axis=1)
    spread = close * sigma * rng.random((2, n_symbols, n))
    start = np.datetime64("2024-01-01T00:00", "s").astype(np.int64)
    times = np.broadcast_to(start + 60 * np.arange(n), (n_symbols, n))
    columns = {
        "open": before,
        "high": np.maximum(before, close) + spread[0],
        "low": np.minimum(before, close) - spread[1],
        "close": close,
        "volume": rng.integers(100, 10_000, (n_symbols, n)).astype(np.float64),
    }
    return pa.table(
        {
            "symbol": np.repeat([f"ASSET{index:02d}" for index in range(n_symbols)], n),
            "time": pa.array(times.ravel().astype("datetime64[s]")).cast(pa.timestamp("s", "UTC")),
            **{name: values.ravel() for name, values in columns.items()},
        }
    )


class Network:
    """Two tanh layers over every bar of a window, their mean over time, and a logistic output."""

    def __init__(self, xp: Any, n_columns: int, hidden: tuple[int, int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        first, second = hidden
        shapes = ((n_columns, first), (first, second), (second,))
        w1, w2, w3 = (xp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]), dtype=xp.float32) for shape in shapes)
        b1, b2, b3 = (xp.zeros(shape, xp.float32) for shape in (first, second, ()))
        self.xp, self.weights = xp, [w1, b1, w2, b2, w3, b3]
        self.gradients = [xp.zeros_like(weight) for weight in self.weights]
        self.scales = [n_columns**-0.5, 0.1, first**-0.5, 0.1, second**-0.5, 0.1]
        self.squares = [0.0] * len(self.weights)

    def features(self, window: Any) -> Any:
        """Prices relative to the last close, in thousandths; volume relative to its mean."""
        xp = self.xp
        prices = (window[:, :4] / window[-1, 3] - 1) * 1000
        volume = window[:, 4:5] / window[:, 4:5].mean() - 1
        return xp.concatenate([prices, volume], axis=1)

    def forward(self, window: Any) -> tuple[Any, ...]:
        """Activations, and the probability that the price rises, as an array without a dimension."""
        xp = self.xp
        w1, b1, w2, b2, w3, b3 = self.weights
        x = self.features(window)
        first = xp.tanh(x @ w1 + b1)
        second = xp.tanh(first @ w2 + b2)
        pooled = second.mean(axis=0)
        rises = 1 / (1 + xp.exp(-(pooled @ w3 + b3)))
        return x, first, second, pooled, rises

    def backward(self, activations: tuple[Any, ...], up: Any) -> Any:
        """Add one sample's gradients to the sums; its loss."""
        xp = self.xp
        x, first, second, pooled, rises = activations
        _, _, w2, _, w3, _ = self.weights
        error = rises - up
        d_second = (error / len(x)) * w3 * (1 - second * second)
        d_first = (d_second @ w2.T) * (1 - first * first)
        for total, gradient in zip(
            self.gradients,
            (x.T @ d_first, d_first.sum(axis=0), first.T @ d_second, d_second.sum(axis=0), pooled * error, error),
            strict=True,
        ):
            total += gradient
        return -xp.log(xp.clip(xp.where(up, rises, 1 - rises), 1e-7, 1))

    def update(self, n_samples: int, rate: float = 0.01) -> None:
        """One step against the mean gradient; each array's is scaled by its own running size."""
        xp = self.xp
        for index, (weight, total) in enumerate(zip(self.weights, self.gradients, strict=True)):
            total /= n_samples
            mean_square = float(xp.vdot(total, total)) / total.size
            self.squares[index] = 0.9 * self.squares[index] + 0.1 * mean_square
            weight -= (rate * self.scales[index] / (self.squares[index] ** 0.5 + 1e-8)) * total
            total.fill(0)


class Trainer:
    """Runs folds; keeps a loss per step, and everything else only if told to."""

    def __init__(self, xp: Any, arena: Any, hidden: tuple[int, int], hold_everything: bool) -> None:
        self.xp, self.arena, self.hidden, self.hold_everything = xp, arena, hidden, hold_everything
        self.losses: list[Any] = []
        self.held: list[Any] = []

    @contextlib.contextmanager
    def step(self) -> Any:
        with self.arena.step() if self.arena is not None else contextlib.nullcontext():
            yield

    def inside(self) -> Any:
        # Entered for each batch, so that batches are never fetched while the arena is CuPy's allocator.
        return self.arena if self.arena is not None else contextlib.nullcontext()

    def train(self, network: Network, samples: Stager, epochs: int) -> None:
        for epoch in range(epochs):
            for batch in samples.batches(epoch):
                with self.inside(), self.step():
                    loss = self.xp.zeros((), self.xp.float32)
                    for window, up in zip(batch.x, batch.y > 0, strict=True):
                        with self.step():
                            activations = network.forward(window)
                            loss += network.backward(activations, up)
                            if self.hold_everything:
                                self.held.append(activations)
                            del activations
                    network.update(len(batch.x))
                    self.losses.append(loss / len(batch.x))

    def accuracy(self, network: Network, samples: Stager) -> float:
        right = 0
        for batch in samples.batches():
            with self.inside(), self.step():
                hits = self.xp.zeros((), self.xp.int64)
                for window, up in zip(batch.x, batch.y > 0, strict=True):
                    with self.step():
                        hits += (network.forward(window)[-1] > 0.5) == up
                right += int(hits)
        return right / samples.n_samples

    def fold(self, resident: Any, cuts: tuple[Any, Any, Any], epochs: int, seed: int) -> dict[str, Any]:
        first, middle, last = cuts
        target = Target("close", horizon=HORIZON, kind="direction", classes=2)
        options: dict[str, Any] = {"window": WINDOW, "target": target, "batch_size": BATCH, "seed": seed}
        began, steps = time.perf_counter(), len(self.losses)
        # A label of the last train samples ends after `middle`: they are left out (purged).
        purged = middle - np.timedelta64(HORIZON + 1, "m")
        with (
            Stager(resident, select=Select(interval=(_text(first), _text(purged))), **options) as train,
            Stager(resident, select=Select(interval=(_text(middle), _text(last))), shuffle=False, **options) as test,
        ):
            with self.inside():
                network = Network(self.xp, 5, self.hidden, seed)
            self.train(network, train, epochs)
            result = {
                "train_samples": train.n_samples,
                "test_samples": test.n_samples,
                "loss": float(self.losses[-1]),
                "first_loss": float(self.losses[steps]),
                "accuracy": self.accuracy(network, test),
                "seconds": time.perf_counter() - began,
            }
        if self.arena is not None:
            stats = self.arena.stats()
            result |= {"peak_nbytes": stats.peak_nbytes, "allocations": stats.allocations}
        return result


def _text(instant: np.datetime64) -> str:
    return str(instant.astype("datetime64[s]"))


def cut_times(resident: Any, folds: int) -> list[np.datetime64]:
    """Ends of `folds` + 1 equal stretches of the span of the bars, and a day more for the last decision."""
    first, last = (np.datetime64(stamp.split("+")[0].removesuffix("Z"), "s") for stamp in resident.pack.manifest.span)
    cuts = [first + (last - first) * part // (folds + 1) for part in range(folds + 2)]
    cuts[-1] += np.timedelta64(1, "D")
    return cuts


def open_pool(resident: Any, options: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[Any, Any, Any]:
    """NumPy or CuPy, and the arena or the pool of CuPy's that it allocates from."""
    if resident.device.index is None:
        return np, None, None
    import cupy

    cupy.cuda.Device(resident.device.index).use()
    if options.pool == "arena":
        return cupy, stager.Arena(options.arena), None
    pool = cupy.cuda.MemoryPool()
    stack.enter_context(cupy.cuda.using_allocator(pool.malloc))
    return cupy, None, pool


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything from the bars to the results."""
    source = make_bars(int(options.bars)) if options.bars.isdigit() else options.bars
    began = time.perf_counter()
    with stager.stage(source, device=options.device) as resident, contextlib.ExitStack() as stack:
        xp, arena, pool = open_pool(resident, options, stack)
        hidden = options.hidden or (HIDDEN_CPU if xp is np else HIDDEN_GPU)
        trainer = Trainer(xp, arena, hidden, options.hold_everything)
        cuts = cut_times(resident, options.folds)
        folds = []
        for index in range(options.folds):
            fold = trainer.fold(resident, (cuts[0], cuts[index + 1], cuts[index + 2]), options.epochs, options.seed)
            folds.append({"fold": index + 1} | fold)
            print(
                f"fold {index + 1}: {fold['train_samples']:,} samples trained, loss {fold['first_loss']:.4f} -> "
                f"{fold['loss']:.4f}, accuracy {fold['accuracy']:.3f} of {fold['test_samples']:,}"
                + (f", peak {fold['peak_nbytes'] / 2**20:.1f} MiB" if arena else "")
            )
        summary: dict[str, Any] = {
            "pool": options.pool if xp is not np else "numpy",
            "folds": folds,
            "steps": len(trainer.losses),
            "losses": [float(loss) for loss in trainer.losses],
            "held_arrays": sum(len(held) for held in trainer.held),
            "seconds": time.perf_counter() - began,
        }
        if arena is not None:
            stats = arena.stats()
            summary["arena"] = {name: getattr(stats, name) for name in stats.__slots__}
            summary["device_nbytes"] = stats.capacity_nbytes + stats.overflow_peak_nbytes
            print(
                f"{stats.allocations:,} allocations in {stats.capacity_nbytes / 2**20:.0f} MiB: "
                f"{stats.overflows:,} overflowed, peak {stats.peak_nbytes / 2**20:.1f} MiB"
            )
        elif pool is not None:
            summary["device_nbytes"] = pool.total_bytes()
        print(f"{summary['steps']:,} steps in {summary['seconds']:.1f} s")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bars", default="20000", help="a bar file, a pack, or how many bars to make up [%(default)s]")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--folds", type=int, default=4, help="walk-forward folds [%(default)s]")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--arena", default="64MiB", help="size of the arena [%(default)s]")
    parser.add_argument("--pool", choices=("arena", "cupy"), default="arena")
    parser.add_argument("--hold-everything", action="store_true", help="keep every activation alive")
    parser.add_argument("--hidden", type=lambda text: tuple(map(int, text.split(","))), help="two layer widths")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    if options.epochs < 1 or options.folds < 1:
        parser.error("--epochs and --folds must be at least 1")
    try:
        summary = run(options)
    except StagerError as error:
        raise SystemExit(f"Error: {error}") from None
    if options.output:
        options.output.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
