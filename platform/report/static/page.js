// The page of runs: draws its sections of panels from the data in it, and adds new rows while it is served.
"use strict";

let page = JSON.parse(document.getElementById("data").textContent);
const state = { x: "", run: 0, off: new Set(), tab: {}, smooth: 0, log: false, plots: [], charts: [], constants: [], zoomed: false };
const KIND_COLOURS = { useful: "c2", fewer: "c5", lost: "c6", start: "c7", recover: "c1", reshape: "c4", down: "line", rest: "c0" };

const clock = (seconds) => new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });

function table(head, rows, className = "") {
  const cell = (tag) => (text, i) => {
    const kind = head[i] && head[i].kind;
    return el(tag, kind || "", text instanceof Node ? text : text == null ? "" : text);
  };
  const lines = rows.map((row) => el("tr", "", ...row.map(cell("td"))));
  return el("div", `scroll ${className}`, el("table", "", el("thead", "", el("tr", "", ...head.map((h) => h.name).map(cell("th")))), el("tbody", "", ...lines)));
}

const column = (name, kind = "") => ({ name, kind });
const counted = (n, what) => `${n.toLocaleString()} ${what}${n === 1 ? "" : "s"}`;

// ---- what only the page has; each returns whether there was something to draw

const VIEWS = {
  samples(run, box) {
    for (const [step, prompt, text] of [...run.samples].reverse())
      box.append(el("div", "dim", `after step ${step.toLocaleString()}${prompt ? `, asked: ${prompt}` : ""}`), el("pre", "sample", text));
    return run.samples.length;
  },
  traffic(run, box) {
    const rows = run.traffic.map((r) => [r.tier, r.messages, shown(r.bytes, "B"), r.busiest == null ? "" : shown(r.busiest, "B")]);
    box.append(table([column("tier"), column("messages per step", "number"), column("bytes", "number"), column("busiest link", "number")], rows));
    return rows.length;
  },
  account(run, box, now) {
    const shares = Object.entries(run.shares).filter(([, seconds]) => seconds > 0), total = shares.reduce((sum, [, s]) => sum + s, 0);
    if (!run.periods.length || !total) return false;
    now.textContent = `${duration(total)} of drivers`;
    box.append(strip(run));
    const bar = el("div", "share");
    const keys = el("div", "keys");
    for (const [kind, seconds] of shares) {
      const part = el("span");
      part.style.cssText = `width:${(100 * seconds) / total}%;background:${style(KIND_COLOURS[kind])}`;
      bar.append(part);
      keys.append(el("span", "", swatch(style(KIND_COLOURS[kind])), page.kinds[kind], " ", el("span", "dim", `${duration(seconds)}, ${((100 * seconds) / total).toFixed(1)} %`)));
    }
    for (const kind of new Set(run.periods.map(([kind]) => kind)))
      if (!run.shares[kind]) {
        const seconds = run.periods.reduce((sum, [own, start, end]) => sum + (own === kind ? end - start : 0), 0);
        keys.append(el("span", "", swatch(style(KIND_COLOURS[kind])), page.kinds[kind], " ", el("span", "dim", duration(seconds))));
      }
    box.append(bar, keys);
    return true;
  },
  failures(run, box, now) {
    const sum = (i) => run.failures.reduce((all, f) => all + f[i], 0);
    const rows = run.failures.map(([time, step, who, what, stopped, repeated, steps, fewer, all]) =>
      [el("b", "", who), el("b", "", duration(all)), duration(stopped), `${duration(repeated)}${steps ? ` (${counted(steps, "step")})` : ""}`, duration(fewer), step, clock(time), what]);
    if (rows.length) now.textContent = `${duration(sum(8))} of work in all`;
    const numbers = ["cost", "until the next step", "lost steps", "missing workers", "step"].map((name) => column(name, "number"));
    box.append(table([column("who", "whole"), ...numbers, column("when", "whole"), column("what", "text")], rows));
    return rows.length;
  },
  events(run, box, now) {
    if (run.left_out) now.textContent = `${run.left_out} earlier ones are left out`;
    const rows = [...run.events].reverse().map(([time, step, tone, text]) => [duration(time - run.began), step, el("span", tone, text)]);
    box.append(table([column("after", "number"), column("step", "number"), column("event", "text")], rows, "list"));
    return rows.length;
  },
  plan(run, box) {
    if (!run.plan.facts) return false;
    const said = (v) => (typeof v === "object" ? Object.entries(v).map(([k, x]) => `${k} ${x}`).join(", ") : v);
    box.append(table([column(""), column("")], Object.entries(run.plan.facts).map(([k, v]) => [el("span", "dim", k), said(v)]), "facts"));
    const [head, ...rows] = run.plan.table;
    if (head.length > 1) box.append(el("div", "dim remark", "which axis splits which dim"), table(head.map((h) => column(h)), rows));
    return true;
  },
  pictures(run, box) {
    for (const [title, address] of run.pictures) {
      const image = el("img");
      image.alt = `schedule ${title}`;
      image.src = address;
      box.append(el("div", "dim remark", title), el("div", "picture", image));
    }
    return run.pictures.length;
  },
  settings(run, box) {
    const several = page.runs.length > 1, runs = several ? page.runs : [run];
    const keys = [...new Set(runs.flatMap((r) => Object.keys(r.settings)))].sort();
    const differs = (k) => new Set(runs.map((r) => r.settings[k])).size > 1;
    const rows = keys.filter((k) => !several || differs(k)).map((k) => [k, ...runs.map((r) => r.settings[k] ?? "default")]);
    if (several) box.append(el("div", "dim", "what differs between the runs"));
    box.append(table([column("key", "whole"), ...runs.map((r) => column(several ? r.name : "value", "value"))], rows));
    return rows.length;
  },
};

