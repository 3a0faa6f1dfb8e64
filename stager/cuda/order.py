"""The order of an epoch as the kernels take it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Mirrors struct Order in order.cu.
ORDER = np.dtype(
    [
        ("n", "<i8"),
        ("left_size", "<u4"),
        ("right_size", "<u4"),
        ("n_rounds", "<u4"),
        ("keys", "<u4", (32,)),
        ("padding", "<u4"),
    ],
)


def order_parameters(order: Any) -> npt.NDArray[np.void]:
    """The kernel's struct Order of a :class:`stager.samples.order.Order`."""
    parameters = np.zeros((), ORDER)
    parameters["n"], parameters["left_size"], parameters["right_size"] = order.n, order.left_size, order.right_size
    if order.shuffle:
        parameters["n_rounds"] = len(order.keys)
        parameters["keys"][: len(order.keys)] = order.keys
    return parameters
