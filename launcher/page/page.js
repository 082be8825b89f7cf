"use strict";
// The JSON of the page becomes elements and charts. What others wrote is only ever set as text, never as markup.

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A"]; // Okabe and Ito, 2008
const DASHES = ["solid", "dash", "dot", "dashdot"]; // so that curves differ by more than their colour
const FULL_SCALE = { logprob: 5, gap: 0.5, advantage: 2 }; // nats, nats, deviations
const LEGENDS = {
  logprob: "the darker, the less likely the generator found the token",
  gap: "the darker, the further generator and trainer are apart",
  advantage: "blue: made likelier; orange: made less likely",
};
const COLUMNS = ["step", "name", "reward", "advantage", "length", "staleness", "gap", "prompt", "said"];
const SMOOTH_FROM = 30; // points
const MOST_LINES = 60; // of events, on one chart
const CHART = { displaylogo: false, plotlyServerURL: "", responsive: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]] };

let data = JSON.parse(byId("data").textContent);
let text = null; // of the newest data, to see whether there is something new
const drawn = new Set(); // names of trials
const shown = new Set(); // names of numbers
let chosen = null; // name of the trial that all but the curves is about

function byId(id) {
  return document.getElementById(id);
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.map((child) => (child instanceof Node ? child : visible(child))));
  return made;
}

// Control characters have no picture of their own.
function visible(value) {
  return String(value).replace(/[\x00-\x08\x0b-\x1f\x7f]/g, (one) => (one === "\x7f" ? "\u2421" : String.fromCharCode(0x2400 + one.charCodeAt(0))));
}

// The chart library takes some markup in its texts.
function plain(value) {
  return visible(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/%/g, "&#37;");
}

function number(value) {
  return value === null || value === undefined ? "-" : String(Number(value.toPrecision(4)));
}

function trial() {
  return data.trials.find((one) => one.name === chosen);
}

function interpolate(from, to, value) {
  let low = 0;
  let high = from.length - 1;
  if (high < 1 || value <= from[0]) return to[0];
  if (value >= from[high]) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle;
    else high = middle;
  }
  return to[low] + ((to[high] - to[low]) * (value - from[low])) / (from[high] - from[low]);
}

// Curves

function xAxis() {
  const kind = document.querySelector("input[name=x]:checked").value;
  if (kind !== "time") return { title: kind === "step" ? "train step" : "tokens trained on", of: (one, step) => (kind === "step" ? step : interpolate(one.axes.step, one.axes.tokens, step)) };
  const spans = data.trials.filter((one) => drawn.has(one.name) && one.axes.time.length).map((one) => one.axes.time.at(-1) - one.axes.time[0]);
  const [unit, seconds] = Math.max(...spans) > 7200 ? ["hours", 3600] : Math.max(...spans) > 300 ? ["minutes", 60] : ["seconds", 1];
  return { title: unit + " since the first line", of: (one, step) => (interpolate(one.axes.step, one.axes.time, step) - one.axes.time[0]) / seconds };
}

function smoothed(values) {
  const half = Math.max(2, Math.floor(values.length / 40));
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, at) => {
    const first = Math.max(0, at - half);
    const end = Math.min(values.length, at + half + 1);
    return (sums[end] - sums[first]) / (end - first);
  });
}

function style() {
  const colours = getComputedStyle(document.documentElement);
  const [ink, line, paper] = ["--ink", "--line", "--paper"].map((name) => colours.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const layout = {
    paper_bgcolor: paper, plot_bgcolor: paper, font: { color: ink, size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink } }, margin: { l: 50, r: 15, t: 50, b: 40 },
    legend: { orientation: "h", yref: "container", yanchor: "top", y: 1, x: 0 },
  };
  return { axis, layout, ink, line };
}

