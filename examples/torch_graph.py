"""Train a small torch classifier by replaying one CUDA graph a batch, gather included, beside the loop over batches.

Both loops train the same model on the same batches in the same order, so their losses agree; what differs is the work
of the host. The classifier sees 32 bars and tells whether the close rises over the five bars after the next. It is
trained on the first part of the history and judged on the rest.

    python examples/torch_graph.py bars.pack
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from stager import PurgedKFold, Stager, Target
from stager.errors import StagerError

WINDOW, HORIZON = 32, 5
CLOSE = 3  # columns are open, high, low, close, volume
WARM_UP = 3  # batches, before the capture: torch makes its buffers and the optimizer's moments in them


class Training:
    """A model and its optimizer. `step` is what a graph captures, so it never asks the device for a value."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WINDOW - 1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Flatten(0)
        ).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3, capturable=True)
        self.loss_of = torch.nn.BCEWithLogitsLoss()
        self.sum_of_losses = torch.zeros((), device="cuda")

    def logits(self, x: Any) -> Any:
        """Of returns to the last close, in units of a tenth of a percent."""
        close = x[:, :, CLOSE]
        return self.model((close[:, :-1] / close[:, -1:] - 1) * 1000)

    def step(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(self.logits(x), (y > 0).float())
        loss.backward()
        self.optimizer.step()
        self.sum_of_losses += loss.detach()

    def mean_loss(self, n: int) -> float:
        """Of the n batches since this was asked last; waits for them."""
        mean = float(self.sum_of_losses) / n
        self.sum_of_losses.zero_()
        return mean

    def accuracy(self, st: Stager) -> float:
        right, n = self.torch.zeros((), device="cuda", dtype=self.torch.int64), 0
        with self.torch.no_grad():
            for batch in st.batches(0, to="torch"):
                right += ((self.logits(batch.x) > 0) == (batch.y > 0)).sum()
                n += len(batch)
        return int(right) / n


def captured(training: Training, st: Stager) -> tuple[Any, Any]:
    """The graph of one step and its batch, which stands behind the batches of the warm-up."""
    from stager.cuda import GraphBatch

    torch, batch = training.torch, GraphBatch(st, to="torch")
    # As torch asks: the warm-up is on a side stream. Its batches are trained on like any others.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            batch.advance()
            training.step(batch.x, batch.y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.advance()
        training.step(batch.x, batch.y)
    # To capture is not to run: the first replay trains on the batch after the warm-up.
    batch.seek(0, WARM_UP)
    return graph, batch


def train(torch: Any, st: Stager, n_epochs: int) -> None:
    # Judge on the last quarter of the history. No label of the first part ends inside it.
    fold = st.split(PurgedKFold(4))[-1]
    n_batches = len(fold.train)
    if n_batches <= WARM_UP:
        sys.exit(f"torch_graph.py: {n_batches} batches an epoch are too few; give more bars, or a smaller --batch-size")
    loop, replayed = Training(torch), Training(torch)
    graph, batch = captured(replayed, fold.train)
    print(fold.describe())
    print(f"\n{'':5}  {'loop over batches':^30}  {'graph':^30}")
    print(f"{'epoch':>5}" + f"  {'loss':>6}  {'accuracy':>8}  {'samples/s':>12}" * 2)
    for epoch in range(n_epochs):
        row = f"{epoch:>5}"
        started = time.perf_counter()
        for one in fold.train.batches(epoch, to="torch"):
            loop.step(one.x, one.y)
        torch.cuda.synchronize()
        rate = n_batches * st.batch_size / (time.perf_counter() - started)
        row += f"  {loop.mean_loss(n_batches):>6.4f}  {loop.accuracy(fold.test):>8.1%}  {rate:>12,.0f}"
        # A graph goes on by itself, from epoch to epoch; the warm-up was the first epoch's beginning.
        first = WARM_UP if epoch == 0 else 0
        assert batch.position() == (epoch, first)
        started = time.perf_counter()
        for _ in range(first, n_batches):
            graph.replay()
        torch.cuda.synchronize()
        rate = (n_batches - first) * st.batch_size / (time.perf_counter() - started)
        row += f"  {replayed.mean_loss(n_batches):>6.4f}  {replayed.accuracy(fold.test):>8.1%}  {rate:>12,.0f}"
        print(row)
    print("accuracy is on later bars than any that was trained on; 50% is chance")


def torch_on_a_gpu() -> Any:
    try:
        import torch
    except ImportError as error:
        sys.exit(f"torch_graph.py needs torch and a GPU: {error}; pip install 'stager[torch]'")
    if not torch.cuda.is_available():
        sys.exit(f"torch_graph.py needs torch and a GPU: torch {torch.__version__} sees no GPU; see examples/train.py")
    return torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a pack, or a bar file")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args()
    torch = torch_on_a_gpu()
    target = Target("close", horizon=HORIZON, kind="direction", classes=2)
    try:
        with Stager(
            options.source, window=WINDOW, target=target, batch_size=options.batch_size, seed=7, last="drop",
            device="cuda",
        ) as st:  # fmt: skip
            train(torch, st, options.epochs)
    except StagerError as error:
        sys.exit(f"torch_graph.py: {error}")


if __name__ == "__main__":
    main()
