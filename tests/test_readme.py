"""The README's tables are those of the result files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_tables_are_generated_from_the_results() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_first_install_line_names_the_extra() -> None:
    assert "pip install 'stager[cuda12]'" in (ROOT / "README.md").read_text(encoding="utf-8")