function curveTraces(one, name, place, axes, x, isFirst) {
  const curve = one.curves[name];
  const number = data.trials.indexOf(one);
  const isAlone = drawn.size < 2;
  const color = COLOURS[(isAlone ? place : number) % COLOURS.length];
  const isLong = byId("smooth").checked && curve.steps.length > SMOOTH_FROM;
  const common = { x: curve.steps.map((step) => x.of(one, step)), ...axes, type: "scatter", legendgroup: one.name };
  const line = { color, width: 2, dash: isAlone ? "solid" : DASHES[Math.floor(number / COLOURS.length) % DASHES.length] };
  const main = {
    ...common, y: isLong ? smoothed(curve.values) : curve.values, line, mode: isLong ? "lines" : "lines+markers", marker: { size: 4 },
    name: plain(isAlone ? name : one.name), showlegend: isAlone ? byId("together").checked : isFirst,
    customdata: curve.values, hovertemplate: plain(name) + " %{customdata:.4g}<extra>" + (isAlone ? "" : plain(one.name)) + "</extra>",
  };
  return isLong ? [{ ...common, y: curve.values, line: { color, width: 1 }, opacity: 0.3, mode: "lines", hoverinfo: "skip", showlegend: false }, main] : [main];
}

function marks(x) {
  const one = trial();
  if (!drawn.has(chosen) || !one.axes.time.length) return [];
  const found = one.events.filter((event) => event.is_mark).slice(-MOST_LINES);
  return found.map((event) => ({ ...event, x: x.of(one, interpolate(one.axes.time, one.axes.step, event.time)) }));
}

function drawCurves() {
  const names = [...shown];
  const isTogether = byId("together").checked;
  const rows = isTogether ? 1 : names.length;
  const columns = !isTogether && rows > 1 && byId("curve-chart").clientWidth > 850 ? 2 : 1;
  const x = xAxis();
  const { axis, layout, ink } = style();
  const traces = [];
  const inLegend = new Set();
  Object.assign(layout, { shapes: [], annotations: [], hovermode: "x unified", uirevision: x.title, height: 70 + (isTogether ? 380 : 200 * Math.ceil(rows / columns)) });
  if (!isTogether) layout.grid = { rows: Math.ceil(rows / columns), columns, pattern: "independent", ygap: 0.32, xgap: 0.12 };
  const events = marks(x);
  names.forEach((name, place) => {
    const number = place ? place + 1 : "";
    const [xref, yref] = [isTogether ? "x" : "x" + number, "y" + number];
    const isLast = place >= names.length - columns;
    layout["xaxis" + (isTogether ? "" : number)] = { ...axis, matches: place && !isTogether ? "x" : undefined, title: isTogether || isLast ? { text: x.title } : undefined };
    layout["yaxis" + number] = { ...axis, type: byId("log").checked ? "log" : "linear", nticks: 5 };
    if (isTogether) Object.assign(layout["yaxis" + number], { title: { text: plain(name), font: { color: COLOURS[place % COLOURS.length] } } }, place ? { overlaying: "y", anchor: "free", autoshift: true, side: place % 2 ? "right" : "left", showgrid: false } : {});
    else layout.annotations.push({ text: plain(name), xref: xref + " domain", yref: yref + " domain", x: 0, y: 1, xanchor: "left", yanchor: "bottom", showarrow: false });
    const all = data.trials.filter((one) => drawn.has(one.name));
    const having = all.filter((one) => one.curves[name]);
    traces.push(...having.flatMap((one) => curveTraces(one, name, place, { xaxis: xref, yaxis: yref }, x, !inLegend.has(one.name))));
    having.forEach((one) => inLegend.add(one.name));
    if (!having.length && !isTogether) {
      // A panel has a height only if something is drawn in it.
      traces.push({ x: [null], y: [null], xaxis: xref, yaxis: yref, type: "scatter", showlegend: false, hoverinfo: "skip" });
      layout.annotations.push({ text: "no data", xref: xref + " domain", yref: yref + " domain", x: 0.5, y: 0.5, showarrow: false });
    }
    if (isTogether && place) return;
    for (const event of events) {
      layout.shapes.push({ type: "line", xref, yref: yref + " domain", x0: event.x, x1: event.x, y0: 0, y1: 1, line: { color: event.is_break ? COLOURS[1] : ink, width: 1, dash: "dot" }, layer: "below" });
    }
    const values = all.flatMap((one) => one.curves[name]?.values ?? []);
    const low = values.reduce((least, value) => Math.min(least, value), Infinity);
    if (events.length && values.length) {
      traces.push({ x: events.map((event) => event.x), y: events.map(() => low), text: events.map((event) => plain(event.text)), xaxis: xref, yaxis: yref, type: "scatter", mode: "markers", showlegend: false,
        marker: { symbol: events.map((event) => (event.is_break ? "x" : "triangle-up")), color: events.map((event) => (event.is_break ? COLOURS[1] : ink)), size: 8 }, hovertemplate: "%{text}<extra></extra>" });
    }
  });
  byId("marks-hint").textContent = names.length ? "Dotted lines: events; crosses are those that interrupt. Point at them, or see the list below." : "Nothing is drawn: choose numbers above, once there are some.";
  return Plotly.react("curve-chart", traces, layout, CHART);
}

