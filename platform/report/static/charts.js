// Charts of a page: lines and stacks by uPlot, maps of colours on a canvas. `page` and `state` are of page.js.
"use strict";

// ---- elements and numbers; all that comes from a run is put in as text, never as markup

function el(tag, className = "", ...inside) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...inside.map((part) => (part instanceof Node ? part : String(part))));
  return node;
}

function swatch(fill) {
  const node = el("span", "swatch");
  node.style.background = fill;
  return node;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colour = (i) => style(`c${i % 10}`);

function short(value, digits = 3) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
  const whole = size >= 1 ? Math.floor(Math.log10(size)) + 1 : 0; // no digit before the point becomes a zero
  return String(Number(value.toPrecision(Math.max(digits, whole))));
}

function scaled(value, units) {
  let i = 0;
  for (; Math.abs(value) >= 999.5 && i < units.length - 1; i++) value /= 1000;
  return `${short(value)} ${units[i]}`.trim();
}

function duration(seconds) {
  if (seconds < 0.9995) return seconds === 0 ? "0 s" : `${short(seconds * 1e3)} ms`;
  if (seconds < 119.5) return `${short(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${short(minutes / 1440)} days`;
}

const UNITS = {
  B: (v) => scaled(v, ["B", "kB", "MB", "GB", "TB", "PB"]),
  count: (v) => scaled(v, ["", "k", "M", "G", "T"]),
  s: duration,
  share: (v) => `${short(v * 100)} %`,
  Bps: (v) => scaled(v, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]),
  W: (v) => `${short(v)} W`,
  C: (v) => `${short(v)} °C`,
};
const shown = (value, unit) => (typeof value !== "number" || Number.isNaN(value) ? "–" : (UNITS[unit] || ((v) => short(v, 4)))(value));

// ---- which curves a panel has

const AXES = { step: UNITS.count, tokens: UNITS.count, hours: (v) => duration(v * 3600) };
const axisOf = (panel) => state.x || (panel.x === "tokens" ? "tokens" : "step");
const AT = { step: (v) => `step ${v.toLocaleString()}`, tokens: (v) => `${AXES.tokens(v)} tokens`, hours: AXES.hours };
const at = (axis, value) => AT[axis](value);
const LABELS = { step: "step", tokens: "tokens", hours: "time of training" };

function curvesOf(run, panel) {
  const found = [];
  for (const metric of panel.metrics) {
    const many = metric.endsWith("/*"), head = many ? metric.slice(0, -1) : metric;
    for (const [name, curve] of Object.entries(run.curves.of))
      if (many ? name.startsWith(head) : name === head)
        found.push({ name: many ? name.slice(head.length) : (panel.names || [])[panel.metrics.indexOf(metric)] || name.split("/").pop(), curve, x: run.curves.grids[curve[0]] });
  }
  return found;
}

// A panel of single metrics compares all runs; another one shows the run in detail.
function panelCurves(panel) {
  const each = page.runs.map((run) => curvesOf(run, panel));
  const compares = page.runs.length > 1 && !panel.metrics.some((m) => m.endsWith("*")), several = panel.metrics.length > 1;
  const named = (c, i) => (several ? `${page.runs[i].name} ${c.name}` : page.runs[i].name);
  return compares ? each.flatMap((found, i) => found.map((c, k) => ({ ...c, name: named(c, i), run: i, dash: k ? [6, 4] : undefined }))) : each[state.run] || [];
}

// Returns the one number that a panel's lines have at all their points, null if there is none such.
function constant(panel, curves) {
  const values = new Set(curves.flatMap((c) => c.curve.slice(1).flat()));
  return !panel.kind && values.size === 1 && curves[0].curve[1].length > 1 ? [...values][0] : null;
}

// Returns the running mean of a curve, in which each point counts `state.smooth` times as much as the next one.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((v) => {
    if (v == null) return v;
    [sum, weight] = [sum * state.smooth + v, weight * state.smooth + 1];
    return sum / weight;
  });
}

// ---- lines and stacks

