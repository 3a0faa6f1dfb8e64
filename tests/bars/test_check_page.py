"""The page of `stager check`: drawn in a browser without a word on the console, at every width, light and dark; of a
size that does not grow with the bars; and text of strangers stays text."""

from __future__ import annotations

import html
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table
from browser import browse, framed

from stager.bars.check_charts import time_ticks
from stager.bars.check_page import render
from stager.bars.coverage import cover
from stager.bars.inspection import Inspection, check
from stager.bars.interval import Interval
from stager.bars.read import ReadOptions

HOSTILE = "<script>alert(1)</script>\"'&<b>" + "W" * 60
MEASURE = """<script>addEventListener("load", () => {
const width = innerWidth, over = e => !e.closest(".scroll") && e.getBoundingClientRect().right > width + 0.5;
const found = {
  width, page: document.documentElement.scrollWidth,
  over: [...document.querySelectorAll("main *")].filter(over).map(e => e.outerHTML.slice(0, 80)),
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  back: getComputedStyle(document.body).backgroundColor,
  scripts: document.scripts.length,
  loaded: performance.getEntriesByType("resource").length,
};
(parent === window ? document.body : parent.document.body).dataset.measured = JSON.stringify(found);
})</script></body>"""


def faulty(n_symbols: int = 9) -> Inspection:
    """Minute bars of three days, with gaps, jumps, and a symbol whose name is hostile."""
    rng = np.random.default_rng(5)
    day = [*range(390), *range(1440, 1440 + 390), *range(2880, 2880 + 390)]
    names = [HOSTILE, *(f"SYM{number}" for number in range(1, n_symbols))]
    steps = {name: [place for place in day if rng.random() > 0.01 * number] for number, name in enumerate(names)}
    closes = []
    for number, places in enumerate(steps.values()):
        close = 50 * np.exp(np.cumsum(rng.normal(0, 5e-4, len(places))))
        close[len(places) // 2 :] *= (0.5, 1.0, 100.0)[number % 3]
        closes.append(close)
    close = np.concatenate(closes)
    volume = np.ones(len(close))
    volume[40:80] = 0
    return check(bar_table(steps, open=close, high=close, low=close, close=close, volume=volume))


def measured(page: str, folder: Path, *arguments: str, width: int | None = None) -> dict[str, Any]:
    page = page.replace("</body>", MEASURE)
    dom = browse(page if width is None else framed(page, width), folder, *arguments, "--dump-dom")
    (found,) = re.findall(r'data-measured="([^"]*)"', dom)
    return json.loads(html.unescape(found))


@pytest.fixture(scope="module")
def page() -> str:
    return render(faulty(), "bars of <i>everything</i>.csv")


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_page_does_not_overflow(page: str, tmp_path: Path, width: int) -> None:
    found = measured(page, tmp_path, width=width)
    assert (found["width"], found["page"], found["over"]) == (width, width, [])


@pytest.mark.parametrize("arguments", [("--window-size=1180,1300",), ("--window-size=1920,1080", "--force-dark-mode")])
def test_a_wide_page_light_and_dark(page: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    found = measured(page, tmp_path, *arguments)
    assert (found["page"], found["over"]) == (found["width"], [])
    is_dark = "--force-dark-mode" in arguments
    assert found["dark"] == is_dark
    red = int(re.findall(r"\d+", found["back"])[0])
    assert (red < 64) == is_dark
    # The page has no script of its own, and asks for nothing.
    assert (found["scripts"], found["loaded"]) == (1, 0)


def test_everything_is_drawn(page: str, tmp_path: Path) -> None:
    dom = browse(page, tmp_path, "--dump-dom")
    assert re.findall(r"<h2>(.*?)</h2>", dom) == [
        "Findings", "Coverage", "Gaps", "Worst gaps", "Jumps", "Symbols", "How the files were read",
    ]  # fmt: skip
    assert dom.count('<svg class="chart"') == 4
    assert dom.count('<svg class="spark"') == dom.count('class="jump"') == 6
    assert dom.count('class="back"') == 9
    assert len(re.findall(r'class="(?:miss|shut)"', dom)) > 10


def test_text_of_strangers_stays_text(page: str, tmp_path: Path) -> None:
    """The name of a symbol and the title hold markup."""
    assert "<script>" not in page
    dom = browse(page, tmp_path, "--dump-dom")
    assert "<script" not in dom
    assert "<i>everything" not in dom
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in dom


def test_the_picture_is_no_blank(page: str, tmp_path: Path) -> None:
    sizes = []
    for name, arguments in (("light", ()), ("dark", ("--force-dark-mode",))):
        browse(page, tmp_path, *arguments, f"--screenshot={tmp_path / name}.png")
        image = (tmp_path / f"{name}.png").read_bytes()
        assert struct.unpack(">II", image[16:24]) == (1180, 1300)
        sizes.append(len(image))
    assert min(sizes) > 40_000  # a blank page has a tenth of that


def test_its_size_is_bounded(tmp_path: Path) -> None:
    """Three million bars of four thousand symbols, each with gaps and a jump."""
    n_symbols, n_bars = 4000, 750
    rng = np.random.default_rng(2)
    steps = np.sort(rng.permuted(np.tile(np.arange(1500), (n_symbols, 1)), axis=1)[:, :n_bars], axis=1)
    close = np.full((n_symbols, n_bars), 20.0) + rng.uniform(0, 0.1, (n_symbols, n_bars))
    close[:, 300:] *= 2
    names = pa.array([f"SYM{number:05d}" for number in range(n_symbols)])
    symbol = pa.DictionaryArray.from_arrays(np.repeat(np.arange(n_symbols, dtype=np.int32), n_bars), names)
    times = pa.array((START + steps * MINUTE).ravel(), pa.timestamp("ns", "UTC"))
    prices = {name: close.ravel() for name in ("open", "high", "low", "close")}
    found = check(pa.table({"symbol": symbol, "time": times, **prices}), ReadOptions(interval="1min"))
    page = render(found, "many.csv")
    assert len(page) < 1_000_000
    assert "3,940 more are not drawn" in page
    assert "of 4,000 jumps" in page
    assert "3,950 more are in --json" in page
    found_in = measured(page, tmp_path)
    assert found_in["page"] == found_in["width"]


def test_pages_of_little(tmp_path: Path) -> None:
    """One bar, no gap, no jump; and no bar at all."""
    one = render(check(bar_table({"A": [0]}), ReadOptions(interval="1min")), "one.csv")
    assert "<h2>Gaps</h2>" not in one
    assert measured(one, tmp_path)["over"] == []
    path = tmp_path / "none.csv"
    path.write_text("time,open,high,low,close\n")
    none = render(check(path, ReadOptions(symbol="A")), "none.csv")
    assert "<h2>Coverage</h2>" not in none
    assert "there is no bar in the input" in none


@pytest.mark.parametrize("unit", [1, 1000, 10**9, MINUTE, 60 * MINUTE, DAY, 7 * DAY])
@pytest.mark.parametrize("span", [1, 50, 399, 5000])
def test_coverage_counts_every_bar_once(unit: int, span: int) -> None:
    rng = np.random.default_rng(span)
    places = [np.unique(rng.integers(0, span + 1, 80)), np.array([0, span])]
    times = np.concatenate([START + one * unit for one in places])
    counts = np.array([len(one) for one in places])
    found = cover(times, np.cumsum(counts) - counts, counts, Interval.fixed(unit))
    assert found.counts.sum(axis=1).tolist() == counts.tolist()
    assert 1 <= found.counts.shape[1] <= 401
    assert found.edges[0] <= times.min()
    assert found.edges[-1] > times.max()
    assert (found.counts <= found.full).all()
    edges = np.array(found.edges)
    direct = np.histogram(times[: counts[0]] - START, edges - START)[0]
    assert found.counts[0].tolist() == direct.tolist()


@pytest.mark.parametrize(
    "span", [10 * 10**9, 3 * MINUTE, 300 * MINUTE, DAY, 20 * DAY, 200 * DAY, 3000 * DAY, 90000 * DAY]
)
def test_ticks_are_few_round_and_inside(span: int) -> None:
    ticks = time_ticks(START + 12_345_678_901, START + 12_345_678_901 + span)
    assert 1 <= len(ticks) <= 10
    assert all(START + 12_345_678_901 <= at <= START + 12_345_678_901 + span for at, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)
