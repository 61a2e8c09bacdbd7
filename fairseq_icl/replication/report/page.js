"use strict";
// The page's own script: theme, copying, charts with toggles and hover values, and the examples. Everything from the data
// becomes text or an attribute's value, never markup.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "7 2 2 2", "2 2", "9 3", "4 2 1 2"];
const MARKS = ["circle", "square", "up", "diamond", "down", "plus"];
const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
const COLOURS = 8;

function make(parent, name, attributes = {}, text) {
  const isSvg = parent.namespaceURI === SVG || name === "svg";
  const node = isSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) { node.setAttribute(key, value); }
  if (text !== undefined) { node.textContent = text; }
  parent.append(node);
  return node;
}
const shown = (value) => value === null || value === undefined ? "–" : String(+value.toPrecision(4));

// Links to a cell open it.
function openTarget() {
  const cell = document.getElementById(location.hash.slice(1));
  if (cell && cell.tagName === "DETAILS") { cell.open = true; cell.scrollIntoView(); }
}
addEventListener("hashchange", openTarget);
addEventListener("load", openTarget);

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// Copying: the clipboard where the browser offers it, else the old way.
async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make(document.body, "textarea");
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = before; }, 1200);
}
for (const button of document.querySelectorAll("button[data-sheet]")) {
  button.addEventListener("click", () => copy(data.sheets[button.dataset.sheet][button.dataset.form], button));
}

// Toggles: every value of method, init and dataset that a chart has.
const hidden = new Set();
const isShown = (tags) => !Object.entries(tags).some(([name, value]) => hidden.has(`${name}=${value}`));
function buildToggles() {
  const bar = document.getElementById("toggles");
  if (!bar) { return; }
  const values = { method: new Set(), init: new Set(), dataset: new Set() };
  const add = (tags) => { for (const [name, value] of Object.entries(tags)) { values[name].add(value); } };
  for (const chart of data.charts) {
    for (const panel of chart.panels) { add(panel.tags); for (const series of panel.series || []) { add(series.tags); } }
  }
  for (const [name, found] of Object.entries(values)) {
    if (found.size < 2) { continue; }
    const group = make(bar, "fieldset");
    make(group, "legend", {}, name);
    for (const value of found) {
      const label = make(group, "label");
      const box = make(label, "input", { type: "checkbox", "data-tag": `${name}=${value}` });
      box.checked = true;
      label.append(` ${value}`);
      box.addEventListener("change", () => {
        if (box.checked) { hidden.delete(`${name}=${value}`); } else { hidden.add(`${name}=${value}`); }
        drawAll();
      });
    }
  }
  bar.hidden = !bar.children.length;
}

// One box for the value under the pointer.
const tip = make(document.body, "div", { id: "tip", role: "status" });
tip.hidden = true;
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - box.height - 4))}px`;
}
const hideTip = () => { tip.hidden = true; };

// Axes.
const WIDTH = 340, HEIGHT = 230, LEFT = 52, RIGHT = 8, TOP = 22, BOTTOM = 40;
function niceTicks(low, high, count = 5) {
  const step0 = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(step0));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= step0);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) { ticks.push(+tick.toPrecision(12)); }
  return ticks;
}
const SCALES = { linear: (x) => x, log: (x) => Math.log10(x), symlog: (x) => x <= 1 ? x : 1 + Math.log2(x) };
function axes(svg, chart, panel, xs, ys) {
  let [lowX, highX] = chart.ticks.length ? [-0.5, chart.ticks.length - 0.5] : [Math.min(...xs), Math.max(...xs)];
  const warp = chart.ticks.length ? SCALES.linear : SCALES[chart.scale];
  if (lowX === highX) { lowX -= 0.5; highX += 0.5; }
  let [lowY, highY] = [Math.min(...ys), Math.max(...ys)];
  const room = (highY - lowY || 1) * 0.06;
  lowY = chart.kind === "bars" ? Math.min(0, lowY) : lowY - room;
  highY += room;
  const px = (x) => LEFT + (WIDTH - LEFT - RIGHT) * (warp(x) - warp(lowX)) / (warp(highX) - warp(lowX));
  const py = (y) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - lowY) / (highY - lowY);
  make(svg, "text", { x: LEFT, y: 13, class: "panel-title" }, panel.title);
  for (const y of niceTicks(lowY, highY)) {
    make(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y), class: "rule" });
    make(svg, "text", { x: LEFT - 5, y: py(y) + 4, "text-anchor": "end" }, shown(y));
  }
  const places = chart.ticks.length ? chart.ticks.map((_, i) => i) : chart.scale === "linear" ? niceTicks(lowX, highX) : [...new Set(xs)].sort((a, b) => a - b);
  let last = -Infinity;
  for (const x of places) {
    const name = chart.ticks.length ? chart.ticks[x] : shown(x), at = px(x);
    if (at - last < Math.min(70, 7 * name.length + 4)) { continue; }
    last = at;
    make(svg, "text", { x: at, y: HEIGHT - BOTTOM + 14, "text-anchor": "middle" }, name.length > 14 ? `${name.slice(0, 13)}…` : name);
  }
  make(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" });
  if (chart.zero && lowY < 0 && highY > 0) { make(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: py(0), y2: py(0), class: "zero" }); }
  labels(svg, chart);
  return [px, py];
}
function labels(svg, chart) {
  make(svg, "text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, chart.x);
  make(svg, "text", { x: 0, y: 0, transform: `translate(11 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, chart.y);
}
function mark(parent, kind, x, y, colour) {
  const r = 3.2, at = { fill: colour, class: "mark" };
  const polygon = (...points) => make(parent, "polygon", { ...at, points: points.map(([dx, dy]) => `${x + dx * r},${y + dy * r}`).join(" ") });
  if (kind === "circle") { return make(parent, "circle", { ...at, cx: x, cy: y, r: r - 0.3 }); }
  if (kind === "square") { return polygon([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]); }
  if (kind === "up") { return polygon([0, -1.2], [1.1, 0.9], [-1.1, 0.9]); }
  if (kind === "down") { return polygon([0, 1.2], [1.1, -0.9], [-1.1, -0.9]); }
  if (kind === "diamond") { return polygon([0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]); }
  return make(parent, "path", { d: `M${x - r},${y}h${2 * r}M${x},${y - r}v${2 * r}`, stroke: colour, "stroke-width": 1.8, class: "mark" });
}

