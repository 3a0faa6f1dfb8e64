"""Staging of many small arrays: one allocation, one pipelined transfer, views made when asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from stager.batches.devices import choose_device
from stager.batches.resident import StagingOptions, live_views
from stager.config import resolve
from stager.errors import ClosedError, ConfigError

# Small enough that packing, registering and copying overlap from the start.
_PIECE_NBYTES = 16 << 20


class StagedArrays(Sequence[Any]):
    """A read-only sequence of views into one buffer, in the order in which the arrays were given.

    Made by :func:`stage_arrays`. A view is made when asked for, keeps the buffer alive, and must not be written to.

    Attributes
    ----------
    nbytes : int
        Bytes of the buffer, alignment included.
    device : str
    path : str
        How the arrays came to their place.
    """

    def __init__(self, memory: Any, view: Callable[[Any, int], Any], n: int, nbytes: int, device: str, path: str):
        self._memory, self._view, self._n = memory, view, n
        self.nbytes, self.device, self.path = nbytes, device, path

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if self._memory is None:
            raise ClosedError("the staged arrays were released")
        if isinstance(index, slice):
            return [self._view(self._memory, i) for i in range(*index.indices(self._n))]
        i = index + self._n if index < 0 else index
        if not 0 <= i < self._n:
            raise IndexError(f"there is no array {index}; {self._n:,} are staged")
        return self._view(self._memory, i)

    def release(self) -> None:
        """Give the buffer back; views that are still alive keep it until they die, and a warning counts them."""
        memory, self._memory = self._memory, None
        if memory is not None and (views := live_views(memory)):
            warnings.warn(
                f"{views} views of the released arrays are still alive; the memory returns with the last of them",
                ResourceWarning,
                stacklevel=2,
            )

    def __enter__(self) -> StagedArrays:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._memory is None else f"{self.nbytes:,} bytes on {self.device}"
        return f"<StagedArrays: {self._n:,} arrays, {state}>"


def stage_arrays(arrays: Iterable[npt.NDArray[Any]], *, align: int = 16, device: str = "auto") -> StagedArrays:
    """Stage any number of arrays of any shapes with one allocation and one pipelined transfer.

    Parameters
    ----------
    arrays : iterable of numpy.ndarray
        Booleans, integers, and floats of 16, 32 or 64 bits, in native byte order; any strides. They are copied, in C
        order.
    align : int
        Every array starts at a multiple of so many bytes: a power of two, at least 8.
    device : str
        As in :func:`stage`.

    Returns
    -------
    StagedArrays
        Owned by the caller; ``release()`` it.

    Raises
    ------
    ConfigError
        If something is no array, or an array's dtype can't be staged.
    DeviceError, StagingError
    """
    if align < 8 or align & (align - 1):
        raise ConfigError(f"align is {align!r}; it must be a power of two of at least 8 bytes")
    options = resolve(StagingOptions, "staging", arguments={"device": None if device == "auto" else device})
    chosen = choose_device(options.device)
    given = list(arrays)
    _check(given)
    sizes = np.fromiter((array.nbytes for array in given), np.int64, len(given))
    padded = (sizes + (align - 1)) & -align
    ends = np.cumsum(padded)
    offsets = (ends - padded).tolist()
    buffer = np.empty(int(ends[-1]) if given else 0, np.uint8)
    pack = _packer(given, offsets, padded, buffer)
    details = [(array.shape, array.dtype) for array in given]
    if chosen.index is None:
        pack(len(buffer))
        buffer.flags.writeable = False

        def host_view(memory: Any, i: int) -> Any:
            shape, dtype = details[i]
            return np.ndarray(shape, dtype, memory, offsets[i])

        return StagedArrays(buffer, host_view, len(given), buffer.nbytes, str(chosen), "in memory")

    from stager.cuda import staging, upload

    watch = upload.Watch(buffer.nbytes, options.stall_timeout)
    _, memory, path = staging.to_device(
        buffer,
        staging.prepare(chosen.index),
        watch,
        before=lambda first, stop: pack(stop),
        remedy="free some, or stage the arrays in parts",
        piece_nbytes=_PIECE_NBYTES,
    )

    def device_view(memory: Any, i: int) -> Any:
        return staging.array_at(memory, offsets[i], *details[i])

    return StagedArrays(memory, device_view, len(given), buffer.nbytes, str(chosen), path)


def _check(arrays: list[Any]) -> None:
    if kinds := {type(array) for array in arrays} - {np.ndarray}:
        for index, array in enumerate(arrays):
            if not isinstance(array, np.ndarray):
                raise ConfigError(f"array {index} is a {type(array).__name__}; stage_arrays takes NumPy arrays")
        assert all(issubclass(kind, np.ndarray) for kind in kinds)
    allowed = {np.dtype(code) for code in "?bBhHiIlLqQefd"}
    if wrong := {array.dtype for array in arrays} - allowed:
        index, dtype = next((i, array.dtype) for i, array in enumerate(arrays) if array.dtype in wrong)
        raise ConfigError(
            f"array {index} has dtype {dtype.str if dtype.kind in 'iuf' else dtype}; stage_arrays takes booleans, "
            f"integers and float16, float32, float64 in native byte order: convert it with .astype()"
        )


def _packer(
    arrays: list[npt.NDArray[Any]], offsets: list[int], padded: npt.NDArray[np.int64], buffer: npt.NDArray[np.uint8]
) -> Callable[[int], None]:
    """A function that fills `buffer` with whole arrays, going on from its last call, at least up to a byte."""
    done = 0
    starts = np.array([*offsets, len(buffer)])
    pads = padded - np.fromiter((array.nbytes for array in arrays), np.int64, len(arrays))
    uniform = len({(array.shape, array.dtype) for array in arrays}) == 1 and arrays[0].ndim > 0 and not pads.any()
    zeros = np.zeros(int(pads.max(initial=0)), np.uint8)

    def pack(stop_byte: int) -> None:
        nonlocal done
        stop = int(np.searchsorted(starts, stop_byte))
        if stop <= done:
            return
        part, out = arrays[done:stop], buffer[starts[done] : starts[stop]]
        if uniform and out.size:
            np.concatenate(part, out=out.view(part[0].dtype).reshape(-1, *part[0].shape[1:]))
        elif out.size:
            flat = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in part)
            gaps = (zeros[:n] for n in pads[done:stop].tolist())
            np.concatenate(list(chain.from_iterable(zip(flat, gaps, strict=True))), out=out)
        done = stop

    return pack


