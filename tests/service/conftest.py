"""Fixtures of the service's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_fixtures import pack_path, processes, run_dir, service

__all__ = ["pack_path", "processes", "run_dir", "service"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make test` leaves these to `make check`: they mostly wait for processes to start and die."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.service)
