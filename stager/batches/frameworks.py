"""Batches on the host as arrays of the framework that is asked for, without a copy."""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from stager.errors import ConfigError, SampleError

Framework: TypeAlias = Literal["torch", "jax", "numpy"]


def check_framework(to: str | None) -> None:
    """Raise unless batches can be handed out as arrays of `to`.

    Raises
    ------
    SampleError
    """
    if to is not None and to not in get_args(Framework):
        raise SampleError(f"to is {to!r}; there are {', '.join(map(repr, get_args(Framework)))} and None")


def hand_out(array: Any, to: Framework | None, *, bfloat16: bool = False) -> Any:
    """A NumPy array as one of `to`.

    Parameters
    ----------
    array : ndarray
    to : {"torch", "jax", "numpy"}, optional
        None is NumPy, on the host.
    bfloat16 : bool
        The array, uint16, holds the bits of bfloat16.

    Raises
    ------
    ConfigError
        If the framework, or what NumPy needs for bfloat16, is not installed.
    """
    if to == "torch":
        torch = _imported("torch", to)
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(array)
    if bfloat16:
        array = array.view(_imported("ml_dtypes", "bfloat16").bfloat16)
    return _imported("jax.numpy", "jax").asarray(array) if to == "jax" else array


def _imported(name: str, wanted: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"{wanted} needs {package} ({error}): pip install {package}") from error
