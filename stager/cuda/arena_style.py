"""What the page of :mod:`stager.cuda.arena_page` has besides the style of all pages: its own marks, and its script."""

SLAB, OUTSIDE, RATE = "var(--blue)", "var(--red)", "var(--green)"

STYLE = """
.legend .dash { height: 0; width: 18px; border-top: 2px dashed var(--mute); border-radius: 0; vertical-align: 4px }
.legend .band { background: var(--band); border: 1px solid var(--line) }
.limit { stroke: var(--mute); stroke-width: 1.5; stroke-dasharray: 7 5 }
.over { stroke: var(--red); stroke-width: 1.2 }
.cross { stroke: var(--ink) }
.step0 { fill: var(--band) }
.step1 { fill: var(--band); fill-opacity: .4 }
.site { text-align: left; font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px }
.bar { width: 180px }
.bar i { display: block; height: 10px; border-radius: 3px; background: var(--blue); opacity: .7 }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--page); font-size: 13px;
  padding: 7px 10px; border-radius: 6px; white-space: pre; font-family: ui-monospace, Menlo, Consolas, monospace }
"""

SCRIPT = """
const D = %(data)s, S = %(seconds)r, L = %(left)d, W = %(width)d, tip = document.getElementById("tip");
const bytes = n => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < 4) { n /= 1024; i++ }
  return n.toFixed(i ? 2 : 0) + " " + units[i];
};
for (const svg of document.querySelectorAll("svg.chart")) {
  const cross = svg.querySelector(".cross");
  svg.addEventListener("mousemove", event => {
    if (!D.length) return;
    const box = svg.getBoundingClientRect();
    const t = ((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width - L) / W * S;
    let low = 0, high = D.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (D[middle][0] < t) low = middle + 1; else high = middle }
    const d = D[low], before = low ? D[low - 1][4] : 0, x = L + d[0] / S * W;
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.style.display = "inline";
    tip.hidden = false;
    tip.textContent = (d[0] * 1e3).toFixed(3) + " ms\\nslab, most    " + bytes(d[1]) + "\\nslab, at end  " + bytes(d[2])
      + "\\noverflow      " + bytes(d[3]) + "\\nallocations   " + d[4].toLocaleString("en")
      + " (+" + (d[4] - before).toLocaleString("en") + ")";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  svg.addEventListener("mouseleave", () => { tip.hidden = true; cross.style.display = "none" });
}
"""
