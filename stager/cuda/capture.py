"""Driver calls while a graph is captured somewhere: CUDA refuses many of them, unless the thread says it is relaxed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def relax_capture() -> None:
    """Let this thread make driver calls while a graph is captured in global mode."""
    _exchange()(ctypes.byref(ctypes.c_int(_RELAXED)))


@contextmanager
def relaxed() -> Iterator[None]:
    """The same for a few calls."""
    mode = ctypes.c_int(_RELAXED)
    _exchange()(ctypes.byref(mode))
    try:
        yield
    finally:
        _exchange()(ctypes.byref(mode))


@cache
def _exchange() -> Callable[[Any], Any]:
    # CuPy has no binding for it. Without a driver nothing is captured, and there is nothing to relax.
    try:
        exchange: Callable[[Any], Any] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except OSError:
        return lambda mode: None
    return exchange
