"""What importing stager does, and does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stager

ROOT = Path(__file__).parents[1]


def run(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_brings_nothing_heavy_and_configures_nothing():
    code = """
import logging, sys, warnings
import numpy, pyarrow, pyarrow.compute, pyarrow.fs, pyarrow.parquet
pyarrow.array([""])  # imports pandas where it is installed, which sets filters
before = (list(logging.root.handlers), logging.root.level, list(warnings.filters))
import stager
import stager.batches.stager, stager.cuda.upload, stager.config
for name in ("cupy", "cupy_backends", "click", "torch", "jax"):
    assert name not in sys.modules, name
assert (list(logging.root.handlers), logging.root.level, list(warnings.filters)) == before
for name, logger in logging.root.manager.loggerDict.items():
    if name.startswith("stager"):
        assert not getattr(logger, "handlers", []) and getattr(logger, "level", 0) == 0, name
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
assert "libcuda" not in maps
"""
    assert run(code) == ""


def test_importing_warns_of_nothing():
    assert run("import stager", "-W", "error") == ""


def test_serving_on_the_cpu_imports_no_cupy():
    code = """
import sys
import numpy as np
import stager
with stager.stage_arrays([np.ones(3)], device="cpu") as views:
    assert views[0].sum() == 3
assert "cupy" not in sys.modules
"""
    run(code)


def test_importing_cupy_parts_changes_no_allocator():
    pytest.importorskip("cupy")
    code = """
import cupy
before = cupy.cuda.get_allocator()
import stager, stager.cuda.staging, stager.cuda.gather, stager.cuda.driver
stager.Arena
assert cupy.cuda.get_allocator() == before
"""
    run(code)


def test_public_names_are_sorted_and_there():
    assert stager.__all__ == sorted(stager.__all__)
    for name in stager.__all__:
        if name != "Arena":
            assert getattr(stager, name).__doc__, name


def test_the_arena_comes_when_asked_for():
    pytest.importorskip("cupy")
    assert stager.Arena.__name__ == "Arena"


def test_where_cupy_is_missing_only_the_arena_is():
    code = """
import sys
sys.modules["cupy"] = None
import stager
for name in stager.__all__:
    if name == "Arena":
        try:
            stager.Arena
        except ImportError as error:
            print(type(error).__name__)
    else:
        getattr(stager, name)
"""
    assert run(code).strip() in ("ImportError", "ModuleNotFoundError", "DeviceError")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Stagger'"):
        _ = stager.Stagger


def test_the_version_is_the_projects():
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in configuration["project"]["dynamic"]
    module, name = configuration["tool"]["setuptools"]["dynamic"]["version"]["attr"].rsplit(".", 1)
    version = getattr(importlib.import_module(module), name)
    assert importlib.metadata.version("stager") == version


def test_types_are_shipped():
    assert (Path(stager.__file__).parent / "py.typed").is_file()
