"""What packs are compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def contents(path: Path) -> dict[str, Any]:
    """Bytes of a pack's files, and what its manifest says beside when it was made."""
    found: dict[str, Any] = {file.name: file.read_bytes() for file in (path / "segment-0").iterdir()}
    manifest = json.loads((path / "manifest.json").read_text())
    return found | {key: value for key, value in manifest.items() if key not in ("created", "checksum")}