// A label has the same look in all panels of a chart, whatever is hidden; a reference has that of what it stands beside.
function looks(chart) {
  const found = new Map();
  for (const panel of chart.panels) {
    for (const series of panel.series || []) {
      if (!series.reference && !found.has(series.label)) {
        const i = found.size;
        found.set(series.label, { colour: `var(--c${i % COLOURS})`, dash: DASHES[i % DASHES.length], mark: MARKS[i % MARKS.length], number: i });
      }
    }
  }
  for (const panel of chart.panels) {
    for (const series of panel.series || []) {
      if (series.reference && !found.has(series.label)) { found.set(series.label, found.get(series.like) || { colour: "var(--c6)", dash: "", mark: "circle", number: 6 }); }
    }
  }
  return found;
}
const reach = (series, i) => (series.sd && series.sd[i]) || 0;

function drawLines(svg, chart, panel, series, styles) {
  const ys = series.flatMap((one) => one.y.flatMap((y, i) => y === null ? [] : [y - reach(one, i), y + reach(one, i)]));
  const [px, py] = axes(svg, chart, panel, series.flatMap((one) => one.x), chart.zero ? [...ys, 0] : ys);
  const points = [];
  for (const one of [...series].sort((a, b) => (b.reference ? 1 : 0) - (a.reference ? 1 : 0))) {
    const look = styles.get(one.label);
    const known = one.x.map((x, i) => i).filter((i) => one.y[i] !== null);
    const line = known.map((i) => `${px(one.x[i])},${py(one.y[i])}`).join(" ");
    if (one.reference) {
      const upper = known.map((i) => `${px(one.x[i])},${py(one.y[i] + reach(one, i))}`);
      const lower = known.map((i) => `${px(one.x[i])},${py(one.y[i] - reach(one, i))}`).reverse();
      make(svg, "polygon", { points: [...upper, ...lower].join(" "), fill: look.colour, opacity: 0.2, class: "band" });
      make(svg, "polyline", { points: line, fill: "none", stroke: look.colour, opacity: 0.6, "stroke-width": 1 });
    } else {
      make(svg, "polyline", { points: line, fill: "none", stroke: look.colour, "stroke-width": 1.5, "stroke-dasharray": look.dash, class: "line" });
    }
    for (const i of known) {
      const x = px(one.x[i]), y = py(one.y[i]);
      if (!one.reference) {
        if (reach(one, i)) { make(svg, "line", { x1: x, x2: x, y1: py(one.y[i] - reach(one, i)), y2: py(one.y[i] + reach(one, i)), stroke: look.colour }); }
        mark(svg, look.mark, x, y, look.colour);
      }
      points.push({ x, y, text: `${one.label}\n${chart.x} ${chart.ticks.length ? chart.ticks[one.x[i]] : shown(one.x[i])}: ${shown(one.y[i])}${reach(one, i) ? ` ± ${shown(reach(one, i))}` : ""}` });
    }
  }
  const ring = make(svg, "circle", { r: 6, fill: "none", stroke: "var(--ink)", visibility: "hidden" });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), factor = WIDTH / box.width;
    const x = (event.clientX - box.left) * factor, y = (event.clientY - box.top) * factor;
    let best = null, least = 30 ** 2;
    for (const point of points) {
      const distance = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (distance < least) { best = point; least = distance; }
    }
    ring.setAttribute("visibility", best ? "visible" : "hidden");
    if (!best) { hideTip(); return; }
    ring.setAttribute("cx", best.x);
    ring.setAttribute("cy", best.y);
    showTip(event, best.text);
  });
  svg.addEventListener("pointerleave", () => { ring.setAttribute("visibility", "hidden"); hideTip(); });
}