// Draws the time of a run as one bar, with marks where something failed.
function strip(run) {
  const from = run.periods[0][1], to = run.periods[run.periods.length - 1][2], make = (tag, more) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(more)) node.setAttribute(name, value);
    return node;
  };
  const svg = make("svg", { viewBox: "0 0 1000 46", preserveAspectRatio: "none", class: "strip" });
  const x = (time) => (1000 * (time - from)) / (to - from || 1);
  const titled = (node, text) => (node.append(make("title", {})), (node.firstChild.textContent = text), node);
  for (const [kind, start, end] of run.periods)
    svg.append(titled(make("rect", { x: x(start), y: 12, width: Math.max(x(end) - x(start), 0.4), height: 34, fill: style(KIND_COLOURS[kind]) }),
      `${page.kinds[kind]}: ${duration(end - start)}, from ${duration(start - from)} on`));
  for (const [time, , who, what, , , , , cost] of run.failures)
    svg.append(titled(make("rect", { x: x(time) - 1.5, y: 0, width: 3, height: 46, fill: style("bad") }), `${who} ${what}; cost ${duration(cost)}`));
  return el("div", "", svg, el("div", "ends", el("span", "", clock(from)), el("span", "", clock(to))));
}

// ---- the page

const DRAWN = { line: drawLines, stack: drawStack, heat: drawHeat, bars: drawBars, spread: drawSpread };
const WIDE = new Set(["account", "failures", "pictures", "samples"]);

// Draws one of the panels that share a tab, and a choice of the others that have data.
function drawTab(panels, place) {
  const drawn = panels.filter((p) => panelCurves(p).length), chosen = drawn.find((p) => p.title === state.tab[drawn[0].tab]) || drawn[0];
  if (!chosen) return null;
  const said = drawPanel(chosen, place);
  if (drawn.length > 1 && said === "")
    place.lastChild.querySelector("h3").replaceWith(choice(drawn.map((p) => [p.title, p.title]), chosen.title, (title) => (state.tab[chosen.tab] = title)));
  return said;
}

