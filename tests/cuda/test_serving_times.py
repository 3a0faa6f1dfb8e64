"""What was served, and times by events that are done sooner or later."""

from __future__ import annotations

import pytest

from stager.cuda import serving_times
from stager.cuda.serving_times import GroupEvents, ServingTimes


class Event:
    def __init__(self):
        self.done, self.at = False, 0.0

    def happen(self, at):
        self.done, self.at = True, at


@pytest.fixture(autouse=True)
def events(monkeypatch):
    monkeypatch.setattr(serving_times.cupy.cuda, "Event", Event)
    monkeypatch.setattr(serving_times.cupy.cuda, "get_elapsed_time", lambda first, last: last.at - first.at)


def group(at=None):
    made = GroupEvents()
    made.asked, made.got = Event(), Event()
    if at is not None:
        finish(made, at)
    return made


def finish(made, at):
    for event, later in ((made.queued, 0), (made.begun, 2), (made.ready, 5), (made.asked, 1), (made.got, 5)):
        event.happen(at + later)


def test_times_are_told_once_their_events_are_done():
    times, late = ServingTimes(), group()
    times.add(3, 30, 1000, 0, group(10.0))
    times.add(2, 20, 500, 2, late)
    times.look()
    assert (times.n_batches, times.n_samples, times.nbytes, times.n_copied) == (5, 50, 1500, 2)
    assert times.timed_nbytes == 1000
    assert times.gather_waited_seconds == pytest.approx(0.002)
    assert times.gather_seconds == pytest.approx(0.003)
    assert times.consumer_waited_seconds == pytest.approx(0.004)
    finish(late, 20.0)
    times.look()
    assert times.timed_nbytes == 1500
    assert times.gather_seconds == pytest.approx(0.006)


def test_a_consumer_without_a_stream_waits_on_the_host():
    times, made = ServingTimes(), GroupEvents()
    for event, at in ((made.queued, 0), (made.begun, 1), (made.ready, 4)):
        event.happen(at)
    assert not made.is_handed
    made.waited_seconds = 0.5
    assert made.is_handed
    times.add(1, 1, 10, 0, made)
    times.look()
    assert times.consumer_waited_seconds == pytest.approx(0.5)
    assert times.gather_seconds == pytest.approx(0.003)
    assert times.timed_nbytes == 10


def test_groups_that_were_never_handed_out_are_not_timed():
    times = ServingTimes()
    times.add(0, 0, 0, 0, GroupEvents())
    assert times.look().timed_nbytes == 0


def test_only_so_many_groups_are_waited_for():
    times = ServingTimes()
    for _ in range(1000):
        times.add(1, 1, 1, 0, group())
    times.add(1, 1, 1, 0, group(1.0))
    assert len(times._pending) <= 64
    assert times.n_batches == 1001
