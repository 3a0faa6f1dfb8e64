"""Loaders that libraries bring: torch's DataLoader, and the window samplers of Qlib and neuralforecast as they come."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from peers import HORIZON, Loader, Windows, as_tensors, pairs

WORKERS = 8
# Batches that a worker of a torch DataLoader makes ahead.
PREFETCH = 2


@dataclass(frozen=True)
class EachWindow:
    """A torch dataset of one window and its target an item."""

    rows: Any
    starts: Any
    y: Any
    window: int

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, sample: int) -> tuple[Any, Any]:
        first = self.starts[sample]
        return self.rows[first : first + self.window], self.y[sample]


@dataclass(frozen=True)
class ListedWindows:
    """A torch dataset whose item is a batch, asked for by a list of samples."""

    overlapping: Any
    starts: Any
    y: Any

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, samples: list[int]) -> tuple[Any, Any]:
        return self.overlapping[self.starts[samples]], self.y[samples]


def _from_loader(loader: Iterable[Any], device: str, ahead: int = 0) -> Loader:
    """The loop over a DataLoader, pinned batches sent on to the GPU."""

    def sent(_: int) -> Iterator[tuple[Any, Any]]:
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def here(_: int) -> Iterable[tuple[Any, Any]]:
        return loader

    return Loader(pairs(here if device == "cpu" else sent), ahead=ahead)


def _workers(n: int, pinned: bool) -> dict[str, Any]:
    """Arguments of a DataLoader; a worker that dies must not stop the benchmark."""
    more = {"persistent_workers": True, "prefetch_factor": PREFETCH, "timeout": 120} if n else {}
    return {"num_workers": n, "pin_memory": pinned, **more}


def torch_loader(w: Windows, n_workers: int) -> Loader:
    """``DataLoader(dataset, batch_size, shuffle=True)``, one ``dataset[i]`` a window."""
    from torch.utils.data import DataLoader

    rows, _, y = as_tensors(w)
    dataset: Any = EachWindow(rows, w.starts, y, w.window)
    how = _workers(n_workers, w.device == "cuda")
    loader = DataLoader(dataset, w.batch_size, shuffle=True, drop_last=True, **how)
    return _from_loader(loader, w.device, n_workers * PREFETCH)


def torch_loader_of_lists(w: Windows, n_workers: int) -> Loader:
    """The same with one ``dataset[list]`` a batch, which torch does not do by itself."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    rows, starts, y = as_tensors(w)
    dataset: Any = ListedWindows(rows.unfold(0, w.window, 1).transpose(1, 2), starts, y)
    sampler = BatchSampler(RandomSampler(dataset), w.batch_size, drop_last=True)
    loader = DataLoader(dataset, batch_size=None, sampler=sampler, **_workers(n_workers, w.device == "cuda"))
    return _from_loader(loader, w.device, n_workers * PREFETCH)


def _frame(w: Windows) -> Any:
    """The bars as a DataFrame of float32 columns, with symbol and time."""
    import pandas as pd

    frame = pd.DataFrame(w.rows, columns=list(w.pack.columns))
    frame.insert(0, "symbol", np.repeat(np.array(w.pack.symbols), w.pack.counts))
    frame.insert(1, "time", w.pack.times.view("datetime64[ns]"))
    return frame


def qlib_sampler(w: Windows) -> Loader:
    """TSDataSampler in a DataLoader, as Qlib's own models use it: the label is the last column of the last row."""
    from qlib.data.dataset import TSDataSampler
    from torch.utils.data import DataLoader

    frame = _frame(w).rename(columns={"symbol": "instrument", "time": "datetime"})
    decisions = w.starts + w.window - 1
    frame["label"] = np.float32(np.nan)
    frame.loc[decisions, "label"] = w.y
    times = frame["datetime"].min(), frame["datetime"].max()
    frame = frame.set_index(["datetime", "instrument"])
    chosen = np.zeros(len(frame), bool)
    chosen[decisions] = True
    flags = frame[["label"]].assign(label=chosen)["label"]
    sampler = TSDataSampler(frame.sort_index(), *times, step_len=w.window, flt_data=flags.sort_index())
    loader = DataLoader(sampler, w.batch_size, shuffle=True, drop_last=True)

    def epoch(_: int) -> Iterator[tuple[Any, Any]]:
        for data in loader:
            yield data[:, :, :-1], data[:, -1, -1]

    return Loader(pairs(epoch))


def neuralforecast_windows(w: Windows) -> Loader:
    """What a model's training step does before its network: all windows of 32 series are made, and some are drawn.

    Close is the series, the other columns are exogenous; the target is the series' value at the horizon.
    """
    import torch
    from neuralforecast.models import MLP
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    # Lightning tells of its devices at INFO.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    frame = _frame(w).rename(columns={"symbol": "unique_id", "time": "ds", "close": "y"})
    frame = frame[["unique_id", "ds", "y", *(name for name in w.pack.columns if name != "close")]]
    dataset = TimeSeriesDataset.from_df(frame)[0]
    exogenous = [name for name in w.pack.columns if name != "close"]
    model: Any = MLP(
        h=HORIZON, input_size=w.window, hist_exog_list=exogenous, windows_batch_size=w.batch_size, accelerator="cpu"
    )
    loader = TimeSeriesDataModule(dataset, batch_size=model.batch_size).train_dataloader()

    def epoch(_: int) -> Iterator[tuple[Any, Any]]:
        for series in loader:
            windows, static, static_columns, usable, weight, columns = model._create_windows(series, "train")
            drawn = torch.randperm(len(usable))[: w.batch_size]
            batch = model._sample_windows(windows, static, static_columns, columns, drawn, usable, weight)["temporal"]
            yield batch[:, : w.window], batch[:, -1, series["y_idx"]]

    return Loader(pairs(epoch))
