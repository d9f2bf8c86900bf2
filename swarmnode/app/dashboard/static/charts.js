// The curves, drawn by uPlot (vendored, VENDOR.md).

import { bytes, colour, count, day, loss, write } from "./format.js";
import { state } from "./store.js";

const T = 0, SAMPLES = 1, SPEED = 2, TRAIN = 3;
const GAP_TIMES = 8, GAP_S = 30; // a hole in the curve: so many times its neighbours' distance, and so long
const OTHER_BYTES_MAX = 16 << 20, OTHER_POINTS_MAX = 20000;
const PALETTE = ["train", "validation", "good", "state-syncing", "warn", "bad"];
const at = (id) => document.getElementById(id);
const charts = new Map();
const choice = { axis: "time", log: false, smooth: 0 };

export function set(key, value) {
  choice[key] = value;
  rebuild();
}

export function rebuild() {
  for (const chart of charts.values()) chart.destroy();
  charts.clear();
  update();
  scores();
}

export function update() {
  if (typeof uPlot === "undefined" || !state.run) return;
  at("loss-none").hidden = state.points.length > 0;
  if (!state.points.length) return;
  draw("chart-loss", lossData(), lossOptions);
  draw("chart-speed", speedData(), speedOptions);
}

function draw(id, data, options) {
  const host = at(id);
  const width = host.clientWidth;
  if (!width) return;
  let chart = charts.get(id);
  if (!chart) {
    chart = new uPlot({ ...options(), width, height: host.clientHeight }, data, host);
    charts.set(id, chart);
  } else {
    if (chart.width !== width) chart.setSize({ width, height: host.clientHeight });
    const { min, max } = chart.scales.x;
    const [first, last] = [chart.data[0][0], chart.data[0][chart.data[0].length - 1]];
    const zoomed = chart.data[0].length > 1 && (min > first || max < last);
    chart.setData(data, !zoomed); // who looks at a part of the curve keeps it; a double click shows all again
    if (zoomed) chart.setScale("x", { min, max });
  }
}

// [x, y] of `rows` where x rises; where nothing was seen for long, y is null in between, so that the line breaks.
function line(rows, x, y, t) {
  const xs = [], ys = [];
  let last = -Infinity;
  rows.forEach((row, index) => {
    const here = x(row);
    if (!(here > last)) return;
    const step = index ? t(row) - t(rows[index - 1]) : 0;
    const before = index > 1 ? t(rows[index - 1]) - t(rows[index - 2]) : 0;
    const after = index + 1 < rows.length ? t(rows[index + 1]) - t(row) : 0;
    if (step > GAP_S && step > GAP_TIMES * Math.max(before, after)) {
      xs.push((last + here) / 2);
      ys.push(null);
    }
    xs.push(here);
    ys.push(y(row));
    last = here;
  });
  return [xs, ys];
}

// The exponential mean; it begins anew after a gap.
function smoothed([xs, ys]) {
  let mean = null;
  return [xs, ys.map((y) => {
    mean = y === null ? null : mean === null ? y : choice.smooth * mean + (1 - choice.smooth) * y;
    return mean;
  })];
}

// The curves of one run. `since`: its first moment is shown there, so that two runs begin together.
function curves(run, since) {
  const begin = run.points.length ? run.points[0][T] : 0;
  const shift = since === null ? 0 : since - begin;
  const byTime = choice.axis === "time";
  const positive = (rows, column) => (byTime || !choice.log ? rows : rows.filter((row) => row[column] > 0));
  const train = line(positive(run.points, SAMPLES), (row) => (byTime ? row[T] + shift : row[SAMPLES] * run.context), (row) => row[TRAIN], (row) => row[T]);
  const measured = positive(byTime ? [...run.validations].sort((a, b) => a[1] - b[1]) : run.validations, 0);
  const validation = line(measured, (row) => (byTime ? Math.max(row[1], begin) + shift : row[0] * run.context), (row) => row[2], (row) => row[1]);
  return [train, validation];
}

function lossData() {
  const own = { points: state.points, validations: state.validations, context: state.run.context };
  const [train, validation] = curves(own, null);
  const tables = [train, smoothed(train), validation];
  if (state.other) {
    const [theirs, measured] = curves(state.other, state.points[0][T]);
    tables.push(smoothed(theirs), measured);
  }
  return uPlot.join(tables, tables.map(() => [0, 2])); // a gap reaches to the next point of its own curve
}

function speedData() {
  return line(state.points, (row) => row[T], (row) => row[SPEED], (row) => row[T]);
}

function axes(values) {
  const look = { stroke: colour("muted"), font: "12px system-ui", grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  const across = { ...look, grid: { show: false }, space: 96, size: 30 };
  return [across, { ...look, size: 50, values, space: 40 }];
}

// 1, 2 and 5 of each power of ten within [low, high]; for less than a decade, ten even steps.
function logSplits(u, axis, low, high) {
  const found = [];
  if (high / low < 8) {
    const step = 10 ** Math.floor(Math.log10((high - low) / 4));
    const wide = [1, 2, 5, 10].map((times) => times * step).find((each) => (high - low) / each <= 6);
    for (let tick = Math.ceil(low / wide) * wide; tick <= high; tick += wide) found.push(tick);
    return found;
  }
  const firsts = high / low > 1e4 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const first of firsts) if (first * 10 ** power >= low && first * 10 ** power <= high) found.push(first * 10 ** power);
  }
  return found;
}

