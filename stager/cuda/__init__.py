"""The GPU: the only room that imports CuPy."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Only what a user asks for imports CuPy.
    if name == "GraphBatch":
        from stager.cuda.graphs import GraphBatch

        return GraphBatch
    raise AttributeError(f"module 'stager.cuda' has no attribute {name!r}")
