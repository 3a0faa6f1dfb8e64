"""Pages in headless Chromium.

Without Chromium such tests are skipped; ``STAGER_REQUIRE_BROWSER=1`` makes that a failure.
"""

from __future__ import annotations

import html
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def browse(page: str, folder: Path, *arguments: str) -> str:
    """Open a page, check that nothing was said on its console, and return what ``--dump-dom`` prints."""
    if CHROMIUM is None:
        if os.environ.get("STAGER_REQUIRE_BROWSER") == "1":
            pytest.fail("STAGER_REQUIRE_BROWSER is set, and there is no Chromium")
        pytest.skip("no Chromium")
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1180,1300", *arguments, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def framed(page: str, width: int, height: int = 1300) -> str:
    """A page that shows another one at a width below that of any window."""
    return (
        f'<!doctype html><body style="margin:0"><iframe style="border:0;width:{width}px;height:{height}px" '
        f'srcdoc="{html.escape(page)}"></iframe></body>'
    )