function lossOptions() {
  const byTime = choice.axis === "time", logX = choice.log && !byTime;
  const bottom = axes((_, ticks) => ticks.map((tick) => tick.toFixed(ticks[1] - ticks[0] < 0.1 ? 2 : 1)));
  if (!byTime) bottom[0].values = (_, ticks) => ticks.map((tick) => count(tick));
  else bottom[0].values = timeValues();
  if (logX) bottom[0].splits = logSplits;
  if (choice.log) bottom[1].splits = logSplits;
  const wide = (_, low, high) => [low, logX ? Math.max(high, low * 2) : Math.max(high, low + (byTime ? 30 : 100))];
  const curve = (key, width, more) => ({ stroke: colour(key), width, points: { show: false }, ...more });
  const dots = (key) => ({ points: { show: true, size: 6, fill: colour(key) } });
  const series = [{}, curve("train", 1, { alpha: 0.3, show: choice.smooth > 0 }), curve("train", 1.8), curve("validation", 2, dots("validation"))];
  if (state.other) series.push(curve("good", 1.8), curve("good", 1.4, { dash: [6, 4], ...dots("good") }));
  const names = [["training", "train"], ["smoothed", "train"], ["validation", "validation"], [state.other?.name, "good"], [`${state.other?.name}, validation`, "good"]];
  return {
    scales: { x: { time: byTime, range: wide, ...(logX ? { distr: 3 } : {}) }, y: choice.log ? { distr: 3, range: (_, low, high) => [low * 0.98, high * 1.02] } : {} },
    axes: bottom, legend: { show: false }, padding: [12, 26, 0, 0], cursor: { points: { size: 7 }, drag: { x: true, y: false } }, series,
    plugins: [marks(), tip((u, index) => series.slice(1).map((_, each) => [names[each][0], loss(u.data[each + 1][index]), names[each][1]])
      .filter(([name]) => choice.smooth || name !== "smoothed"))],
  };
}

function speedOptions() {
  const bottom = axes((_, ticks) => ticks.map((tick) => count(tick)));
  bottom[0].values = timeValues();
  return {
    axes: bottom,
    scales: { x: { range: (_, low, high) => [low, Math.max(high, low + 30)] }, y: { range: (_, low, high) => [0, Math.max(1, high) * 1.1] } },
    legend: { show: false },
    padding: [8, 26, 0, 0],
    cursor: { points: { size: 7 }, drag: { x: true, y: false } },
    series: [{}, { stroke: colour("train"), width: 1.6, fill: colour("wash"), points: { show: false } }],
    plugins: [tip((u, index) => [["tokens/s", count(u.data[1][index]), "train"]])],
  };
}

function timeValues() {
  return (u, ticks) => ticks.map((tick) => {
    const wide = u.scales.x.max - u.scales.x.min, date = new Date(tick * 1000);
    if (wide > 3 * 86400) return date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    return date.toLocaleTimeString("en-GB", wide < 600 ? {} : { hour: "2-digit", minute: "2-digit" });
  });
}

// Small ticks at the foot of the loss curve where a node went: its effect, if any, is seen above.
function marks() {
  return { hooks: { draw: (u) => {
    if (choice.axis !== "time") return;
    const { ctx, bbox } = u;
    ctx.save();
    ctx.fillStyle = colour("bad");
    for (const entry of state.entries) {
      if (entry.kind !== "departure" || entry.level === "info") continue;
      const x = u.valToPos(entry.t, "x", true);
      if (x >= bbox.left && x <= bbox.left + bbox.width) ctx.fillRect(Math.round(x) - 1, bbox.top + bbox.height - 10 * devicePixelRatio, 2 * devicePixelRatio, 10 * devicePixelRatio);
    }
    ctx.restore();
  } } };
}

function tip(rows) {
  let box;
  return { hooks: {
    init: (u) => {
      box = document.createElement("div");
      box.className = "tip";
      box.hidden = true;
      u.over.append(box);
      u.over.addEventListener("mouseleave", () => { box.hidden = true; });
    },
    setCursor: (u) => {
      const index = u.cursor.idx;
      if (index === null || index === undefined || u.cursor.left < 0) return void (box.hidden = true);
      const x = u.data[0][index];
      box.replaceChildren(head(u, x), ...rows(u, index).filter((row) => row[1] !== "–").map(([name, value, key]) => {
        const line = document.createElement("div");
        line.className = `key ${key}`;
        line.textContent = `${name} ${value}`;
        return line;
      }));
      box.hidden = false;
      const left = u.cursor.left > u.over.clientWidth / 2 ? u.cursor.left - box.offsetWidth - 14 : u.cursor.left + 14;
      box.style.transform = `translate(${left}px, 8px)`;
    },
  } };
}

