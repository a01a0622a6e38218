"""The results page: one self-contained HTML file with sortable tables, curves, figures and provenance."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POINTS = 300  # maximum number of points of a curve, which is more than a screen resolves


def results_page(
    title: str,
    tables: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    figures: Mapping[str, Path],
) -> str:
    """Return the page as HTML.

    Args:
        title: title of the page.
        tables: each with "title", "note", "headings" and "lines". A line is a name and its cells; a cell is None or has
            "text", "value" (to sort by), "below" (smaller lines of text) and "runs" (indices into `runs`).
        runs: each with "name", "facts" (provenance to show) and "log" (log records).
        figures: paths of PNG images by caption.
    """
    data = {
        "tables": _finite(tables),
        "runs": [{"name": run["name"], "facts": run["facts"], "curves": _curves(run["log"])} for run in runs],
        "figures": [
            {"caption": caption, "source": "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()}
            for caption, path in figures.items()
        ],
    }
    # escape "<", so that </script> in the data does not end the script element
    payload = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return _TEMPLATE.replace("@title@", html.escape(title)).replace("@data@", payload)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which diverged runs have and JSON cannot represent, by None, recursively."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _curves(log: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the training loss and each evaluation score as points (update, value), without NaN and infinity."""
    curves: dict[str, list[list[float]]] = {}
    for record in log:
        if record["kind"] == "train":
            curves.setdefault("training loss", []).append([record["step"], record["loss"]])
        elif record["kind"] == "eval" and "model" not in record:
            for name, value in record.items():
                if isinstance(value, float) and name != "epoch":
                    curves.setdefault(f"{record['split']} {name}", []).append([record["step"], value])
    drawn = {name: [point for point in points if math.isfinite(point[1])] for name, points in curves.items()}
    return {name: _thinned(points) for name, points in drawn.items() if len(points) > 1}


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Keep every n-th point, at most `POINTS` of them, counted from the last one: it is the result of the run."""
    step = -(-len(points) // POINTS)
    return points[::-step][::-1]


_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>@title@</title>
<style>
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent);
  --soft: color-mix(in srgb, currentColor 6%, transparent);
  --faint: color-mix(in srgb, currentColor 60%, transparent); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem 40vh; }
h2 { margin: 2.2rem 0 .3rem; font-size: 1.15rem; }
p.note { margin: 0 0 .6rem; color: var(--faint); max-width: 70rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
thead th { cursor: pointer; user-select: none; border-bottom: 2px solid var(--line); }
thead th[data-order="1"]::after { content: " ↑"; } thead th[data-order="-1"]::after { content: " ↓"; }
td.runs { cursor: pointer; } td.runs:hover, td.chosen { background: var(--soft); }
td small { display: block; color: var(--faint); }
figure { margin: 1rem 0; } figure img { max-width: 100%; background: white; } figcaption { color: var(--faint); }
#detail { position: fixed; inset: auto 0 0 0; max-height: 55vh; overflow: auto; background: Canvas;
  border-top: 2px solid var(--line); padding: .8rem 1.2rem 1.2rem; box-shadow: 0 -6px 24px #0003; }
#detail:empty { display: none; }
#detail button { float: right; font: inherit; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.charts svg { width: 21rem; height: 11rem; } .charts text { font-size: 11px; fill: currentColor; }
details { margin: .3rem 0; } dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 50%; }
</style>
</head>
<body>
<h1>@title@</h1>
<p class="note">Click a heading to sort, a number for its runs: curves, and where each comes from.</p>
<main id="tables"></main>
<section id="figures"></section>
<aside id="detail" aria-live="polite"></aside>
<script type="application/json" id="data">@data@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colours = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f"];

function make(tag, parent, text, attributes = {}) {
  const svg = ["svg", "path", "text", "line"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}

function sortBy(table, column, heading) {
  const order = heading.dataset.order === "1" ? -1 : 1;
  for (const other of heading.parentNode.children) delete other.dataset.order;
  heading.dataset.order = order;
  const key = row => row.children[column].dataset.value ?? row.children[column].textContent;
  const lines = [...table.tBodies[0].rows];
  lines.sort((a, b) => {
    const [x, y] = [key(a), key(b)], [m, n] = [Number(x), Number(y)];
    if (x === "" || y === "") return (x === "") - (y === "");  // empty cells last, either way
    return order * (Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n);
  });
  table.tBodies[0].append(...lines);
}

function drawTable(table) {
  const section = make("section", document.getElementById("tables"));
  make("h2", section, table.title);
  make("p", section, table.note, {class: "note"});
  const element = make("table", make("div", section, null, {class: "scroll"}));
  const heads = make("tr", make("thead", element));
  for (const [i, name] of ["", ...table.headings].entries()) {
    const heading = make("th", heads, name, {scope: "col"});
    heading.onclick = () => sortBy(element, i, heading);
  }
  const body = make("tbody", element);
  for (const [name, cells] of table.lines) {
    const line = make("tr", body);
    make("td", line, name);
    for (const cell of cells) {
      const td = make("td", line, cell ? cell.text : "");
      td.dataset.value = cell && cell.value !== null ? cell.value : "";
      for (const text of cell?.below ?? []) make("small", td, text);
      if (cell && cell.runs.length) {
        td.className = "runs";
        td.onclick = () => showRuns(td, name, cell.runs);
      }
    }
  }
}

function chart(parent, name, lines) {
  const [left, top, width, height] = [46, 18, 280, 130];
  const svg = make("svg", parent, null, {viewBox: "0 0 340 176", role: "img", "aria-label": name});
  const points = lines.flatMap(line => line.points).filter(point => Number.isFinite(point[1]));
  if (!points.length) return;
  const [xs, ys] = [points.map(p => p[0]), points.map(p => p[1])];
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = value => left + width * (value - x0) / (x1 - x0 || 1);
  const y = value => top + height - height * (value - y0) / (y1 - y0 || 1);
  make("text", svg, name, {x: left, y: 12});
  for (const [value, textY] of [[y1, top + 8], [y0, top + height]]) {
    make("text", svg, Number(value.toPrecision(3)), {x: left - 5, y: textY, "text-anchor": "end"});
  }
  const end = {x: left + width, y: top + height + 15, "text-anchor": "end"};
  make("text", svg, x1.toLocaleString("en") + " updates", end);
  make("path", svg, null, {d: `M${left},${top}V${top + height}H${left + width}`, fill: "none", stroke: "#8888"});
  for (const {colour, points} of lines) {
    const d = points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join("");
    make("path", svg, null, {d, fill: "none", stroke: colour, "stroke-width": 1.4, "class": "curve"});
  }
}

function showRuns(td, name, numbers) {
  for (const other of document.querySelectorAll("td.chosen")) other.classList.remove("chosen");
  td.classList.add("chosen");
  const detail = document.getElementById("detail");
  detail.replaceChildren();
  make("button", detail, "close").onclick = () => { detail.replaceChildren(); td.classList.remove("chosen"); };
  const runs = numbers.map((number, i) => ({...data.runs[number], colour: colours[i % colours.length]}));
  const names = [...new Set(runs.flatMap(run => Object.keys(run.curves)))];
  const charts = make("div", detail, null, {class: "charts"});
  for (const curve of names) {
    const lines = runs.filter(run => run.curves[curve]).map(run => ({colour: run.colour, points: run.curves[curve]}));
    chart(charts, curve, lines);
  }
  for (const run of runs) {
    const entry = make("details", detail);
    if (runs.length === 1) entry.open = true;
    const summary = make("summary", entry);
    make("span", summary, null, {class: "key", style: `background:${run.colour}`});
    summary.append(run.name);
    const list = make("dl", entry);
    for (const [key, value] of Object.entries(run.facts)) { make("dt", list, key); make("dd", list, value); }
  }
}

data.tables.forEach(drawTable);
for (const {caption, source} of data.figures) {
  const figure = make("figure", document.getElementById("figures"));
  make("img", figure, null, {src: source, alt: caption});
  make("figcaption", figure, caption);
}
document.addEventListener("keydown", event => {
  if (event.key === "Escape") document.querySelector("#detail button")?.click();
});
</script>
</body>
</html>
"""