function hatch(svg, number, colour) {
  const name = `hatch-${hatch.count = (hatch.count || 0) + 1}`;
  const pattern = make(make(svg, "defs"), "pattern", { id: name, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${[0, 45, -45, 0, 90, 20, 70, 110][number % 8]})` });
  make(pattern, "rect", { width: 6, height: 6, fill: colour });
  if (number % 8) { make(pattern, "line", { x1: 0, x2: 6, y1: 3, y2: 3, stroke: "var(--ground)", "stroke-width": number % 8 === 3 ? 3 : 1.4 }); }
  return `url(#${name})`;
}
function drawBars(svg, chart, panel, series, styles) {
  const stacks = [...new Set(series.map((one) => one.stack || one.label))], tops = {};
  const bars = series.flatMap((one) => one.x.map((x, i) => {
    const stack = one.stack || one.label, key = `${stack}|${x}`, bottom = tops[key] || 0;
    tops[key] = bottom + (one.y[i] || 0);
    return { one, x, stack, bottom, top: tops[key], y: one.y[i], sd: reach(one, i) };
  }));
  const [px, py] = axes(svg, chart, panel, [], [0, ...bars.flatMap((bar) => [bar.top - bar.sd, bar.top + bar.sd])]);
  const width = (px(1) - px(0)) * 0.8 / stacks.length;
  const fills = new Map();
  for (const bar of bars) {
    const look = styles.get(bar.one.label);
    if (!fills.has(bar.one.label)) { fills.set(bar.one.label, hatch(svg, look.number, look.colour)); }
    const left = px(bar.x) + (stacks.indexOf(bar.stack) - stacks.length / 2) * width;
    const rect = make(svg, "rect", { x: left + 0.5, width: Math.max(1, width - 1), y: Math.min(py(bar.top), py(bar.bottom)), height: Math.abs(py(bar.top) - py(bar.bottom)), fill: fills.get(bar.one.label), stroke: "var(--ink)", "stroke-width": 0.5, class: "bar" });
    if (bar.sd) { make(svg, "line", { x1: left + width / 2, x2: left + width / 2, y1: py(bar.top - bar.sd), y2: py(bar.top + bar.sd), stroke: "var(--ink)", "stroke-width": 1.4 }); }
    rect.addEventListener("pointermove", (event) => showTip(event, `${bar.one.label}\n${chart.ticks[bar.x]}: ${shown(bar.y)}${bar.sd ? ` ± ${shown(bar.sd)}` : ""}`));
    rect.addEventListener("pointerleave", hideTip);
  }
}

function heatColour(share) {
  const place = Math.max(0, Math.min(1, share)) * (CIVIDIS.length - 1), below = Math.min(Math.floor(place), CIVIDIS.length - 2);
  return `rgb(${CIVIDIS[below].map((part, i) => Math.round(part + (CIVIDIS[below + 1][i] - part) * (place - below))).join(",")})`;
}
function columnOf(chart) { return chart.x === "head" ? "head" : "step"; }
function drawHeat(svg, chart, panel) {
  const rows = panel.grid.length, columns = panel.grid[0].length, right = 62;
  const warp = (value) => panel.logarithmic ? Math.log10(value) : value;
  const known = panel.grid.flat().filter((value) => value !== null && (!panel.logarithmic || value > 0)).map(warp);
  const low = Math.min(...known), high = Math.max(...known), span = high - low || 1;
  const w = (WIDTH - LEFT - right) / columns, h = (HEIGHT - TOP - BOTTOM) / rows;
  make(svg, "text", { x: LEFT, y: 13, class: "panel-title" }, panel.title);
  panel.grid.forEach((line, row) => line.forEach((value, column) => {
    const cell = make(svg, "rect", { x: LEFT + column * w, y: HEIGHT - BOTTOM - (row + 1) * h, width: w + 0.3, height: h + 0.3, class: "cell" });
    cell.setAttribute("fill", value === null || (panel.logarithmic && value <= 0) ? "var(--ground)" : heatColour((warp(value) - low) / span));
    cell.dataset.tip = `layer ${row}, ${columnOf(chart)} ${column}: ${shown(value)}`;
  }));
  svg.addEventListener("pointermove", (event) => { if (event.target.dataset.tip) { showTip(event, event.target.dataset.tip); } else { hideTip(); } });
  svg.addEventListener("pointerleave", hideTip);
  const every = (count) => Math.max(1, Math.ceil(count / 6));
  for (let row = 0; row < rows; row += every(rows)) { make(svg, "text", { x: LEFT - 5, y: HEIGHT - BOTTOM - (row + 0.5) * h + 4, "text-anchor": "end" }, row); }
  for (let column = 0; column < columns; column += every(columns)) { make(svg, "text", { x: LEFT + (column + 0.5) * w, y: HEIGHT - BOTTOM + 14, "text-anchor": "middle" }, column); }
  for (let i = 0; i < 20; i += 1) { make(svg, "rect", { x: WIDTH - right + 8, width: 9, y: TOP + (19 - i) * (HEIGHT - TOP - BOTTOM) / 20, height: (HEIGHT - TOP - BOTTOM) / 20 + 0.4, fill: heatColour(i / 19) }); }
  for (const share of [0, 0.5, 1]) {
    const value = panel.logarithmic ? 10 ** (low + share * span) : low + share * span;
    make(svg, "text", { x: WIDTH - right + 20, y: HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM) + (share === 1 ? 8 : share ? 4 : 0) }, Number(value.toPrecision(2)));
  }
  labels(svg, chart);
}

function drawLegend(parent, chart, styles, visible) {
  const legend = make(parent, "div", { class: "legend" });
  for (const label of visible) {
    const look = styles.get(label), entry = make(legend, "span");
    const sample = make(entry, "svg", { viewBox: "0 0 36 14", "aria-hidden": "true" });
    const isReference = chart.panels.some((panel) => panel.series.some((one) => one.label === label && one.reference));
    if (chart.kind === "bars") {
      make(sample, "rect", { x: 8, y: 1, width: 20, height: 12, fill: hatch(sample, look.number, look.colour), stroke: "var(--ink)", "stroke-width": 0.5 });
    } else if (isReference) {
      make(sample, "rect", { x: 2, y: 3, width: 32, height: 8, fill: look.colour, opacity: 0.25 });
    } else {
      make(sample, "line", { x1: 1, x2: 35, y1: 7, y2: 7, stroke: look.colour, "stroke-width": 1.8, "stroke-dasharray": look.dash });
      mark(sample, look.mark, 18, 7, look.colour);
    }
    entry.append(label);
  }
}

function draw(place, chart) {
  place.replaceChildren();
  const styles = looks(chart), visible = new Set(), holder = make(place, "div", { class: "panels" });
  for (const panel of chart.panels) {
    const series = (panel.series || []).filter((one) => isShown(one.tags));
    if (!isShown(panel.tags) || (!panel.grid && !series.length)) { continue; }
    series.forEach((one) => visible.add(one.label));
    const svg = make(holder, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${chart.title}: ${panel.title}` });
    if (chart.kind === "heat") { drawHeat(svg, chart, panel); } else { (chart.kind === "bars" ? drawBars : drawLines)(svg, chart, panel, series, styles); }
  }
  if (!holder.children.length) { make(place, "p", { class: "note" }, "Nothing is chosen that this figure shows."); }
  if (chart.kind !== "heat") { drawLegend(place, chart, styles, visible); }
}
function drawAll() {
  hideTip();
  document.querySelectorAll("[data-chart]").forEach((place) => draw(place, data.charts[place.dataset.chart]));
}

// A chart's numbers as CSV: a cell that a spreadsheet would take for a formula gets a quote in front.
function chartCsv(chart) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const lines = [chart.kind === "heat" ? ["panel", "layer", columnOf(chart), "value"] : ["panel", "series", "x", "y", "sd"]];
  for (const panel of chart.panels) {
    if (panel.grid) { panel.grid.forEach((row, i) => row.forEach((value, j) => lines.push([panel.title, i, j, value]))); }
    for (const one of panel.series || []) {
      one.x.forEach((x, i) => lines.push([panel.title, one.label, chart.ticks.length ? chart.ticks[x] : x, one.y[i], one.sd ? one.sd[i] : null]));
    }
  }
  return lines.map((line) => line.map(cell).join(",")).join("\n") + "\n";
}
for (const button of document.querySelectorAll("button[data-chart-csv]")) {
  button.addEventListener("click", () => copy(chartCsv(data.charts[button.dataset.chartCsv]), button));
}

// Examples: a group (dataset, method, model, init), an example of it, a layer.
function chooser(parent, words, id, options) {
  const label = make(parent, "label", {}, `${words} `), select = make(label, "select", { id });
  options.forEach((text, i) => make(select, "option", { value: i }, text));
  return select;
}
function buildExamples() {
  const choices = document.getElementById("example-choices"), place = document.getElementById("example");
  if (!choices) { return; }
  const names = ["dataset", "method", "model", "init"].filter((name) => name === "dataset" || new Set(data.examples.map((group) => group[name])).size > 1);
  const group = chooser(choices, "data set", "example-group", data.examples.map((one) => names.map((name) => one[name]).join(", ")));
  const example = chooser(choices, "example", "example-number", []);
  const label = make(choices, "label", {}, "layer "), layer = make(label, "input", { type: "range", id: "example-layer", min: 0, value: 0 }), number = make(label, "output");
  const current = () => data.examples[group.value].examples[example.value];
  const list = () => {
    example.replaceChildren();
    data.examples[group.value].examples.forEach((one, i) => make(example, "option", { value: i }, `row ${one.row}: ICL and FT differ by ${shown(one.disagreement)}`));
    choose();
  };
  const choose = () => {
    const depth = current().icl ? current().icl.demonstrations.length : 0;
    label.hidden = !depth;
    layer.max = Math.max(0, depth - 1);
    layer.value = Math.min(layer.value, layer.max);
    show();
  };
  const show = () => {
    number.textContent = ` ${layer.value} `;
    place.replaceChildren();
    showExample(place, data.examples[group.value], current(), +layer.value);
  };
  group.addEventListener("change", list);
  example.addEventListener("change", choose);
  layer.addEventListener("input", show);
  list();
}
function showExample(place, group, one, layer) {
  make(place, "div", { class: "query" }, one.query || "(each option is a text of its own)");
  const scroll = make(place, "div", { class: "scroll" }), table = make(scroll, "table"), head = make(make(table, "thead"), "tr"), body = make(table, "tbody");
  for (const words of ["option", "zero-shot", "ICL", "fine-tuned"]) { make(head, "th", {}, words); }
  const best = (shares) => shares.indexOf(Math.max(...shares));
  one.options.forEach((option, i) => {
    const row = make(body, "tr");
    make(row, "td", {}, `${option}${i === one.gold ? " (gold)" : ""}`);
    for (const name of ["zsl", "icl", "ft"]) {
      const shares = one.probabilities[name], cell = make(row, "td", {}, `${i === best(shares) ? "▸ " : ""}${(100 * shares[i]).toFixed(1)} %`);
      if (i === best(shares)) { cell.style.fontWeight = 700; }
    }
  });
  make(place, "h3", {}, one.icl ? `The prompt's demonstrations, by the weight they have in layer ${layer}` : "The prompt's demonstrations");
  if (one.icl) { make(place, "p", { class: "note" }, "Left: ICL, right: FT, in percent. Underlined: the tokens ICL attends to most; shaded: those FT would; pointing at one shows its share."); }
  const heaviest = (side) => new Map(one[side] ? one[side].tokens[layer] : []), icl = heaviest("icl"), ft = heaviest("ft");
  const largest = (side) => Math.max(1, ...one[side].demonstrations[layer]);
  let token = 0;
  group.demonstrations.forEach((tokens, i) => {
    const line = make(place, "div", { class: "demonstration" });
    for (const side of ["icl", "ft"]) {
      const weight = one[side] ? one[side].demonstrations[layer][i] : null;
      const cell = make(line, "span", { class: `weight ${side}` }, weight === null ? "" : (weight / 10).toFixed(1));
      if (weight !== null) { cell.style.setProperty("--share", `${100 * weight / largest(side)}%`); }
    }
    const text = make(line, "span");
    for (const piece of tokens) {
      const kinds = [icl.has(token) ? "icl-token" : "", ft.has(token) ? "ft-token" : ""].filter(Boolean).join(" ");
      if (kinds) {
        const said = [["ICL", icl], ["FT", ft]].filter(([, side]) => side.has(token)).map(([name, side]) => `${name} ${(side.get(token) / 10).toFixed(1)} %`).join(", ");
        make(text, "span", { class: kinds, title: said }, piece);
      } else { text.append(piece); }
      token += 1;
    }
  });
}

buildToggles();
drawAll();
buildExamples();
})();
