"""Staging of many small arrays: one allocation, one pipelined transfer, views made when asked for."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from stager.batches.devices import choose_device
from stager.batches.resident import live_views, staging_options
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
        i = operator.index(index)
        i += self._n if i < 0 else 0
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
        Every array starts at a multiple of so many bytes: a power of two, 8 to 256.
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
    if isinstance(align, bool) or not isinstance(align, int) or not 8 <= align <= 256 or align & (align - 1):
        raise ConfigError(f"align is {align!r}; it must be a power of two from 8 to 256 bytes")
    options = staging_options(device)
    chosen = choose_device(options.device)
    packed = _Packed(list(arrays), align)
    if chosen.index is None:
        buffer = _aligned(packed.nbytes, align)
        packed.fill(buffer, 0)
        buffer.flags.writeable = False

        def host_view(memory: Any, i: int) -> Any:
            return np.ndarray(*packed.detail(i), memory, packed.offset(i))

        return StagedArrays(buffer, host_view, packed.n, packed.nbytes, str(chosen), "in memory")

    from stager.cuda import device_memory, staging, upload
    from stager.cuda.watch import Watch

    watch = Watch(packed.nbytes, options.stall_timeout)
    driver = staging.prepare(chosen.index, watch)

    def copy(memory: Any) -> str:
        # NumPy packs one part at a time, so more lanes would only wait for each other.
        return upload.copy_filled(packed.spans(upload.RING_NBYTES), packed.fill, memory, driver, watch, n_lanes=2)

    memory, path = device_memory.load(
        driver, max(packed.nbytes, 1), watch, "free some, or stage the arrays in parts", copy
    )

    def device_view(memory: Any, i: int) -> Any:
        return staging.array_at(memory, packed.offset(i), *packed.detail(i))

    return StagedArrays(memory, device_view, packed.n, packed.nbytes, str(chosen), path)


def _aligned(nbytes: int, align: int) -> npt.NDArray[np.uint8]:
    """An array that NumPy makes the base of every view of it, so that views can be counted."""
    memory = np.empty(nbytes + align, np.uint8)
    skip = -memory.ctypes.data % align
    return np.frombuffer(memory.data[skip : skip + nbytes], np.uint8)


def _check(arrays: list[Any]) -> None:
    for kind in set(map(type, arrays)):
        # A masked array is refused because its mask would be lost.
        if not issubclass(kind, np.ndarray) or issubclass(kind, np.ma.MaskedArray):
            index = next(i for i, array in enumerate(arrays) if type(array) is kind)
            raise ConfigError(f"array {index} is a {kind.__name__}; stage_arrays takes plain NumPy arrays")
    allowed = {np.dtype(code) for code in "?bBhHiIlLqQefd"}
    if wrong := {array.dtype for array in arrays} - allowed:
        index, dtype = next((i, array.dtype) for i, array in enumerate(arrays) if array.dtype in wrong)
        raise ConfigError(
            f"array {index} has dtype {dtype.str if dtype.kind in 'iuf' else dtype}; stage_arrays takes booleans, "
            f"integers and float16, float32, float64 in native byte order: convert it with .astype()"
        )


class _Packed:
    """Where each array goes in the buffer, and the bytes of any part of it.

    A hundred thousand arrays of one shape are the case that this is for: nothing is kept or computed per array there.
    """

    def __init__(self, arrays: list[Any], align: int) -> None:
        _check(arrays)
        self._arrays, self.n = arrays, len(arrays)
        shapes, dtypes = {array.shape for array in arrays}, {array.dtype for array in arrays}
        first = arrays[0] if arrays else np.empty(0)
        self._uniform = (
            (first.shape, first.dtype)
            if len(shapes) == len(dtypes) == 1 and first.ndim and first.nbytes and first.nbytes % align == 0
            else None
        )
        if self._uniform:
            self._stride = first.nbytes
            self.nbytes = self.n * self._stride
            return
        self._details = [(array.shape, array.dtype) for array in arrays]
        sizes = np.fromiter((array.nbytes for array in arrays), np.int64, self.n)
        padded = (sizes + (align - 1)) & -align
        self._ends = np.cumsum(padded)
        self._starts = self._ends - padded
        self._pads = (padded - sizes).tolist()
        self.nbytes = int(self._ends[-1]) if arrays else 0

    def detail(self, i: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of array `i`."""
        return self._uniform or self._details[i]

    def offset(self, i: int) -> int:
        """Byte at which array `i` starts."""
        return i * self._stride if self._uniform else int(self._starts[i])

    def spans(self, most_nbytes: int) -> list[tuple[int, int]]:
        """The buffer in parts of at most so many bytes; whole arrays where they are alike."""
        step = most_nbytes
        if self._uniform and self._stride <= most_nbytes:
            step -= most_nbytes % self._stride
        return [(first, min(first + step, self.nbytes)) for first in range(0, self.nbytes, step)]

    def fill(self, out: npt.NDArray[np.uint8], first: int) -> None:
        """Write the buffer's bytes from `first` on into `out`."""
        if not out.size:
            return
        stop = first + out.size
        if self._uniform and first % self._stride == stop % self._stride == 0:
            shape, dtype = self._uniform
            part = self._arrays[first // self._stride : stop // self._stride]
            np.concatenate(part, out=out.view(dtype).reshape(-1, *shape[1:]))
            return
        if self._uniform:
            lo, hi, start = first // self._stride, -(-stop // self._stride), first // self._stride * self._stride
            pads = [0] * (hi - lo)
        else:
            lo = int(np.searchsorted(self._ends, first, side="right"))
            hi = int(np.searchsorted(self._starts, stop, side="left"))
            start, pads = int(self._starts[lo]), self._pads[lo:hi]
        zeros = np.zeros(max(pads), np.uint8)
        parts: list[npt.NDArray[np.uint8]] = []
        for array, pad in zip(self._arrays[lo:hi], pads, strict=True):
            parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            parts.append(zeros[:pad])
        skip = first - start
        while skip >= parts[0].size:
            skip -= parts.pop(0).size
        parts[0] = parts[0][skip:]
        excess = sum(part.size for part in parts) - out.size
        while excess >= parts[-1].size:
            excess -= parts.pop().size
        parts[-1] = parts[-1][: parts[-1].size - excess]
        np.concatenate(parts, out=out)