// Returns "" for a panel that was drawn, a line of text for one whose number never changes, null for one without data.
function drawPanel(panel, place) {
  const now = el("span", "now"), box = el("div", "box");
  const card = el("div", WIDE.has(panel.view) || panel.kind === "stack" ? "panel wide" : "panel", el("div", "head", el("h3", "", panel.title), now), box);
  place.append(card); // a chart asks for its width
  const drawChart = () => {
    const curves = panelCurves(panel);
    box.replaceChildren();
    if (curves.length) DRAWN[panel.kind || "line"](panel, curves, box, now);
    return curves.length;
  };
  const curves = panel.view ? [] : panelCurves(panel), value = curves.length ? constant(panel, curves) : null;
  if (value !== null) return card.remove(), state.constants.push(panel), `${panel.title}: ${shown(value, panel.unit)}`;
  let some = true;
  try {
    some = panel.view ? VIEWS[panel.view](page.runs[state.run], box, now) : drawChart();
  } catch (error) {
    box.replaceChildren(el("div", "warn", `cannot be drawn: ${error.message}`)); // no panel keeps others from being drawn
  }
  if (!some) return card.remove(), null;
  if (!panel.view) state.charts.push(drawChart);
  if (panel.note) card.append(el("div", "dim remark", panel.note));
  return "";
}

const drawDetails = (lines) => el("div", "details", ...lines.map((line) => el("div", "dim", line)));

const drawTiles = (run) => el("div", "tiles", ...run.tiles.map(([name, value, remark]) => el("div", "", el("span", "", name), el("b", "", value), el("span", "", remark || "\u00a0"))));

// Shares tiles out among rows evenly; one that is left over fills its row.
function balanceTiles() {
  for (const tiles of document.querySelectorAll(".tiles")) {
    const count = tiles.childElementCount, most = Math.max(1, Math.floor((tiles.clientWidth + 8) / 120));
    const columns = Math.ceil(count / Math.ceil(count / most)) || 1;
    tiles.style.gridTemplateColumns = `repeat(${columns}, 1fr)`;
    if (count) tiles.lastChild.style.gridColumn = count % columns === 1 ? "1 / -1" : "";
  }
}

// Several runs are a table, the best one first: its lowest validation loss, or else its last loss.
function drawComparison() {
  const tile = (run, n) => (run.tiles.find(([name]) => name === n) || [])[1];
  const rank = (run) => run.best ?? Number(tile(run, "loss") ?? Infinity), swept = Object.entries(page.swept);
  const names = [...new Set(page.runs.flatMap((run) => run.tiles.map(([name]) => name)))].filter((n) => n !== "loss" && n !== "validation loss");
  const numbers = (run) => [tile(run, "loss"), run.best == null ? "" : run.best.toFixed(4), ...names.map((n) => tile(run, n))];
  const rows = page.runs.map((run, i) => ({ run, i })).sort((a, b) => rank(a.run) - rank(b.run) || a.i - b.i).map(({ run, i }) =>
    [el("span", "", swatch(colour(i)), run.name), ...swept.map(([, values]) => values[i]), ...numbers(run), el("span", run.state.tone, run.state.line)]);
  const heads = [...swept.map(([key]) => key), "last loss", "best validation loss", ...names].map((n) => column(n, "number"));
  return table([column("run", "whole"), ...heads, column("state", "whole")], rows, "panel");
}

const drawOrigins = (run) => el("dl", "origins", ...run.origins.flatMap(([name, text]) => [el("dt", "", name), el("dd", "", text)]));

function drawHeader() {
  const one = page.runs.length === 1;
  const runs = one ? page.runs : page.runs.filter((run) => run.state.details.length || run.faults.length); // the rest is in the table
  const heads = runs.map((run) => el("div", one ? "run" : "run several", el("h1", "", run.path), el("p", `verdict ${run.state.tone}`, run.state.line),
    drawDetails(run.state.details), ...(one ? [drawTiles(run), drawOrigins(run)] : []), ...run.faults.map((fault) => el("div", "warn", fault))));
  document.getElementById("runs").replaceChildren(...heads, ...(one ? [] : [drawComparison()]));
  balanceTiles();
}

function endCharts() {
  state.plots.splice(0).forEach((plot) => plot.end());
  state.zoomed = false;
}

