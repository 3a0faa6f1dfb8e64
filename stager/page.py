"""The style that pages share, light and dark: inline, so that a page is one file and asks for nothing."""

from __future__ import annotations

import html

STYLE = """
:root { color-scheme: light dark; --page: #fbfcfd; --card: #fff; --ink: #1d242c; --mute: #5a6673; --line: #dfe4ea;
  --grid: #e7ebf0; --frame: #b7c0ca; --band: #eef1f5; --blue: #2f6fb2; --red: #cf4a2c; --green: #4c855c;
  --amber: #a86f08 }
@media (prefers-color-scheme: dark) { :root { --page: #13171c; --card: #1a2027; --ink: #e4e9ef; --mute: #9ba8b6;
  --line: #303944; --grid: #262f38; --frame: #4a5664; --band: #222a33; --blue: #62a0e0; --red: #ef7b60;
  --green: #7cbb8d; --amber: #e0b052 } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, "Segoe UI", sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 30px 0 8px }
.sub { margin: 4px 0 18px; color: var(--mute); overflow-wrap: anywhere }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px }
.cards span, .cards small { display: block; color: var(--mute); font-size: 13px }
.cards b { font-size: 21px; font-weight: 600 }
.legend { margin: 0 0 6px; color: var(--mute); font-size: 13px }
.legend i { display: inline-block; width: 12px; height: 12px; margin: 0 6px 0 18px; vertical-align: -1px;
  border-radius: 2px }
.legend i:first-child { margin-left: 0 }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px }
svg.chart { display: block; width: 100%; min-width: 680px; height: auto }
svg text { font-size: 12px; fill: var(--mute) }
svg text.axis { font-size: 13px; fill: var(--ink) }
.grid { stroke: var(--grid) }
.frame { fill: none; stroke: var(--frame) }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th, td { padding: 6px 12px; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums }
tbody tr:last-child td { border-bottom: 0 }
th { color: var(--mute); font-weight: 500 }
td.text, th.text { text-align: left }
"""


def document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """One HTML page.

    Parameters
    ----------
    title : str
        Plain text.
    body : str
        HTML.
    style, script : str
        What the page has besides ``STYLE``.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style></head>\n<body><main>\n{body}\n</main>"
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


def nice_step(span: float, most: int = 8) -> float:
    """A distance of ticks of 1, 2 or 5 times a power of ten, at least a millionth, of which ``most`` fit."""
    step = 10.0**-6
    while True:
        for factor in (1, 2, 5):
            if span / (step * factor) <= most:
                return step * factor
        step *= 10