function drawLines(panel, curves, box, now) {
  const axis = axisOf(panel), many = curves.length > 1 || page.runs.length > 1;
  const order = (c) => c.run ?? curves.indexOf(c);
  const smooth = (c) => state.smooth > 0 && !panel.steps && c.curve[0] === 0; // the curve itself stays, as its thin edges
  const tables = curves.map((c) => [c.x[axis], smooth(c) ? smoothed(c.curve[1]) : c.curve[1], c.curve[2] || c.curve[1], c.curve[3] || c.curve[1]]);
  const [dense] = page.runs[state.run].curves.grids, whole = dense?.[axis].length ? [[dense[axis][0], dense[axis][dense[axis].length - 1]]] : [];
  const data = uPlot.join([...tables, whole].filter((t) => t.length)); // what few steps have is drawn on the axis of all
  const series = [{}], bands = [];
  for (const c of curves) {
    const first = series.length, stroke = colour(order(c)), show = !state.off.has(c.name);
    const paths = panel.steps ? uPlot.paths.stepped({ align: 1 }) : undefined;
    series.push({ stroke, show, paths, dash: c.dash, width: 1.5, points: { show: c.curve[1].length < 40, size: 5, fill: stroke } });
    for (let edge = 0; edge < 2; edge++) series.push({ stroke: `${stroke}60`, show, width: c.curve[2] || smooth(c) ? 1 : 0, points: { show: false } });
    if (show) bands.push({ series: [first + 2, first + 1], fill: `${stroke}40` });
  }
  const log = (panel.log || state.log) && data.slice(1).every((column) => column.every((v) => v == null || v > 0));
  const keys = many ? drawKeys(curves.map((c) => [c.name, colour(order(c))]), box) : [];
  const say = (index) => {
    let last = 0;
    curves.forEach((c, i) => {
      const column = data[1 + 3 * i];
      let j = index == null ? column.length - 1 : index;
      while (j > 0 && column[j] == null) j--;
      last = Math.max(last, j);
      if (many) keys[i].textContent = shown(column[j], panel.unit);
    });
    const where = at(axis, data[0][index == null ? last : index]);
    now.textContent = many ? where : `${shown(data[1][last], panel.unit)} · ${where}`;
  };
  chart(panel, axis, data, series, bands, box, say, log ? { distr: 3 } : { range: roomy });
}

function drawStack(panel, curves, box, now) {
  const axis = axisOf(panel), { x } = curves[0], length = x.step.length;
  const parts = curves.filter((c) => c.x === x).map((c) => [c.name, c.curve[1].map((v) => v || 0)]);
  const total = page.runs[state.run].curves.of[panel.total];
  if (total && total[1].length === length && !parts.some(([name]) => name === "rest"))
    parts.push(["rest", total[1].map((v, i) => Math.max(0, (v || 0) - parts.reduce((sum, [, own]) => sum + own[i], 0)))]);
  const kept = parts.filter(([, values]) => values.some((v) => v > 0));
  const data = [x[axis]], series = [{}], bands = [];
  let below = new Array(length).fill(0);
  kept.forEach(([name, values], i) => {
    if (state.off.has(name)) return;
    below = below.map((v, j) => v + values[j]);
    data.push(below);
    series.push({ stroke: colour(i), width: 1, fill: data.length === 2 ? `${colour(i)}b0` : undefined, points: { show: false } });
    if (data.length > 2) bands.push({ series: [data.length - 1, data.length - 2], fill: `${colour(i)}b0` });
  });
  const keys = drawKeys(kept.map(([name], i) => [name, colour(i)]), box);
  const say = (index) => {
    kept.forEach(([, v], i) => (keys[i].textContent = shown(index == null ? v.reduce((a, b) => a + b, 0) / length : v[index], panel.unit)));
    now.textContent = index == null ? "mean of all steps" : at(axis, x[axis][index]);
  };
  chart(panel, axis, data, series, bands, box, say, { range: (u, low, high) => [0, (high || 1) * 1.05] });
}

