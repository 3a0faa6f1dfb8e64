"""Train a small torch classifier on several ranks: every rank serves its part of every batch from its own Stager.

All ranks together train on --batch samples at a time, whatever their number, and what fills the last batch up counts
for nothing; so the losses are those of one process. With --checkpoint the training goes on where it was written last,
also on another number of ranks. The classifier sees 32 bars and tells whether the close rises over the five bars after
the next; it is judged on the last quarter of the history.

    torchrun --nproc-per-node 2 examples/ddp.py bars.pack --checkpoint ddp.pt

With --attach the ranks of a machine share the rows that a service holds, each on its own GPU:

    stager serve bars.pack --placement spread
    torchrun --nproc-per-node 2 examples/ddp.py --attach bars

Without a source, bars are made up. srun and mpirun do as well as torchrun, with MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from make_bars import make_bars

from stager import PurgedKFold, Ranks, Stager, Target, attach
from stager.errors import StagerError

try:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    sys.exit(f"ddp.py needs torch: {error}; pip install 'stager[torch]'")

WINDOW, HORIZON = 32, 5
CLOSE = 3  # columns are open, high, low, close, volume


class Classifier(torch.nn.Module):
    """One hidden layer over the returns to the last close, in units of a tenth of a percent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WINDOW - 1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Flatten(0)
        )

    def forward(self, x: Any) -> Any:
        close = x[:, :, CLOSE]
        return self.layers((close[:, :-1] / close[:, -1:] - 1) * 1000)


def save(path: Path, model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Write a checkpoint; a kill leaves this one or the one before."""
    beside = path.with_name(path.name + ".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": state}, beside)
    os.replace(beside, path)


def accuracy(model: Any, st: Stager) -> float:
    right = n = 0
    with torch.no_grad():
        for batch in st.batches(0, to="torch"):
            right += int(((model(batch.x) > 0) == (batch.y > 0)).sum())
            n += len(batch)
    return right / n


def train(options: argparse.Namespace, ranks: Ranks, device: str) -> None:
    batch_size, rest = divmod(options.batch, ranks.world_size)
    if rest:
        sys.exit(f"ddp.py: --batch {options.batch} is no multiple of {ranks.world_size} ranks")
    target = Target("close", horizon=HORIZON, kind="direction", classes=2)
    where = {} if options.attach else {"device": device}
    if options.attach:
        source = attach(options.attach, device=device)
    else:
        source = make_bars() if options.source is None else options.source
    served_to = os.devnull if options.served is None else f"{options.served}.{ranks.rank}"
    with open(served_to, "a") as log, Stager(
        source, window=WINDOW, target=target, batch_size=batch_size, seed=7, last="pad", ranks=ranks, **where
    ) as st:  # fmt: skip
        # No label of the first three quarters ends inside the last, on which every rank could judge: it is whole there.
        fold = st.split(PurgedKFold(4))[-1]
        data = fold.train
        model = Classifier().to(device)
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        loss_of = torch.nn.BCEWithLogitsLoss(reduction="none")
        first_epoch, start = 0, 0
        if options.checkpoint is not None and options.checkpoint.exists():
            kept = torch.load(options.checkpoint, map_location=device, weights_only=True)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            first_epoch, start = data.resume(kept["data"])
        if ranks.rank == 0:
            print(f"{ranks.world_size} ranks of {batch_size} samples on {st.resident.device}, {len(data):,} batches")
            print(f"from epoch {first_epoch}, batch {start}\n{'epoch':>5}  {'loss':>7}  {'accuracy':>8}  samples/s")
        for epoch in range(first_epoch, options.epochs):
            total, n_samples, started = torch.zeros((), device=device), 0, time.perf_counter()
            for batch in data.batches(epoch, start=start, to="torch"):
                if options.served is not None:
                    # Before the ranks wait for each other, so that a checkpoint covers nothing that is not told.
                    served = batch.sample_ids[batch.valid].tolist()
                    print(json.dumps({"epoch": epoch, "batch": batch.number, "samples": served}), file=log, flush=True)
                # Of all ranks; DDP takes the mean over them.
                n = min(options.batch, data.n_samples - batch.number * options.batch)
                valid = torch.from_numpy(batch.valid).to(device)
                losses = loss_of(parallel(batch.x), (batch.y > 0).float())
                loss = torch.where(valid, losses, 0.0).sum() * ranks.world_size / n
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() * n
                n_samples += n
                if options.checkpoint is not None and ranks.rank == 0 and (batch.number + 1) % options.save_every == 0:
                    save(options.checkpoint, model, optimizer, data.state_dict(epoch, batch.number + 1))
            distributed.all_reduce(total)
            if ranks.rank == 0:
                if options.checkpoint is not None:
                    save(options.checkpoint, model, optimizer, data.state_dict(epoch + 1, 0))
                rate = n_samples / (time.perf_counter() - started)
                mean = float(total) / (n_samples * ranks.world_size)
                print(f"{epoch:>5}  {mean:>7.5f}  {accuracy(model, fold.test):>8.1%}  {rate:,.0f}", flush=True)
            start = 0
        if ranks.rank == 0:
            print("accuracy is on later bars than any that was trained on; 50% is chance")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", help="a pack, or a bar file [bars are made up]")
    parser.add_argument("--attach", metavar="NAME", help="a pack that a service holds, instead of a source")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512, help="samples of a batch on all ranks together [%(default)s]")
    parser.add_argument("--checkpoint", type=Path, help="written as the training goes on, and resumed from")
    parser.add_argument("--save-every", type=int, default=100, help="batches [%(default)s]")
    parser.add_argument("--served", help="write which samples rank R trained on, as lines of JSON, to SERVED.R")
    options = parser.parse_args()
    try:
        ranks = Ranks.from_env()
        n_gpus = torch.cuda.device_count()
        # A launcher may show each rank its own GPU alone.
        device = f"cuda:{(ranks.local_rank or 0) % n_gpus}" if n_gpus else "cpu"
        if n_gpus:
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if n_gpus else "gloo", rank=ranks.rank, world_size=ranks.world_size)
        try:
            train(options, ranks, device)
        finally:
            distributed.destroy_process_group()
    except StagerError as error:
        sys.exit(f"ddp.py: {error}")


if __name__ == "__main__":
    main()
