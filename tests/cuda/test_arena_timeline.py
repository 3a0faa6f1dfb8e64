"""Recording, reading back, and the page."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

cupy = pytest.importorskip("cupy")
sys.path.append(str(Path(__file__).parent))

from arena_fakes import fake_cuda  # noqa: E402

from stager.cli.arena_report import arena_report  # noqa: E402
from stager.cuda.arena import Arena  # noqa: E402
from stager.cuda.arena_page import render  # noqa: E402
from stager.cuda.timeline import TimelineError, read_timeline  # noqa: E402
from stager.errors import ArenaError  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "train.jsonl"
    with fake_cuda(), Arena("1MiB") as arena:
        before = cupy.empty(1000, np.uint8)
        with arena.record(path) as recorder:
            recorder._stretch = 0  # a line for every allocation
            kept = []
            for _ in range(20):
                with arena.step():
                    kept.append(cupy.empty(30_000, np.uint8))
                    cupy.empty(200_000, np.uint8)
            cupy.empty(3 * MIB, np.uint8)
            del kept
        assert arena.stats().allocations == 42
        del before
    return path


def test_a_recording_read_back(recording):
    timeline = read_timeline(recording)
    assert timeline.header.capacity_nbytes == MIB
    assert timeline.header.used == 1024
    assert [step.number for step in timeline.steps] == list(range(1, 21))
    assert all(step.begin <= step.end for step in timeline.steps)
    assert [event.nbytes for event in timeline.overflows] == [3 * MIB]
    peak = 1024 + 20 * 30_208 + 200_192
    assert max(stretch.most for stretch in timeline.stretches) == peak
    assert timeline.stretches[-1].used == 1024
    assert timeline.stretches[-1].allocations == 41
    large, small = timeline.sites
    assert "test_arena_timeline.py" in large.site
    assert (large.allocations, large.most_nbytes, small.nbytes) == (20, 20 * 30_208, 20 * 200_192)
    assert (timeline.end.steps, timeline.end.overflows, timeline.end.missed) == (20, 1, 0)


def test_recording_ends_and_the_fast_path_returns(recording, tmp_path):
    with fake_cuda(), Arena("1MiB") as arena:
        with arena.record(tmp_path / "a.jsonl"):
            with pytest.raises(ArenaError, match="already"), arena.record(tmp_path / "b.jsonl"):
                pass
            cupy.empty(1000, np.uint8)
        cupy.empty(1000, np.uint8)
        assert arena.stats().hits == 1
        assert arena._pool.gate.stream is arena._pool.stream
        assert not (tmp_path / "b.jsonl").exists()


def test_a_long_recording_stays_small(tmp_path):
    path = tmp_path / "long.jsonl"
    with fake_cuda(), Arena("1MiB") as arena, arena.record(path) as recorder:
        recorder._stretch = 1
        for _ in range(30_000):
            cupy.cuda.alloc(100)
    assert path.stat().st_size < 3 * MIB


class Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        assert not any(value and re.match(r"(https?:)?//", value) for _, value in attributes)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)


def test_the_page_is_complete_and_needs_no_network(recording):
    page = render(read_timeline(recording), "train <1>")
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert checker.seen.count("svg") == 2
    assert "train &lt;1&gt;" in page
    for word in ("time since the start [", ">bytes<", "allocations / s", "capacity", "Largest call sites", "3.00 MiB"):
        assert word in page
    assert not re.search(r"src=|href=|url\(|import ", page)
    data = json.loads(re.search(r"const D = (\[.*?\]\])", page)[1])
    assert max(row[1] for row in data) == 1024 + 20 * 30_208 + 200_192


def test_the_command(recording, tmp_path):
    done = CliRunner().invoke(arena_report, [str(recording)])
    assert done.exit_code == 0
    page = recording.with_suffix(".html")
    assert done.output.strip() == str(page)
    assert page.read_text().startswith("<!doctype html>")
    done = CliRunner().invoke(arena_report, [str(recording), "-o", str(tmp_path / "x.html")])
    assert (tmp_path / "x.html").exists()
    assert CliRunner().invoke(arena_report, [str(recording), "-o", str(recording)]).exit_code == 2
    assert read_timeline(recording).header.version == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("symbol,time,close\n", ":1: no timeline"),
        ('{"kind":"bytes","t":0,"used":0,"most":0,"overflow":0,"allocations":0}\n', ":1: .*first line"),
        ('{"kind":"arena","version":9,"capacity_nbytes":1,"began":"","used":0}\n', "newer"),
        ('{"kind":"arena","version":1,"capacity_nbytes":1,"began":"","used":0}\nrubbish\n', ":2: no timeline"),
    ],
)
def test_other_files_are_refused(tmp_path, text, reason):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(TimelineError, match=reason):
        read_timeline(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(TimelineError, match="No such file"):
        read_timeline(tmp_path / "none")


def test_a_recording_cut_short_is_drawn_as_far_as_it_goes(recording):
    whole = recording.read_bytes()
    recording.write_bytes(whole[: len(whole) // 2])
    timeline = read_timeline(recording)
    assert timeline.end is None
    assert "cut short" in render(timeline, "x")


def test_an_empty_recording_is_drawn(tmp_path):
    with fake_cuda(), Arena("1MiB") as arena, arena.record(tmp_path / "empty.jsonl"):
        pass
    assert "<svg" in render(read_timeline(tmp_path / "empty.jsonl"), "x")