// Medians over the workers as lines, each in a band from min to max; below them the numbers, and the ranks at the ends.
function drawSpread(panel, curves, box, now) {
  const axis = axisOf(panel), { x } = curves[0], { of } = page.runs[state.run].curves, spreads = new Map();
  for (const c of curves) {
    const [head, end] = [c.name.split("/").slice(0, -1).join("/"), c.name.split("/").pop()];
    spreads.set(head, { ...spreads.get(head), [end]: c.curve[1] });
  }
  const data = [x[axis]], series = [{}], bands = [], keys = el("div", "keys");
  const values = [...spreads].map(([head, { min, median, max }], i) => {
    const edge = { stroke: `${colour(i)}60`, width: 1, points: { show: false } }, key = el("span");
    bands.push({ series: [data.length + 2, data.length], fill: `${colour(i)}40` });
    data.push(min, median, max);
    series.push(edge, { stroke: colour(i), width: 1.5, points: { show: median.length < 40, size: 5, fill: colour(i) } }, edge);
    keys.append(el("div", "spread", ...(head ? [swatch(colour(i)), `${head}: `] : []), key));
    return [head, key, { min, median, max }];
  });
  box.append(keys);
  const say = (index) => {
    let last = 0;
    for (const [head, key, columns] of values) {
      let j = index == null ? x.step.length - 1 : index;
      while (j > 0 && columns.median[j] == null) j--;
      last = Math.max(last, j);
      const rank = (end) => ((of[[panel.ranks, head, end].filter(Boolean).join("/")] || [])[1] || [])[j];
      const said = (end) => el("span", "", `${end} `, el("b", "", shown(columns[end][j], panel.unit)), rank(end) == null ? "" : ` (rank ${rank(end)})`);
      key.replaceChildren(said("min"), " · ", said("median"), " · ", said("max"));
    }
    now.textContent = at(axis, x[axis][index == null ? last : index]);
  };
  const log = panel.log && data.slice(1).every((column) => column.every((v) => v == null || v > 0));
  chart(panel, axis, data, series, bands, box, say, log ? { distr: 3 } : { range: roomy });
}

// Adds what the colours of a chart stand for below it; a click hides and shows. Returns where the values go.
function drawKeys(entries, box) {
  const keys = el("div", "keys");
  const values = entries.map(([name, fill]) => {
    const value = el("span", "dim"), key = el("button", state.off.has(name) ? "off" : "", swatch(fill), name, " ", value);
    key.addEventListener("click", () => (state.off.has(name) ? state.off.delete(name) : state.off.add(name), draw()));
    keys.append(key);
    return value;
  });
  box.append(keys);
  return values;
}

// Rows that come meanwhile wait as long as a part of a chart is looked at.
function zoomed(u) {
  const x = u.data[0];
  state.zoomed = x.length > 1 && (u.scales.x.min > x[0] || u.scales.x.max < x[x.length - 1]);
}

const WHOLE = [...Array(16).keys()].flatMap((n) => [1, 2, 5].map((digit) => digit * 10 ** n)); // distances of ticks

function chart(panel, axis, data, series, bands, box, say, y) {
  const own = { stroke: style("dim"), font: "11px system-ui, sans-serif", grid: { stroke: style("grid"), width: 1 }, ticks: { show: false } };
  const u = new uPlot({
    width: Math.max(box.clientWidth, 200), height: panel.kind === "stack" ? 264 : 214, legend: { show: false }, series, bands,
    padding: [8, 22, 0, 0],
    cursor: { sync: { key: axis }, y: false, points: { show: panel.kind !== "stack", size: 6 } },
    scales: { x: { time: false }, y },
    axes: [
      { ...own, values: (_, ticks) => ticks.map(AXES[axis]), size: 24, space: 70, incrs: axis === "hours" ? undefined : WHOLE, label: LABELS[axis], labelSize: 16, labelGap: 0, labelFont: own.font },
      { ...own, incrs: panel.steps ? WHOLE : undefined, values: (_, ticks) => ticks.map((v) => (v == null ? "" : shown(v, panel.unit))), size: (_, texts) => 14 + 6.4 * Math.max(4, ...(texts || []).map((t) => t.length)) },
    ],
    hooks: { draw: [(u) => drawMarks(u, axis)], setCursor: [(u) => say(u.cursor.idx)], setScale: [(u, key) => key === "x" && zoomed(u)] },
  }, data, (_, start) => (box.prepend(_.root), start()));
  say(null);
  state.plots.push({ box, resize: () => u.setSize({ width: Math.max(box.clientWidth, 200), height: u.height }), end: () => u.destroy() });
}

