"""How batches are handed out: as arrays of CuPy, torch, JAX or NumPy, in the order of the consumer's stream."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import cupy
import numpy as np

from stager.cuda.fields import Field
from stager.errors import ConfigError, SampleError

Framework = Literal["torch", "jax", "numpy"]


class WholeDevice:
    """In the place of a stream: consumers whose stream is not known."""

    ptr = 0


class Export(Protocol):
    """Makes the arrays of one framework."""

    def stream(self) -> Any:
        """The stream that will use what is handed out now."""
        ...

    def split(self, pointer: Any, field: Field, sizes: Sequence[int]) -> tuple[Iterator[Any], int]:
        """The batches of a field that begins at a pointer, without a copy, and how many references they take."""
        ...

    def copy(self, array: Any) -> Any:
        """The same in memory of its own."""
        ...


def export_to(framework: Framework | None, device: int, gather_stream: Any) -> Export:
    """The export for arrays of a framework; None is CuPy.

    Raises
    ------
    ConfigError
        If the framework can't be imported, or sees no GPU.
    """
    if framework is None:
        return CupyExport(device)
    if framework == "torch":
        return TorchExport(device)
    if framework == "jax":
        return JaxExport(device, gather_stream)
    return NumpyExport(device)


class _Pointer:
    """A stream of another library by its pointer, for CUDA's protocol of streams."""

    def __init__(self, pointer: int, owner: Any = None) -> None:
        self._pointer, self._owner = pointer, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


class CupyExport:
    """CuPy arrays, made by one constructor each: half the time of a slice."""

    def __init__(self, device: int) -> None:
        self._device = device
        # Not the user's arena: copies are of batches that are kept.
        self._pool = cupy.cuda.MemoryPool()

    def stream(self) -> Any:
        return cupy.cuda.get_current_stream(self._device)

    def split(self, pointer: Any, field: Field, sizes: Sequence[int]) -> tuple[Iterator[Any], int]:
        return _split(pointer, field, sizes), len(sizes)

    def copy(self, array: Any) -> Any:
        with cupy.cuda.using_allocator(self._pool.malloc):
            return array.copy()


class NumpyExport(CupyExport):
    """NumPy arrays, each copied to the host when it is asked for."""

    def split(self, pointer: Any, field: Field, sizes: Sequence[int]) -> tuple[Iterator[Any], int]:
        return (array.get() for array in _split(pointer, field, sizes)), 0

    def copy(self, array: Any) -> Any:
        return array


class TorchExport:
    """torch tensors, made together; none is a view of another in the sense of autograd, so each may be written to."""

    def __init__(self, device: int) -> None:
        self._torch = import_framework("torch")
        self._device = device
        if not self._torch.cuda.is_available():
            raise ConfigError(
                f"to='torch': torch {self._torch.__version__} sees no GPU, and the batches lie on cuda:{device}; "
                f"install a torch for CUDA, or use device='cpu'"
            )
        self._last: tuple[int, Any] = -1, None
        # What torch's compiler uses: a tenth of the time of making a Stream object for each batch.
        self._raw = getattr(self._torch._C, "_cuda_getCurrentRawStream", None)

    def stream(self) -> Any:
        if self._raw is not None:
            pointer = self._raw(self._device)
        else:
            pointer = self._torch.cuda.current_stream(self._device).cuda_stream
        if pointer != self._last[0]:
            self._last = pointer, cupy.cuda.Stream.from_external(_Pointer(pointer))
        return self._last[1]

    def split(self, pointer: Any, field: Field, sizes: Sequence[int]) -> tuple[Iterator[Any], int]:
        stored = {"bfloat16": "int16", "bool": "uint8"}.get(field.dtype)
        lying = field if stored is None else Field(field.shape, stored)
        # -1: groups are handed to streams by events of their own.
        whole = self._torch.from_dlpack(_array(pointer, lying, sum(sizes)).__dlpack__(stream=-1))
        if stored is not None:
            whole = whole.view(getattr(self._torch, field.dtype))
        return iter(self._torch.unsafe_split_with_sizes(whole, list(sizes))), 0

    def copy(self, array: Any) -> Any:
        return array.clone()


class JaxExport:
    """JAX arrays. Which stream JAX uses is not known: it waits for the gather, the gather for the whole device."""

    def __init__(self, device: int, gather_stream: Any) -> None:
        self._jax, self._numpy = import_framework("jax"), import_framework("jax.numpy")
        self._gather_stream = gather_stream
        self._whole = WholeDevice()

    def stream(self) -> Any:
        return self._whole

    def split(self, pointer: Any, field: Field, sizes: Sequence[int]) -> tuple[Iterator[Any], int]:
        return self._made(pointer, field, sizes), 0

    def _made(self, pointer: Any, field: Field, sizes: Sequence[int]) -> Iterator[Any]:
        for array in _split(pointer, field, sizes):
            # JAX has its stream wait for the one that is current.
            with self._gather_stream:
                made = self._jax.dlpack.from_dlpack(array)
            yield made

    def copy(self, array: Any) -> Any:
        return self._numpy.array(array, copy=True)


def as_stream(stream: Any, device: int) -> Any:
    """A stream of CuPy, torch, or of whatever has ``__cuda_stream__``, as CuPy's, which holds it.

    Raises
    ------
    SampleError
    """
    if isinstance(stream, cupy.cuda.Stream):
        return stream
    with cupy.cuda.Device(device):
        if hasattr(stream, "__cuda_stream__"):
            return cupy.cuda.Stream.from_external(stream)
        if hasattr(stream, "cuda_stream"):
            return cupy.cuda.Stream.from_external(_Pointer(stream.cuda_stream, stream))
    raise SampleError(f"stream is {stream!r}; give a CUDA stream of CuPy or torch, or a list of them")


def import_framework(name: str) -> Any:
    """A framework, imported only when it is asked for.

    Raises
    ------
    ConfigError
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"to={package!r} needs {package} ({error}): pip install {package}") from error


def _split(pointer: Any, field: Field, sizes: Sequence[int]) -> Iterator[Any]:
    dtype, nbytes, shape, offset = _dtype(field), field.nbytes, field.shape, 0
    ndarray = cupy.ndarray
    for size in sizes:
        yield ndarray((size, *shape), dtype, pointer + offset)
        offset += size * nbytes


def _array(pointer: Any, field: Field, count: int) -> Any:
    # A pointer of its own: the slot counts the references to its memory.
    return cupy.ndarray((count, *field.shape), _dtype(field), pointer + 0)


def _dtype(field: Field) -> np.dtype[Any]:
    if field.dtype != "bfloat16":
        return np.dtype(field.dtype)
    found: np.dtype[Any] = np.dtype(import_framework("ml_dtypes").bfloat16)
    return found
