"""What people write themselves, with torch, CuPy or NumPy, on the GPU or on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from peers import LeftOutError, Loader, Windows, as_tensors, pairs

from stager.bars.memory import available_nbytes


def _split(order: Any, size: int) -> Iterator[Any]:
    """The full batches of an order; a thousand views at once take half the time of a slice each."""
    full = order[: len(order) // size * size]
    for first in range(0, len(full), 1024 * size):
        yield from full[first : first + 1024 * size].split(size)


def _check_room(nbytes: int, device: str, what: str) -> None:
    if device == "cuda":
        import torch

        free = torch.cuda.mem_get_info()[0]
    else:
        free = available_nbytes()
    if nbytes > 0.9 * free:
        raise LeftOutError(f"does not fit: {what} take {nbytes / 2**30:.0f} GiB of {free / 2**30:.0f} free")


def _on_device(w: Windows) -> tuple[Any, Any, Any]:
    rows, starts, y = as_tensors(w)
    return rows.to(w.device), starts.to(w.device), y.to(w.device)


def _materialised(w: Windows, times: int = 1) -> tuple[Any, Any]:
    """All windows one after the other, and their targets; room is asked for that many times."""
    import torch

    nbytes = len(w.y) * w.window_nbytes
    _check_room(times * nbytes + w.rows.nbytes, w.device, "materialised windows" if times == 1 else "them, twice,")
    rows, starts, y = _on_device(w)
    overlapping = rows.unfold(0, w.window, 1).transpose(1, 2)
    windows = torch.empty((len(y), *overlapping.shape[1:]), device=w.device)
    step = max(1, (1 << 28) // w.window_nbytes)
    for first in range(0, len(y), step):
        windows[first : first + step] = overlapping[starts[first : first + step]]
    return windows, y


def torch_index_select(w: Windows) -> Loader:
    """``windows.index_select(0, order[i : i + batch])`` over materialised windows."""
    import torch

    windows, y = _materialised(w)

    def epoch(_: int) -> Iterator[tuple[Any, Any]]:
        for chosen in _split(torch.randperm(len(y), device=y.device), w.batch_size):
            yield windows.index_select(0, chosen), y.index_select(0, chosen)

    return Loader(pairs(epoch))


def torch_normalised(w: Windows) -> Loader:
    """Windows selected, prices divided by their last close, the logarithm of volume, bfloat16: step by step."""
    import torch

    prices = [index for index, name in enumerate(w.pack.columns) if name in ("open", "high", "low", "close")]
    close, volume = w.pack.columns.index("close"), w.pack.columns.index("volume")
    if prices != list(range(4)):
        raise LeftOutError(f"columns come as {w.pack.columns}")
    windows, y = _materialised(w)

    def epoch(_: int) -> Iterator[tuple[Any, Any]]:
        for chosen in _split(torch.randperm(len(y), device=y.device), w.batch_size):
            x = windows.index_select(0, chosen)
            x[..., :4].div_(x[:, -1:, close : close + 1].clone()).sub_(1)
            x[..., volume].log1p_()
            yield x.to(torch.bfloat16), y.index_select(0, chosen)

    return Loader(pairs(epoch))


def torch_unfold(w: Windows) -> Loader:
    """``rows.unfold(0, window, 1)[starts[order[i : i + batch]]]``: nothing is materialised."""
    import torch

    rows, starts, y = _on_device(w)
    overlapping = rows.unfold(0, w.window, 1).transpose(1, 2)

    def epoch(_: int) -> Iterator[tuple[Any, Any]]:
        for chosen in _split(torch.randperm(len(y), device=y.device), w.batch_size):
            yield overlapping[starts[chosen]], y[chosen]

    return Loader(pairs(epoch))


def torch_permuted(w: Windows, most_batches: int | None = None) -> Loader:
    """All materialised windows permuted once an epoch, into the same memory, then ``split`` into batches."""
    import torch

    w = w.first(w.n_batches if most_batches is None else most_batches)
    windows, y = _materialised(w, times=2)
    mixed, mixed_y = torch.empty_like(windows), torch.empty_like(y)

    def epoch(_: int) -> Iterator[tuple[Any, Any]]:
        order = torch.randperm(len(y), device=y.device)
        torch.index_select(windows, 0, order, out=mixed)
        torch.index_select(y, 0, order, out=mixed_y)
        return zip(mixed.split(w.batch_size), mixed_y.split(w.batch_size), strict=True)

    return Loader(pairs(epoch), whole=w.n_batches)


def fancy_indexing(w: Windows) -> Loader:
    """``windows[starts[order[i : i + batch]]]`` of an overlapping strided matrix, in CuPy or NumPy."""
    xp: Any = importlib.import_module("cupy" if w.device == "cuda" else "numpy")
    rows, starts, y = (xp.asarray(array) for array in (w.rows, w.starts, w.y))
    n_columns = rows.shape[1]
    overlapping = xp.lib.stride_tricks.as_strided(
        rows, (len(rows) - w.window + 1, w.window, n_columns), (4 * n_columns, 4 * n_columns, 4)
    )

    def epoch(_: int) -> Iterator[tuple[Any, Any]]:
        order = xp.random.permutation(len(y))
        for first in range(0, w.n_batches * w.batch_size, w.batch_size):
            chosen = order[first : first + w.batch_size]
            yield overlapping[starts[chosen]], y[chosen]

    return Loader(pairs(epoch))


def plain_copy(w: Windows) -> Loader:
    """No loader: as many bytes as a batch's, copied in a row from the rows; what NumPy can reach."""
    flat, y = w.rows.reshape(-1), w.y
    step = w.batch_size * w.window_nbytes // 4
    if step > len(flat):
        raise LeftOutError("a batch holds more bytes than the rows")

    def epoch(_: int) -> Iterator[tuple[Any, Any]]:
        for first in range(0, len(flat) - step + 1, step):
            yield flat[first : first + step].copy(), y[: w.batch_size].copy()

    return Loader(pairs(epoch))
