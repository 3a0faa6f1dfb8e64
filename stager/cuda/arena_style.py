"""Style sheet and script of the page that :mod:`stager.cuda.arena_page` draws."""

SLAB, OUTSIDE = "#2f6fb2", "#cf4a2c"

STYLE = """
body { margin: 0; background: #fbfcfd; color: #1d242c; font: 15px/1.45 system-ui, "Segoe UI", sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 24px; margin: 0 }
h2 { font-size: 17px; margin: 30px 0 8px }
.sub { margin: 4px 0 18px; color: #5a6673 }
.cards { display: flex; flex-wrap: wrap; gap: 12px }
.cards div { background: #fff; border: 1px solid #dfe4ea; border-radius: 8px; padding: 10px 16px; min-width: 140px }
.cards span, .cards small { display: block; color: #5a6673; font-size: 13px }
.cards b { font-size: 21px; font-weight: 600 }
.legend { margin: 0 0 6px; color: #39424e; font-size: 13px }
.legend i { display: inline-block; width: 12px; height: 12px; margin: 0 6px 0 18px; vertical-align: -1px;
  border-radius: 2px }
.legend i:first-child { margin-left: 0 }
.legend .dash { height: 0; width: 18px; border-top: 2px dashed #39424e; border-radius: 0; vertical-align: 4px }
svg.chart { display: block; width: 100%; height: auto; background: #fff; border: 1px solid #dfe4ea; border-radius: 8px }
svg text { font-size: 12px; fill: #39424e }
svg text.axis { font-size: 13px; fill: #1d242c }
.grid { stroke: #e7ebf0 }
.frame { fill: none; stroke: #b7c0ca }
.limit { stroke: #39424e; stroke-width: 1.5; stroke-dasharray: 7 5 }
.over { stroke: #cf4a2c; stroke-width: 1.2 }
.cross { stroke: #1d242c }
.step0 { fill: #eef1f5 }
.step1 { fill: #f7f9fb }
table { border-collapse: collapse; width: 100%; background: #fff; border: 1px solid #dfe4ea; font-size: 14px }
th, td { padding: 6px 12px; text-align: right; border-bottom: 1px solid #edf0f3; font-variant-numeric: tabular-nums }
th { color: #5a6673; font-weight: 500 }
.site { text-align: left; font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px }
.bar { width: 180px }
.bar i { display: block; height: 10px; border-radius: 3px; background: #2f6fb2; opacity: .7 }
#tip { position: fixed; pointer-events: none; background: #1d242c; color: #fff; font-size: 13px; padding: 7px 10px;
  border-radius: 6px; white-space: pre; font-family: ui-monospace, Menlo, Consolas, monospace }
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
