"""The order of an epoch as the kernels take it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

# Mirrors struct Network in order.cu.
NETWORK = np.dtype(
    [
        ("n", "<i8"),
        ("left_size", "<u4"),
        ("right_size", "<u4"),
        ("n_rounds", "<u4"),
        ("keys", "<u4", (32,)),
        ("padding", "<u4"),
    ],
)
# Mirrors struct Order in order.cu.
ORDER = np.dtype(
    [
        ("n", "<i8"),
        ("batch_size", "<i8"),
        ("stride", "<i8"),
        ("table", "<u8"),
        ("draw_keys", "<u8", (3,)),
        ("block", "<i8"),
        ("place", "<i8"),
        ("rotation", "<i8"),
        ("whole", NETWORK),
        ("inside", NETWORK),
        ("rest", NETWORK),
        ("kind", "<u4"),
        ("tweaks", "<u4", (2,)),
        ("padding", "<u4"),
    ],
)
# The kernels know these algorithms alone.
_KINDS = {"none": 0, "feistel32-1": 1, "blocks32-1": 2, "alias64-1": 3}
_NO_NETWORK = bytes(NETWORK.itemsize)


def order_parameters(order: Any, batch_size: int = 1, stride: int = 1, table: int = 0) -> npt.NDArray[np.void]:
    """The kernel's struct Order.

    Parameters
    ----------
    order : Order or WeightedOrder
        Of :mod:`stager.samples.order`, :mod:`stager.samples.sampling`.
    batch_size, stride : int
        Positions of a batch, and from one batch to the next.
    table : int
        Address of the table of a WeightedOrder, which the kernel reads.
    """
    kind = _KINDS[order.algorithm]
    # Packed as bytes: setting the fields of nested structs one by one takes ten times as long, for every group.
    numbers, networks, tweaks = [0] * 7, [_NO_NETWORK] * 3, b"\0" * 8
    if kind == 1:
        networks[0] = _network(order.how)
    elif kind == 2:
        how = order.how
        numbers[4:] = how.size, how.place, how.rotation
        networks = [_NO_NETWORK if one is None else _network(one) for one in (how.outer, how.inside, how.rest)]
        tweaks = how.tweak_words.astype("<u4").tobytes()
    elif kind == 3:
        numbers[:4] = table, *order.keys.tolist()
    text = struct.pack("<3q4Q3q", order.n, batch_size, stride, *numbers) + b"".join(networks)
    text += struct.pack("<I", kind) + tweaks + b"\0" * 4
    return np.frombuffer(bytearray(text), ORDER).reshape(())


def _network(network: Any) -> bytes:
    """The kernel's struct Network."""
    keys = network.keys.astype("<u4").tobytes()
    numbers = struct.pack("<q3I", network.n, network.left_size, network.right_size, len(network.keys))
    padded: bytes = numbers + keys.ljust(132, b"\0")
    return padded