function listMetrics() {
  const all = new Set(data.trials.flatMap((one) => Object.keys(one.curves)));
  if (!shown.size) for (const one of data.trials) for (const name of one.shown) shown.add(name);
  const wanted = byId("find-metric").value.toLowerCase();
  const boxes = [...all].sort().filter((name) => name.toLowerCase().includes(wanted)).map((name) => {
    const box = element("input", { type: "checkbox", checked: shown.has(name) });
    box.addEventListener("change", () => { box.checked ? shown.add(name) : shown.delete(name); drawCurves(); });
    return element("label", {}, box, name);
  });
  byId("metric-list").replaceChildren(...boxes);
}

// Trials

function listTrials() {
  byId("trials").hidden = data.trials.length < 2;
  byId("trials-left-out").textContent = data.left_out ? data.left_out + " older ones are not here; name them to see them" : "";
  byId("trial-rows").replaceChildren(...data.trials.map((one) => {
    const box = element("input", { type: "checkbox", checked: drawn.has(one.name), ariaLabel: "draw " + one.name });
    box.addEventListener("change", () => { box.checked ? drawn.add(one.name) : drawn.delete(one.name); drawCurves(); });
    const button = element("button", { type: "button" }, one.name);
    button.setAttribute("aria-pressed", String(one.name === chosen));
    button.addEventListener("click", () => { chosen = one.name; drawn.add(chosen); draw(); });
    const of = one.total_steps ? "/" + one.total_steps : "";
    return element("tr", {}, element("td", {}, box), element("td", {}, button, one.name === chosen ? " (chosen)" : ""), element("td", {}, one.state), element("td", { className: "number" }, number(one.step) + of), element("td", {}, one.numbers || one.note));
  }));
}

function tellState() {
  const one = trial();
  const of = one.total_steps ? "/" + one.total_steps : "";
  const parts = [element("span", { className: "state" }, one.state), ` ${data.trials.length > 1 ? chosen + ", " : ""}step ${number(one.step)}${of}`, one.numbers && `, ${one.numbers}`, one.note && `: ${one.note}`];
  byId("headline").replaceChildren(...parts.filter(Boolean).map((part) => (part instanceof Node ? part : visible(part))));
  byId("status-text").textContent = visible(one.status);
}

// Where a step's time goes

