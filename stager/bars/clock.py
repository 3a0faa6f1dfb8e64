"""Times in words, for people: everywhere the same, and no longer than the time needs."""

from __future__ import annotations

import numpy as np


def time_text(nanoseconds: int) -> str:
    """A time without a zone, such as ``2024-01-31 15:30:00``; with parts of seconds where it has any."""
    text = str(np.datetime64(nanoseconds, "ns")).replace("T", " ")
    return text.rstrip("0").removesuffix(".")


def instant_text(nanoseconds: int) -> str:
    """An instant in UTC, such as ``2024-01-31 15:30Z``; with seconds where it has any."""
    return f"{time_text(nanoseconds).removesuffix(':00')}Z"
