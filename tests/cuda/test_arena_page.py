"""The timeline's page in a browser: no error, no request, charts drawn, the pointer answered."""

import re
import struct

from browser import browse

from stager.cuda.arena_page import render
from stager.cuda.timeline import End, Header, OverflowEvent, SiteRow, StepSpan, Stretch, Timeline

MIB = 1 << 20

HOVER = """<script>
const chart = document.querySelector("svg.chart"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + box.width / 2, clientY: box.top + 50}));
</script></body>"""


def timeline():
    stretches = [
        Stretch(t / 1000, t * 30_000, t * 31_000 + (t % 7) * 200_000, max(0, t - 1500) * 20_000, t * 40)
        for t in range(1, 2001)
    ]
    return Timeline(
        Header(1, 64 * MIB, "2025-03-01T10:00:00+00:00", 0),
        stretches,
        [StepSpan(number, number / 20, (number + 0.8) / 20) for number in range(40)],
        [OverflowEvent(1.5 + number / 1000, MIB, "train.py:41") for number in range(300)],
        [SiteRow("train.py:41", 20_000, 3 << 30, MIB, 40 * MIB), SiteRow("<b>.py:7", 60_000, 1 << 30, 0, 9 * MIB)],
        End(2.0, 40, 300, 0, {"merges": 3, "misses": 812}),
    )


def test_the_page_answers_the_pointer(tmp_path):
    page = render(timeline(), "a run").replace("</body>", HOVER)
    dom = browse(page, tmp_path, "--dump-dom")
    tip = re.search(r'<div id="tip"[^>]*>(.*?)</div>', dom, re.S)[1]
    assert re.match(r"9\d\d\.\d{3} ms\nslab, most +2\d\.\d\d MiB\n", tip)
    assert re.search(r"allocations +3\d,\d{3} \(\+120\)", tip)
    assert dom.count("<path ") == 3
    assert "&lt;b&gt;.py:7" in dom


def test_the_page_is_drawn(tmp_path):
    browse(render(timeline(), "a run"), tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    image = (tmp_path / "page.png").read_bytes()
    assert struct.unpack(">II", image[16:24]) == (1180, 1300)
    assert len(image) > 40_000  # a blank page has a tenth of that
