"""Timing, facts about the machine, and result files, shared by the benchmarks."""

from __future__ import annotations

import datetime as dt
import gc
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import seconds

from stager.bars.threads import thread_count
from stager.batches.devices import count_devices
from stager.version import __version__

RESULTS = Path(__file__).parent / "results"


def measure(
    function: Callable[[], Any], *, repeats: int = 5, warm_up: int = 1, after: Callable[[Any], None] | None = None
) -> dict[str, Any]:
    """Seconds that `function` takes: median, least, most and number of runs; `after` disposes of its result untimed."""
    seconds = []
    for run in range(warm_up + repeats):
        gc.collect()
        started = time.perf_counter()
        result = function()
        elapsed = time.perf_counter() - started
        if after:
            after(result)
        del result
        if run >= warm_up:
            seconds.append(elapsed)
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "n": repeats}


def row(name: str, timing: dict[str, Any], *, nbytes: int = 0, **facts: Any) -> dict[str, Any]:
    """One line of a result table."""
    rate = {"gbps": nbytes / timing["seconds"] / 1e9} if nbytes else {}
    return {"name": name, **timing, **rate, **facts}


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    facts: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "stager": __version__,
        "python": platform.python_version(),
        "cores": thread_count(),
        "processor": _processor(),
    }
    for package in ("numpy", "pyarrow", "pandas", "torch", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if count_devices():
        from cupy.cuda import runtime

        from stager.cuda.driver import describe

        facts["gpu"] = describe(0)
        facts["driver"] = _driver()
        facts["cuda_runtime"] = runtime.runtimeGetVersion()
    return facts


def save(name: str, tables: dict[str, list[dict[str, Any]]]) -> Path:
    """Write the tables of a run with the machine they were measured on; others in the file stay."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"commits": {}, "tables": {}}
    commits = before["commits"] | dict.fromkeys(tables, _commit())
    result = {"machine": machine(), "commits": commits, "tables": before["tables"] | tables}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print one table as it was measured."""
    print(f"\n{title}")
    width = max(len(r["name"]) for r in rows)
    for r in rows:
        rate = f"{r['gbps']:8.1f} GB/s" if "gbps" in r else " " * 13
        extra = "  ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in r.items()
            if key not in ("name", "seconds", "min", "max", "n", "gbps")
        )
        spread = f"({seconds(r['min'])} to {seconds(r['max'])}, n {r['n']})"
        print(f"{r['name']:<{width}}  {seconds(r['seconds']):>8} {spread:<30}{rate}  {extra}")


def _commit() -> str:
    command = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except OSError:
        from cupy.cuda import runtime

        return f"CUDA {runtime.driverGetVersion()}"