function drawTimes() {
  const times = trial().times;
  if (!times) return;
  const { axis, layout, ink, line } = style();
  const names = Object.keys(times.typical.calls);
  const steps = times.bars.map((bar) => bar.step);
  const bar = (name, y, marker) => ({ type: "bar", name: plain(name), x: steps, y, marker, hovertemplate: plain(name) + " %{y:.3g} s<extra></extra>" });
  const traces = names.map((name, place) => bar(name, times.bars.map((one) => one.calls[name]?.run_s ?? 0), { color: COLOURS[place % COLOURS.length] }));
  traces.push(bar("commit", times.bars.map((one) => one.commit_s), { color: line, pattern: { shape: "x", fgcolor: ink } }));
  traces.push(bar("wait for a batch", times.bars.map((one) => one.wait_s), { color: line }));
  traces.push({ type: "scatter", mode: "markers", name: "whole step", x: steps, y: times.bars.map((one) => one.wall_s), marker: { symbol: "line-ew-open", size: 9, color: ink }, hovertemplate: "whole step %{y:.3g} s<extra></extra>" });
  Plotly.react("bars", traces, { ...layout, barmode: "stack", hovermode: "x unified", height: 320, xaxis: { ...axis, title: { text: "train step" } }, yaxis: { ...axis, title: { text: "seconds" } } }, CHART);
  const rows = [["inputs_s", "waits for inputs", { color: line }], ["ranks_s", "waits for its workers", { color: line, pattern: { shape: "/", fgcolor: ink } }], ["run_s", "runs", { color: names.map((_, place) => COLOURS[place % COLOURS.length]) }]];
  const typical = rows.map(([part, name, marker]) => ({ type: "bar", orientation: "h", name, y: names.map(plain), x: names.map((call) => times.typical.calls[call][part]), marker, hovertemplate: name + " %{x:.3g} s<extra>%{y}</extra>" }));
  Plotly.react("typical", typical, { ...layout, barmode: "stack", showlegend: true, height: 120 + 34 * names.length, xaxis: { ...axis, title: { text: "seconds from the start of a mean step" } }, yaxis: { ...axis, autorange: "reversed" } }, CHART);
  byId("times-hint").textContent = "Where a bar is higher than its mark, calls ran at the same time." + (times.bars.length > 1 && steps[0] % 1 ? " A bar is the mean of several steps." : "");
}

function drawTimeline() {
  const timeline = trial().timeline;
  if (!timeline) return;
  const { axis, layout } = style();
  const rows = [...new Set(timeline.spans.map((span) => span.row))];
  const traces = [...new Set(timeline.spans.map((span) => span.kind))].map((kind, place) => {
    const spans = timeline.spans.filter((span) => span.kind === kind);
    return { type: "bar", orientation: "h", name: plain(kind), y: spans.map((span) => plain(span.row)), base: spans.map((span) => span.start_s), x: spans.map((span) => span.seconds), text: spans.map((span) => plain(span.what)), textposition: "none",
      marker: { color: COLOURS[place % COLOURS.length], opacity: 0.75, line: { color: layout.paper_bgcolor, width: 1 } }, hovertemplate: "%{text}: %{x:.3g} s from %{base:.3f} s<extra>%{y}</extra>" };
  });
  Plotly.react("spans", traces, { ...layout, barmode: "overlay", showlegend: true, height: 130 + 22 * rows.length, xaxis: { ...axis, title: { text: `seconds, steps ${timeline.first} to ${timeline.last}` } }, yaxis: { ...axis, autorange: "reversed", dtick: 1 } }, CHART);
  byId("timeline-said").textContent = visible(timeline.said.join("\n"));
  byId("timeline-hint").textContent = `rl-trace ${chosen} -o FILE shows any steps in ui.perfetto.dev.` + (timeline.left_out ? ` ${timeline.left_out} short spans are not here.` : "");
}

// Answers

function listAnswers() {
  const answers = trial().answers;
  byId("answers").hidden = !answers || !answers.rows.length;
  if (byId("answers").hidden) return;
  const key = byId("sort-answers").value;
  const sign = byId("falling").checked ? -1 : 1;
  const wanted = byId("find-answer").value.toLowerCase();
  const found = answers.rows.filter((row) => [row.name, row.prompt, row.said, row.remarks].some((value) => value.toLowerCase().includes(wanted)));
  found.sort((a, b) => sign * (typeof a[key] === "string" ? a[key].localeCompare(b[key]) : (a[key] ?? -Infinity) - (b[key] ?? -Infinity)));
  byId("answer-rows").replaceChildren(...found.map((row) => {
    const button = element("button", { type: "button" }, row.name);
    button.addEventListener("click", () => openAnswer(row));
    const cells = COLUMNS.map((name) => {
      if (name === "name") return element("td", { className: "number" }, button);
      if (name === "prompt") return element("td", { className: "said" }, row.prompt.slice(-60));
      if (name === "said") return element("td", { className: "said" }, row.said.slice(0, 300));
      return element("td", { className: "number" }, number(row[name]) + (name === "length" && row.is_cut ? "\u2026" : ""));
    });
    return element("tr", {}, ...cells);
  }));
  byId("answers-hint").textContent = `${found.length} of ${answers.rows.length} answers, those of least and of most reward, from ${answers.of_steps} steps that are kept; rl-samples ${chosen} --step all shows the others.`;
}

