"""A Stager, in every way that it hands batches out. A way that this Stager does not know yet is left out."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any

from peers import TARGET, LeftOutError, Loader, Windows, served

from stager import Stager

SEED = 7
# What a Stager may have gathered before it is asked for: groups and bytes.
N_AHEAD, AHEAD_NBYTES = 4, {"cuda": 512 << 20, "cpu": 32 << 20}


def _need(function: Any, name: str, **options: Any) -> None:
    known = inspect.signature(function).parameters
    if missing := [option for option in options if option not in known]:
        raise LeftOutError(f"not available: {name} has no {', '.join(missing)}")


def _stager(w: Windows, **options: Any) -> Stager:
    _need(Stager, "Stager", **options)
    return Stager(
        w.pack,
        window=w.window,
        target=TARGET,
        batch_size=w.batch_size,
        seed=SEED,
        last="drop",
        device=w.device,
        **options,
    )


def stager_loop(w: Windows, *, batches: dict[str, Any], **options: Any) -> Loader:
    """``for batch in st.batches(epoch, **batches)``."""
    _need(Stager.batches, "Stager.batches()", **batches)
    st = _stager(w, **options)
    ahead = -(-AHEAD_NBYTES[w.device] // (w.batch_size * w.window_nbytes)) + N_AHEAD
    return Loader(served(lambda epoch: st.batches(epoch, **batches)), st.close, ahead)


def _graph_batch(w: Windows, to: str | None, options: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """A GraphBatch, and what closes it."""
    try:
        graphs = importlib.import_module("stager.cuda.graphs")
    except ModuleNotFoundError as error:
        raise LeftOutError(f"not available: {error}") from error
    st = _stager(w, **options)
    batch = graphs.GraphBatch(st, to=to)

    def close() -> None:
        # Refuses if the graph went on after the last epoch that it knows: what it then served took less.
        batch.position()
        st.close()

    return batch, close


def _launches(launch: Callable[[], Any], batch: Any, n_gathers: int = 1) -> Callable[[int], tuple[Any, Any]]:
    def run(n: int) -> tuple[Any, Any]:
        for _ in repeat(None, -(-n // n_gathers)):
            launch()
        return batch.x, batch.y

    return run


def stager_graph(w: Windows, n_gathers: int = 1, **options: Any) -> Loader:
    """So many gathers a graph, launched by CuPy."""
    import cupy

    batch, close = _graph_batch(w, None, options)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(n_gathers):
            batch.advance()
        graph = stream.end_capture()
    return Loader(_launches(partial(graph.launch, stream), batch, n_gathers), close, whole=n_gathers)


def stager_torch_graph(w: Windows, **options: Any) -> Loader:
    """One gather a graph, replayed by torch."""
    import torch

    batch, close = _graph_batch(w, "torch", options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.advance()
    return Loader(_launches(graph.replay, batch), close)