// Leaves some room around a curve; a flat one lies in the middle, and what is never negative begins at zero at least.
function roomy(u, low, high) {
  if (low == null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const [from, to] = uPlot.rangeNum(low, high, 0.08, true);
  return [low >= 0 && from < 0 ? 0 : from, to];
}

// Returns the events of the run in detail that the charts have a mark for.
const shownMarks = () => page.runs[state.run].events.filter(([, step, tone, text]) => step != null && (tone === "bad" || tone === "warn") && !text.startsWith("on purpose"));

// Marks failures, and what else is bad news of the run in detail, on the axis of a chart.
function drawMarks(u, axis) {
  const run = page.runs[state.run], rows = run && run.curves.grids[0];
  if (!rows) return;
  const { ctx, bbox } = u;
  ctx.save();
  ctx.setLineDash([4, 4]);
  for (const [, step, tone] of shownMarks()) {
    const row = rows.step.findIndex((s) => s >= step);
    const x = u.valToPos(rows[axis][row < 0 ? rows.step.length - 1 : row], "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = style(tone);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

// ---- maps of colours: a row for each metric, a column for each point

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function ramp(share) {
  const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), i = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[i].map((from, k) => Math.round(from + (RAMP[i + 1][k] - from) * (place - i)));
}

function drawHeat(panel, curves, box, now) {
  const axis = axisOf(panel), { x } = curves[0], length = x.step.length;
  curves = curves.filter((c) => c.x === x);
  let rows = curves.map((c) => c.curve[1]);
  if (panel.even) {
    const even = x.step.map((_, j) => rows.reduce((sum, row) => sum + (row[j] || 0), 0) / rows.length);
    rows = rows.map((row) => row.map((v, j) => (v == null || !even[j] ? null : v / even[j])));
  }
  const known = rows.flat().filter((v) => v != null && (!panel.log || v > 0));
  const scale = panel.log ? Math.log : (v) => v;
  const low = scale(known.reduce((a, b) => Math.min(a, b), Infinity)), high = scale(known.reduce((a, b) => Math.max(a, b), -Infinity));
  const canvas = el("canvas", "heat"), image = new ImageData(length, rows.length);
  rows.forEach((row, i) => row.forEach((v, j) => {
    const shade = v == null ? [128, 128, 128] : ramp(high > low ? (scale(v) - low) / (high - low) : 0.5);
    image.data.set([...shade, v == null ? 40 : 255], 4 * (i * length + j));
  }));
  Object.assign(canvas, { width: length, height: rows.length });
  canvas.style.height = `${Math.min(Math.max(rows.length * 12, 90), 320)}px`;
  canvas.getContext("2d").putImageData(image, 0, 0);
  const unscaled = panel.log ? Math.exp : (v) => v;
  const say = () => (now.textContent = `${shown(unscaled(low), panel.unit)} to ${shown(unscaled(high), panel.unit)}`);
  canvas.addEventListener("mousemove", (event) => {
    const part = canvas.getBoundingClientRect();
    const j = Math.min(length - 1, Math.floor(((event.clientX - part.left) / part.width) * length));
    const i = Math.min(rows.length - 1, Math.floor(((event.clientY - part.top) / part.height) * rows.length));
    if (i >= 0 && j >= 0) now.textContent = `${curves[i].name}: ${shown(rows[i][j], panel.unit)} · ${at(axis, x[axis][j])}`;
  });
  canvas.addEventListener("mouseleave", say);
  say();
  const bar = el("i", "ramp");
  bar.style.background = `linear-gradient(90deg, ${RAMP.map((c) => `rgb(${c.join(",")})`).join(",")})`;
  const name = (c) => el("span", "", c.name);
  box.append(canvas, el("div", "ends", el("span", "", at(axis, x[axis][0])), el("span", "", at(axis, x[axis][length - 1]))));
  box.append(el("div", "ends", el("span", "", `rows: ${curves[0].name} … ${curves[curves.length - 1].name}`), el("span", "", "low ", bar, " high")));
}

function drawBars(panel, curves, box, now) {
  const values = curves.map((c) => [c.name, c.curve[1][c.curve[1].length - 1] || 0]).sort((a, b) => b[1] - a[1]);
  const most = Math.max(...values.map(([, v]) => v)) || 1;
  now.textContent = `${shown(values.reduce((sum, [, v]) => sum + v, 0), panel.unit)} in all · newest step`;
  for (const [name, value] of values) {
    const length = el("i");
    length.style.width = `${(100 * value) / most}%`;
    box.append(el("div", "bar", el("span", "", name), length, el("span", "", shown(value, panel.unit))));
  }
}