function openAnswer(row) {
  const dialog = byId("answer");
  byId("answer-title").textContent = visible(row.name);
  byId("answer-facts").textContent = `step ${row.step}, reward ${number(row.reward)}, advantage ${number(row.advantage)}, ${row.length} tokens made${row.is_cut ? ", cut off" : ""}, age ${row.staleness}${Object.entries(row.parts).map(([name, value]) => `, ${name} ${number(value)}`).join("")}`;
  byId("answer-remarks").textContent = visible(row.remarks);
  byId("colour").onchange = () => colourAnswer(row);
  colourAnswer(row);
  dialog.showModal();
}

function colourAnswer(row) {
  const kind = byId("colour").value;
  byId("legend").textContent = LEGENDS[kind] + "; grey: given";
  const tokens = row.tokens;
  if (!tokens) {
    byId("answer-text").replaceChildren(element("span", { className: "given" }, row.prompt), visible(row.said));
    return;
  }
  const starts = tokens.made.map((one, at) => at).filter((at) => tokens.made[at] !== tokens.made[at - 1]);
  const spans = tokens.texts.flatMap((said, at) => {
    const turn = starts.indexOf(at);
    const size = (starts[turn + 1] ?? tokens.made.length) - at;
    const heading = turn < 0 || starts.length < 3 ? [] : [element("h3", {}, `${size} tokens ${tokens.made[at] ? "made" : "given"}`)];
    if (!tokens.made[at]) return [...heading, element("span", { className: "given" }, said)];
    const span = element("span", { title: Object.keys(FULL_SCALE).map((name) => `${name} ${tokens[name][at] ?? "-"}`).join(", ") }, said);
    const value = tokens[kind][at] ?? 0;
    const share = Math.min(1, Math.abs(value) / FULL_SCALE[kind]);
    span.style.backgroundColor = `rgb(${kind === "advantage" && value > 0 ? "0 114 178" : "213 94 0"} / ${0.7 * share})`;
    return [...heading, span];
  });
  if (row.tokens_left_out) spans.push(element("span", { className: "hint" }, ` ... ${row.tokens_left_out} more tokens: rl-samples ${chosen} --step ${row.step} --show ${row.name}`));
  byId("answer-text").replaceChildren(...spans);
}

// Events, calls, settings

function listEvents() {
  const one = trial();
  byId("events").hidden = !one.events.length;
  const rows = one.events.toReversed().map((event) => {
    const step = one.axes.step.length && event.time >= one.axes.time[0] ? Math.floor(interpolate(one.axes.time, one.axes.step, event.time)) : "-";
    const when = new Date(1000 * event.time).toLocaleString();
    return element("tr", { className: event.is_break ? "break" : "" }, element("td", { className: "number" }, when), element("td", { className: "number" }, step), element("td", {}, event.text));
  });
  byId("event-rows").replaceChildren(...rows);
  byId("events-hint").textContent = one.events_left_out ? `${one.events_left_out} earlier ones are in events.jsonl of its directory` : "";
}

function drawGraph() {
  const graph = trial().graph;
  byId("graph").hidden = !graph;
  if (!graph) return;
  byId("graph-hint").textContent = `Of ${graph.step}: a row gives, a column takes; what is left of the diagonal comes back in the next step.`;
  const rows = graph.nodes.map((from) => element("tr", {}, ...graph.nodes.map((to) => {
    if (from === to) return element("th", { scope: "row" }, element("strong", {}, from.name), ...from.lines.map((line) => element("span", {}, line)));
    const edges = graph.edges.filter((edge) => edge.start === from.name && edge.ends.includes(to.name));
    return element("td", { className: edges.some((edge) => edge.is_weights) ? "weights" : "" }, edges.map((edge) => edge.label).join(", "));
  })));
  byId("graph-table").replaceChildren(...rows);
}