function draw() {
  endCharts();
  state.charts = [];
  state.constants = [];
  const main = document.getElementById("sections"), nav = document.getElementById("contents"), missing = [];
  const top = window.scrollY;
  main.replaceChildren();
  nav.replaceChildren();
  drawHeader();
  page.sections.forEach((section, i) => {
    const panels = el("div", "panels"), title = el("h2", "", section.title), constants = [];
    title.id = `section-${i}`;
    main.append(title, panels);
    for (const panel of section.panels) {
      const alike = panel.tab ? section.panels.filter((p) => p.tab === panel.tab) : [];
      if (alike.length && alike[0] !== panel) continue;
      const said = alike.length ? drawTab(alike, panels) : drawPanel(panel, panels);
      if (said === null) missing.push(panel.title);
      else if (said) constants.push(said);
    }
    if (constants.length) panels.append(el("div", "constants dim", `All along: ${constants.join(" · ")}`));
    if (!panels.childElementCount) return title.remove(), panels.remove();
    const link = el("a", "", section.title);
    link.href = `#section-${i}`;
    nav.append(link);
  });
  document.getElementById("tools").replaceChildren(...tools());
  const marks = shownMarks().length ? ["Dashed lines in the charts: failures (red) and warnings (amber)."] : [];
  document.getElementById("missing").replaceChildren(...[...marks, ...(missing.length ? [`Without data here: ${missing.join("; ")}.`] : [])].map((line) => el("div", "", line)));
  window.scrollTo(0, top);
}

function choice(entries, value, set) {
  const node = el("select");
  for (const [key, text] of entries) node.append(Object.assign(el("option", "", text), { value: key }));
  node.value = value;
  node.addEventListener("change", () => (set(node.value), draw()));
  return node;
}

function tools() {
  const x = choice([["", "x: tokens or steps"], ["step", "x: steps"], ["tokens", "x: tokens"], ["hours", "x: time of training"]], state.x, (v) => (state.x = v));
  const y = choice([["", "y: linear"], ["log", "y: logarithmic"]], state.log ? "log" : "", (v) => (state.log = v === "log"));
  const run = choice(page.runs.map((r, i) => [String(i), `in detail: ${r.name}`]), String(state.run), (v) => (state.run = Number(v)));
  const slider = Object.assign(el("input"), { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth });
  slider.addEventListener("input", () => ((state.smooth = Number(slider.value)), redrawCharts()));
  return [...(page.runs.length > 1 ? [run] : []), x, y, el("label", "", "smooth ", slider)];
}

draw();
new ResizeObserver(() => (balanceTiles(), state.plots.forEach((plot) => plot.resize()))).observe(document.getElementById("sections"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// ---- a page that is served: what is new comes as events

// Replaces the rows of a run from the first new one on.
function addRows(run, news) {
  const [dense] = run.curves.grids, from = dense.step.findIndex((step) => step >= news.grid.step[0]);
  const kept = from < 0 ? dense.step.length : from;
  for (const axis of Object.keys(dense)) dense[axis].splice(kept, Infinity, ...news.grid[axis]);
  for (const [name, [place, ...columns]] of Object.entries(run.curves.of)) {
    if (place !== 0) continue;
    const values = news.of[name] || news.grid.step.map(() => null);
    for (const column of columns) column.splice(kept, Infinity, ...values);
  }
}

function redraw() {
  if (state.zoomed || document.hidden || !state.stale) return; // it waits until someone can see it
  state.stale = false;
  if (state.constants.some((panel) => constant(panel, panelCurves(panel)) === null)) return draw(); // it has changed now
  redrawCharts();
}

function redrawCharts() {
  endCharts();
  state.charts.forEach((drawChart) => drawChart());
}

function follow() {
  const source = new EventSource(`events?change=${page.change}`), live = document.getElementById("live");
  const on = (kind, act) => source.addEventListener(kind, (event) => act(JSON.parse(event.data)));
  const heads = (states) => (states.forEach((head, i) => Object.assign(page.runs[i], head)), drawHeader());
  on("page", (data) => ((page = data), draw()));
  on("state", ({ states }) => heads(states));
  on("rows", ({ states, rows }) => {
    rows.forEach((news, i) => news.grid.step.length && page.runs[i].curves.grids.length && addRows(page.runs[i], news));
    heads(states);
    state.stale = true;
    redraw();
  });
  source.onopen = () => (live.textContent = "live");
  source.onerror = () => (live.textContent = "not connected: what is shown may be old");
  document.addEventListener("visibilitychange", redraw);
  setInterval(redraw, 1000);
}

if (page.live) follow();
