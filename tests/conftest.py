"""What all tests share: the option --require-gpu, the marker gpu, how examples are drawn, and CuPy's allocator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import settings

# The same code is tried on the same examples: a run is green or red because of the code. `make fuzz` draws others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("fuzz", print_blob=True)
settings.load_profile(os.environ.get("STAGER_EXAMPLES", "fixed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail the tests marked gpu instead of skipping them without a GPU"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or (reason := missing_gpu()) is None:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"--require-gpu: {reason}", pytrace=False)
    pytest.skip(reason)


@cache
def missing_gpu() -> str | None:
    """Why there is no usable GPU; None where there is one."""
    from stager.batches.devices import check_cuda
    from stager.errors import DeviceError

    try:
        check_cuda(0)
        import cupy

        cupy.cuda.runtime.memGetInfo()
    except (DeviceError, ImportError, RuntimeError) as error:
        return f"no usable GPU: {error}"
    return None


@pytest.fixture(autouse=True)
def _allocator_stays() -> Iterator[None]:
    """No test leaves CuPy with another allocator than it found."""
    before = _allocator()
    yield
    after = _allocator()
    assert before is None or after == before, f"the test left CuPy's allocator as {after}, it was {before}"


def _allocator() -> object:
    cupy = sys.modules.get("cupy")
    # During a first import the module is there before its allocator is.
    return cupy.cuda.get_allocator() if hasattr(cupy, "cuda") else None