function listSettings() {
  const others = data.trials.filter((one) => one.name !== chosen);
  // Of two trials the other one is compared with, until something else is chosen.
  const before = byId("beside").options.length || others.length !== 1 ? byId("beside").value : others[0].name;
  byId("beside-label").hidden = byId("differing-label").hidden = !others.length;
  byId("beside").replaceChildren(...["", ...others.map((one) => one.name)].map((name) => element("option", { value: name, selected: name === before }, name || "no other")));
  const other = others.find((one) => one.name === byId("beside").value);
  const own = trial().settings;
  const wanted = byId("find-setting").value.toLowerCase();
  let keys = Object.keys({ ...own, ...other?.settings }).sort().filter((key) => `${key} ${own[key]}`.toLowerCase().includes(wanted));
  if (other && byId("differing").checked) keys = keys.filter((key) => own[key] !== other.settings[key]);
  byId("setting-head").replaceChildren(...["Setting", chosen, ...(other ? [other.name] : [])].map((name) => element("th", {}, name)));
  const cells = (key) => [own, ...(other ? [other.settings] : [])].map((settings) => element("td", { className: "value" }, settings[key] ?? "-"));
  byId("setting-rows").replaceChildren(...keys.map((key) => element("tr", {}, element("td", {}, key), ...cells(key))));
}

function drawTexts() {
  if (!data.trials.some((one) => one.name === chosen)) chosen = data.trials.at(-1).name;
  if (!drawn.size) for (const one of data.trials) if (one.name === chosen || data.trials.length <= COLOURS.length) drawn.add(one.name);
  listTrials();
  tellState();
  listMetrics();
  listAnswers();
  listEvents();
  drawGraph();
  listSettings();
}

// What is not in view is drawn when it comes near it.
const DRAWS = { times: drawTimes, timeline: drawTimeline };
const near = new IntersectionObserver((seen) => {
  for (const { target } of seen.filter((one) => one.isIntersecting)) {
    near.unobserve(target);
    DRAWS[target.id]();
  }
}, { rootMargin: "50% 0px" });

function drawCharts() {
  for (const id of Object.keys(DRAWS)) {
    byId(id).hidden = !trial()[id];
    near.observe(byId(id));
  }
  return drawCurves();
}

function draw() {
  drawTexts();
  return drawCharts();
}

async function refresh() {
  try {
    const answer = await fetch("data");
    if (!answer.ok) throw new Error(String(answer.status));
    const newer = await answer.text();
    document.body.dataset.refreshed = String(Date.now());
    if (newer === text) return;
    [text, data] = [newer, JSON.parse(newer)];
    await draw();
  } catch (error) {
    byId("headline").textContent = `rl-view does not answer any more (${error.message}); this is the last that is known`;
  }
}

function begin() {
  const on = (id, event, then) => byId(id).addEventListener(event, then);
  for (const radio of document.querySelectorAll("input[name=x]")) radio.addEventListener("change", drawCurves);
  for (const id of ["smooth", "log", "together"]) on(id, "change", drawCurves);
  on("find-metric", "input", listMetrics);
  on("find-answer", "input", listAnswers);
  on("falling", "change", listAnswers);
  on("sort-answers", "change", listAnswers);
  for (const id of ["beside", "differing"]) on(id, "change", listSettings);
  on("find-setting", "input", listSettings);
  on("close", "click", () => byId("answer").close());
  byId("sort-answers").replaceChildren(...COLUMNS.map((name) => element("option", { value: name }, name)));
  byId("answer-head").replaceChildren(...COLUMNS.map((name) => element("th", {}, name)));
  drawTexts();
  document.body.dataset.readableMs = String(performance.now());
  setTimeout(beginCharts, 50); // compiling the chart library takes a second: what can be read is there before
}

async function beginCharts() {
  document.body.append(Object.assign(document.createElement("script"), { textContent: byId("chart-library").textContent }));
  await drawCharts();
  document.body.dataset.drawnMs = String(performance.now());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const seconds = Number(document.body.dataset.refreshS);
  if (seconds) setInterval(refresh, 1000 * seconds);
}

begin();
