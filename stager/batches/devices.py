"""Which device: "auto", "cpu", "cuda" or "cuda:1"; asks without importing CuPy and without making a context."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import warnings
from dataclasses import dataclass

from stager.errors import ConfigError, DeviceError

_NO_DEVICE = 100
_CUPYS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda14x")


@dataclass(frozen=True)
class Device:
    """A device that was chosen, and why. `index` is the CUDA ordinal, None for the CPU."""

    index: int | None
    reason: str

    def __str__(self) -> str:
        return "cpu" if self.index is None else f"cuda:{self.index}"


def choose_device(device: str) -> Device:
    """The device meant by `device`; "auto" takes ``cuda:0`` where it is usable, and warns of a GPU that is not.

    Raises
    ------
    ConfigError
        If the text names no device.
    DeviceError
        If a GPU was asked for and the driver, CuPy or the device is missing, each in its own words.
    """
    if device == "cpu":
        return Device(None, "asked for")
    if device == "auto":
        try:
            check_cuda(0)
        except DeviceError as error:
            if count_devices():
                warnings.warn(f"{error}. Going on with the CPU", UserWarning, stacklevel=3)
            return Device(None, str(error))
        return Device(0, "the first GPU")
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ConfigError(f"device is {device!r}; there are 'auto', 'cpu', 'cuda' and 'cuda:N'")
    index = int(match[1] or 0)
    check_cuda(index)
    return Device(index, "asked for")


def check_cuda(index: int) -> None:
    """Raise DeviceError unless driver, CuPy and the device are there."""
    n_devices, trouble = _ask_driver()
    if n_devices == 0:
        raise DeviceError(f"no GPU: {trouble}; use device='cpu'")
    cupys = [name for name in _CUPYS if _installed(name)]
    if len(cupys) > 1:
        raise DeviceError(f"two CuPys are installed, and they break each other: {', '.join(cupys)}; uninstall one")
    if importlib.util.find_spec("cupy") is None:
        raise DeviceError("there is a GPU but no CuPy: pip install 'stager[cuda12]' (or [cuda13] for CUDA 13)")
    if index >= n_devices:
        raise DeviceError(f"there is no device cuda:{index}; the driver shows {n_devices}")


def count_devices() -> int:
    """GPUs that the driver shows; 0 without a driver. Makes no context."""
    return _ask_driver()[0]


def _installed(name: str) -> bool:
    # By name: to list all distributions takes a tenth of a second where many are installed.
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _ask_driver() -> tuple[int, str]:
    """Number of GPUs, and why there is none."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "the NVIDIA driver (libcuda.so.1) is missing"
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status not in (0, _NO_DEVICE):
        return 0, f"the NVIDIA driver does not start (CUDA error {status}; see nvidia-smi)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return count.value, f"the NVIDIA driver shows no device{hidden}"
