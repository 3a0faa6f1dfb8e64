"""The kernels of the gather, and the structs that they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from stager.errors import DeviceError

# Mirror structs of gather.cu and serve.cu.
COLUMN = np.dtype(
    [("source", "<i4"), ("method", "<i4"), ("close", "<i4"), ("padding", "<i4"), ("mean", "<f8"), ("deviation", "<f8")]
)
CURSOR = np.dtype([("epoch", "<i8"), ("batch", "<i8"), ("n_done", "<u4"), ("padding", "<u4")])
SAMPLES = np.dtype(
    [
        (name, "<i8")
        for name in (
            "span_ids", "span_rows", "n_spans", "bases", "base_rows", "row_nbytes", "reach", "target", "n_targets",
        )
    ]
)  # fmt: skip
NEXT = np.dtype(
    [
        *(
            (name, "<i8")
            for name in (
                "cursor", "orders", "n_orders", "n_batches", "stride", "offset", "count", "nothing", "y", "valid",
            )
        ),
        ("samples", SAMPLES),
    ]
)  # fmt: skip
WINDOWS = np.dtype([("count", "<i8"), ("window", "<i4"), ("row_floats", "<i4"), ("n_columns", "<i4"), ("step", "<i4")])

_kernels: dict[int, dict[str, Any]] = {}


def kernel_source() -> str:
    """The text that NVRTC compiles."""
    here = Path(__file__)
    return "\n".join(here.with_name(name).read_text(encoding="utf-8") for name in ("order.cu", "gather.cu", "serve.cu"))


def compiled(device: int) -> dict[str, Any]:
    """The compiled kernels of a device; compiled once, while staging, so that no batch waits for NVRTC.

    Raises
    ------
    DeviceError
        If NVRTC is missing or refuses the source.
    """
    if device not in _kernels:
        source = kernel_source()
        copies = [f"{act}_windows_{kind}" for act in ("copy", "next") for kind in ("16", "8", "4", "shifted")]
        kinds = ["", *(f"{wide}_{kind}" for wide in (4, 8) for kind in ("", "whole_", "scaled_", "whole_scaled_"))]
        serves = [f"serve_{kind}{dtype}" for kind in kinds for dtype in ("float32", "float16", "bfloat16")]
        names = ("resolve", "resolve_next", *copies, *serves, "window_stats", "scatter_rows")
        with cupy.cuda.Device(device):
            try:
                module = cupy.RawModule(code=source, options=("--std=c++17",))
                _kernels[device] = {name: module.get_function(name) for name in names}
            except (ImportError, OSError, RuntimeError) as error:
                if "nvrtc" not in str(error).lower():
                    raise
                raise DeviceError(
                    f"NVRTC, CUDA's run-time compiler, can't be loaded: {error}. It comes with the extra: "
                    f"pip install 'stager[cuda12]' (or [cuda13])"
                ) from error
    return _kernels[device]


def packed(parameters: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """A struct without its fields: CuPy takes ten times as long to pass an array that has some."""
    return parameters.view(np.dtype((np.void, parameters.itemsize)))
