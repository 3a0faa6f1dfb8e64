"""Fixtures of the service's tests."""

from __future__ import annotations

from service_fixtures import pack_path, processes, run_dir, service

__all__ = ["pack_path", "processes", "run_dir", "service"]