function head(u, x) {
  const made = document.createElement("b");
  made.textContent = u.scales.x.time === false ? `${count(x)} tokens` : `${day(x)}:${String(new Date(x * 1000).getSeconds()).padStart(2, "0")}`;
  return made;
}

// One small chart for each unit in which checkpoints are scored.
export function scores() {
  const host = at("chart-scores");
  if (typeof uPlot === "undefined" || !state.run || !host.clientWidth && !host.hidden) return;
  const all = state.models.flatMap((model) => model.scores.map((score) => ({ ...score, x: model.samples * state.run.context, label: model.round })));
  const units = [...new Set(all.map((score) => score.metric))].slice(0, 4);
  host.hidden = !units.length;
  for (const [id, chart] of charts) if (id.startsWith("score ")) { chart.destroy(); charts.delete(id); }
  host.replaceChildren(...units.map((unit) => {
    const box = document.createElement("figure"), title = document.createElement("figcaption"), plot = document.createElement("div");
    const names = [...new Set(all.filter((score) => score.metric === unit).map((score) => score.name))].slice(0, PALETTE.length);
    title.append(`${unit} `, ...names.map((name, index) => {
      const newest = all.filter((score) => score.metric === unit && score.name === name).at(-1);
      const key = document.createElement("span");
      key.className = "key";
      key.style.setProperty("--key", colour(PALETTE[index]));
      key.textContent = `${name} ${newest.value.toPrecision(4)}`;
      return key;
    }));
    plot.className = "chart";
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${names.join(", ")} in ${unit} over tokens`);
    box.append(title, plot);
    requestAnimationFrame(() => {
      if (!plot.clientWidth) return;
      const table = uPlot.join(names.map((name) => {
        const rows = all.filter((score) => score.metric === unit && score.name === name);
        return [rows.map((score) => score.x), rows.map((score) => score.value)];
      }));
      const lower = axes((_, ticks) => ticks.map((tick) => tick.toPrecision(3)));
      lower[0].values = (_, ticks) => ticks.map((tick) => count(tick));
      charts.set(`score ${unit}`, new uPlot({ width: plot.clientWidth, height: plot.clientHeight, legend: { show: false }, padding: [8, 26, 0, 0],
        cursor: { y: false, drag: { x: false, y: false } }, axes: lower, scales: { x: { time: false, range: (_, low, high) => [low, Math.max(high, low + 100)] } },
        series: [{}, ...names.map((_, index) => ({ stroke: colour(PALETTE[index]), width: 1.8, points: { show: true, size: 5, fill: colour(PALETTE[index]) } }))] }, table, plot));
    });
    return box;
  }));
}

// The curves as a table: one line a point, then one a validation.
export function csv() {
  const number = (value) => (value === null || value === undefined ? "" : value);
  const context = state.run.context;
  const rows = ["unix_s,samples,tokens,tokens_per_s,loss_train,loss_validation,nodes,serving,round,sent_bytes,gossip_bytes"];
  for (const [t, samples, speed, train, ...rest] of state.points) rows.push([t, samples, samples * context, speed, number(train), "", ...rest].join(","));
  for (const [samples, t, value] of state.validations) rows.push([t, samples, samples * context, "", "", value, "", "", "", "", ""].join(","));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${rows.join("\n")}\n`], { type: "text/csv" }));
  link.download = `${state.run.name}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Lay another run's curves over this one's: `file` is what "JSON" saves on that run's page.
export async function compare(file) {
  try {
    if (file.size > OTHER_BYTES_MAX) throw new Error(`larger than ${bytes(OTHER_BYTES_MAX)}`);
    const tree = JSON.parse(await file.text());
    const table = (rows, columns, wide) => {
      const fine = Array.isArray(rows) && rows.length <= OTHER_POINTS_MAX && rows.every((row) => Array.isArray(row) && row.length >= wide
        && columns.every((column) => Number.isFinite(row[column])));
      if (!fine) throw new Error("not the curves of a run");
      return rows;
    };
    const points = table(tree.points, [T, SAMPLES], TRAIN + 1).map((row) => row.map((value) => (Number.isFinite(value) ? value : null)));
    const context = Number.isFinite(tree.context) && tree.context > 0 ? tree.context : state.run.context;
    state.other = { name: String(tree.name || file.name).slice(0, 60), context, points, validations: table(tree.validations, [0, 1, 2], 3) };
    write(at("other-name"), `${state.other.name}: loss ${loss(points.filter((row) => row[TRAIN] !== null).at(-1)?.[TRAIN])} after ${count((points.at(-1)?.[SAMPLES] || 0) * context)} tokens`);
  } catch (error) {
    state.other = null;
    write(at("other-name"), `${file.name.slice(0, 60)} cannot be shown: ${error.message.slice(0, 80)}. Save it with “JSON” on another run's page.`);
  }
  at("other").hidden = false;
  at("other-name").className = state.other ? "key good" : "";
  rebuild();
}

export function alone() {
  state.other = null;
  at("other").hidden = true;
  rebuild();
}

let wide = 0;
new ResizeObserver(([entry]) => {
  update();
  if (Math.abs(entry.contentRect.width - wide) > 4) scores();
  wide = entry.contentRect.width;
}).observe(at("chart-loss"));
