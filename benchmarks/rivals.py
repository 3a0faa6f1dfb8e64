"""Which peers are measured where."""

from __future__ import annotations

from functools import partial
from typing import Any

from array_peers import (
    fancy_indexing,
    plain_copy,
    torch_index_select,
    torch_normalised,
    torch_permuted,
    torch_unfold,
)
from library_peers import WORKERS, neuralforecast_windows, qlib_sampler, torch_loader, torch_loader_of_lists
from peers import LeftOutError, Loader, Peer, Windows
from stager_peers import stager_graph, stager_loop, stager_torch_graph

TORCH = ("torch",)
CUPY = ("cupy",)
# An epoch of so many batches is permuted where many shapes are measured: what a batch costs does not depend on it.
GRID_BATCHES = 100_000
PLAIN = Peer("plain copy of as many bytes", plain_copy, same_windows=False)


def everybody(device: str, is_large: bool) -> list[Peer]:
    """Stager and its peers in the main configuration."""
    ours = _on_gpu() if device == "cuda" else [_loop("Stager, NumPy"), PLAIN]
    array = "CuPy" if device == "cuda" else "NumPy"
    pinned = ", pinned" if device == "cuda" else ""
    loaders = [
        Peer(f"torch DataLoader, {n} workers{pinned}", partial(torch_loader, n_workers=n), TORCH) for n in (0, WORKERS)
    ]
    lists = [
        Peer(f"torch DataLoader of lists, {n} workers{pinned}", partial(torch_loader_of_lists, n_workers=n), TORCH)
        for n in (0, WORKERS)
    ]
    qlib = Peer("Qlib TSDataSampler, on the CPU", qlib_sampler, ("pandas", "qlib.data.dataset", "torch"))
    needs = ("neuralforecast.models", "neuralforecast.tsdataset", "pandas")
    neuralforecast = Peer("neuralforecast's windows, on the CPU", neuralforecast_windows, needs, same_windows=False)
    as_they_come = [qlib, neuralforecast]
    return [
        *ours,
        Peer("torch permutation of all windows + split", torch_permuted, TORCH),
        Peer("torch index_select of materialised windows", torch_index_select, TORCH),
        Peer("torch unfold + index", torch_unfold, TORCH),
        Peer(f"{array} fancy indexing of strided windows", fancy_indexing, CUPY if device == "cuda" else ()),
        *lists,
        *loaders,
        *([_only_small(peer) for peer in as_they_come] if is_large else as_they_come),
    ]


def strongest(device: str) -> list[Peer]:
    """Stager and the strongest peers, for the other shapes."""
    if device == "cpu":
        return [_loop("Stager, NumPy"), PLAIN]
    return [
        _loop("Stager, CuPy, arrays reused", CUPY, reuse=True),
        _loop("Stager, torch", to="torch"),
        Peer(
            f"torch permutation of {GRID_BATCHES:,} batches + split",
            partial(torch_permuted, most_batches=GRID_BATCHES),
            TORCH,
        ),
        Peer("torch index_select of materialised windows", torch_index_select, TORCH),
    ]


def fused(device: str) -> list[Peer]:
    """Windows divided by their last close, handed out as bfloat16, and the steps towards it."""
    how: list[tuple[str, dict[str, Any]]] = [
        ("raw float32", {}),
        ("normalize='last', float32", {"normalize": "last"}),
        ("raw bfloat16", {"dtype": "bfloat16"}),
        ("normalize='last', bfloat16", {"normalize": "last", "dtype": "bfloat16"}),
    ]
    ours = [
        Peer(
            f"Stager, torch, {name}",
            partial(stager_loop, batches={"to": "torch"}, **options),
            TORCH,
            same_windows=not options,
        )
        for name, options in how
    ]
    theirs = Peer("torch index_select, divided, to bfloat16", torch_normalised, TORCH, same_windows=False)
    return [*ours, theirs] if device == "cuda" else [theirs]


def _loop(name: str, needs: tuple[str, ...] = (), placement: str | None = None, **batches: Any) -> Peer:
    options = {} if placement is None else {"placement": placement}
    needs = TORCH if batches.get("to") == "torch" else needs
    return Peer(name, partial(stager_loop, batches=batches, **options), needs, over_bus=placement == "host")


def _on_gpu() -> list[Peer]:
    found = []
    for where, placement in (("", "device"), (", host", "host")):
        found += [
            _loop(f"Stager, CuPy{where}", CUPY, placement),
            _loop(f"Stager, CuPy, arrays reused{where}", CUPY, placement, reuse=True),
            _loop(f"Stager, torch{where}", placement=placement, to="torch"),
        ]
        graphs = (
            (f"Stager, CUDA graph{where}", stager_graph, CUPY),
            (f"Stager, CUDA graph of 8 batches{where}", partial(stager_graph, n_gathers=8), CUPY),
            (f"Stager, CUDA graph of torch{where}", stager_torch_graph, TORCH),
        )
        for name, opened, needs in graphs:
            found.append(Peer(name, partial(opened, placement=placement), needs, over_bus=placement == "host"))
    return found


def _only_small(peer: Peer) -> Peer:
    """Left out of the larger data: Qlib keeps a Python tuple a bar, neuralforecast copies all windows of 32 series."""

    def refuse(w: Windows) -> Loader:
        raise LeftOutError("only with the smaller data")

    return Peer(peer.name, refuse, peer.needs, peer.same_windows)
