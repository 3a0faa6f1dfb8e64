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
# What a Stager may have gathered before it is asked for.
GROUPS_AHEAD, GROUPS_AHEAD_NBYTES = 4, 64 << 20


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
    ahead = -(-GROUPS_AHEAD_NBYTES // (w.batch_size * w.window_nbytes)) + GROUPS_AHEAD
    return Loader(served(lambda epoch: st.batches(epoch, **batches)), st.close, ahead)


def _graph_batch(w: Windows, options: dict[str, Any]) -> tuple[Stager, Any]:
    try:
        graphs = importlib.import_module("stager.cuda.graphs")
    except ModuleNotFoundError as error:
        raise LeftOutError(f"not available: {error}") from error
    st = _stager(w, **options)
    graph_batch = graphs.GraphBatch(st)
    graph_batch.seek(0, 0)
    return st, graph_batch


def _launches(launch: Callable[[], Any], graph_batch: Any) -> Callable[[int], tuple[Any, Any]]:
    def run(n: int) -> tuple[Any, Any]:
        for _ in repeat(None, n):
            launch()
        return graph_batch.x, graph_batch.y

    return run


def stager_graph(w: Windows, **options: Any) -> Loader:
    """One gather a graph, launched by CuPy."""
    import cupy

    st, graph_batch = _graph_batch(w, options)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        graph_batch.advance(stream)
        graph = stream.end_capture()
    return Loader(_launches(partial(graph.launch, stream), graph_batch), st.close)


def stager_torch_graph(w: Windows, **options: Any) -> Loader:
    """One gather a graph, replayed by torch."""
    import cupy
    import torch

    st, graph_batch = _graph_batch(w, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_batch.advance(cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream))
    return Loader(_launches(graph.replay, graph_batch), st.close)
