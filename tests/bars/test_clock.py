"""Times in words."""

from __future__ import annotations

import numpy as np
import pytest

from stager.bars.clock import instant_text, time_text


@pytest.mark.parametrize(
    ("time", "text", "instant"),
    [
        ("2024-01-31T15:30", "2024-01-31 15:30:00", "2024-01-31 15:30Z"),
        ("2024-01-31", "2024-01-31 00:00:00", "2024-01-31 00:00Z"),
        ("2024-01-31T15:30:07", "2024-01-31 15:30:07", "2024-01-31 15:30:07Z"),
        ("2024-01-31T15:30:10", "2024-01-31 15:30:10", "2024-01-31 15:30:10Z"),
        ("2024-01-31T15:00:00.25", "2024-01-31 15:00:00.25", "2024-01-31 15:00:00.25Z"),
        ("1969-12-31T23:59:59.999999999", "1969-12-31 23:59:59.999999999", "1969-12-31 23:59:59.999999999Z"),
    ],
)
def test_a_time_is_told_as_shortly_as_it_can_be(time: str, text: str, instant: str) -> None:
    nanoseconds = int(np.datetime64(time, "ns").astype(np.int64))
    assert time_text(nanoseconds) == text
    assert instant_text(nanoseconds) == instant
    assert np.datetime64(instant.removesuffix("Z"), "ns").astype(np.int64) == nanoseconds
