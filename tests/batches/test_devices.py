"""Which device is chosen, and why none is: each situation in its own words."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util

import numpy as np
import pytest

import stager
from stager.batches import devices
from stager.batches.devices import choose_device, count_devices
from stager.errors import ConfigError, DeviceError


class FakeDriver:
    """Stands in for libcuda."""

    def __init__(self, n_devices=1, status=0):
        self.n_devices, self.status = n_devices, status

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = self.n_devices
        return 0


@pytest.fixture
def machine(monkeypatch):
    """Set up a machine: the driver, CuPys and whether cupy can be imported."""

    def set_up(driver=None, cupys=("cupy-cuda12x",), importable=True):
        def load(name):
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return driver

        def version(name):
            if name not in cupys:
                raise importlib.metadata.PackageNotFoundError(name)
            return "14.0.0"

        monkeypatch.setattr(devices.ctypes, "CDLL", load)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if importable else None)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return set_up


SITUATIONS = {
    "no driver": ({"driver": None}, r"driver \(libcuda.so.1\) is missing"),
    "no device": ({"driver": FakeDriver(0)}, "shows no device"),
    "no device, told by cuInit": ({"driver": FakeDriver(0, 100)}, "shows no device"),
    "broken driver": ({"driver": FakeDriver(1, 803)}, r"does not start \(CUDA error 803"),
    "no CuPy": ({"driver": FakeDriver(), "cupys": (), "importable": False}, r"no CuPy: pip install 'stager\[cuda12\]'"),
    "two CuPys": (
        {"driver": FakeDriver(), "cupys": ("cupy-cuda12x", "cupy-cuda13x")},
        "two CuPys .*12x, cupy-cuda13x",
    ),
    "a CuPy and the plain one": ({"driver": FakeDriver(), "cupys": ("cupy", "cupy-cuda12x")}, "two CuPys"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_situation_has_its_own_error(machine, situation):
    setup, text = SITUATIONS[situation]
    machine(**{"driver": None, **setup})
    with pytest.raises(DeviceError, match=text):
        choose_device("cuda")
    # A machine that shows a GPU goes on without it only with a warning.
    with pytest.warns(UserWarning, match=text) if count_devices() else contextlib.nullcontext():
        chosen = choose_device("auto")
    assert chosen.index is None
    assert str(chosen) == "cpu"
    with pytest.raises(DeviceError) as caught:
        choose_device("cuda:0")
    assert chosen.reason == str(caught.value)


def test_hidden_devices_are_told(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine(driver=FakeDriver(0, 100))
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is ''"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("text", "name"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:2", "cuda:2"), ("cpu", "cpu")]
)
def test_a_usable_machine(machine, text, name):
    machine(driver=FakeDriver(3))
    assert str(choose_device(text)) == name
    assert count_devices() == 3


def test_an_ordinal_out_of_range_is_told(machine):
    machine(driver=FakeDriver(2))
    with pytest.raises(DeviceError, match=r"no device cuda:2; the driver shows 2"):
        choose_device("cuda:2")


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:0 ", "cuda0", "auto:1"])
def test_nonsense_is_refused(machine, text):
    machine(driver=FakeDriver(2))
    with pytest.raises(ConfigError, match=r"'auto', 'cpu', 'cuda' and 'cuda:N'"):
        choose_device(text)


def test_auto_serves_on_the_cpu_and_says_why(machine):
    machine(driver=None)
    with stager.stage_arrays([np.ones(3)], device="auto") as views:
        assert views.device == "cpu"


def test_asking_leaves_ctypes_alone():
    assert ctypes.CDLL is not None
    assert count_devices() >= 0
