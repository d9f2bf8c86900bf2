// The curves, drawn by uPlot (vendored, VENDOR.md).

import { count, colour, loss } from "./format.js";
import { state } from "./store.js";

const T = 0, SAMPLES = 1, SPEED = 2, TRAIN = 3;
const charts = new Map();
let axis = "time";

export function setAxis(value) {
  axis = value;
  rebuild();
}

export function rebuild() {
  for (const chart of charts.values()) chart.destroy();
  charts.clear();
  update();
}

export function update() {
  if (!state.points.length || typeof uPlot === "undefined") return;
  draw("chart-loss", lossData(), lossOptions);
  draw("chart-speed", speedData(), speedOptions);
}

function draw(id, data, options) {
  const host = document.getElementById(id);
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

function rising(rows, column) {
  const kept = [];
  let last = -Infinity;
  for (const row of rows) {
    if (row[column] > last) {
      kept.push(row);
      last = row[column];
    }
  }
  return kept;
}

function lossData() {
  const byTime = axis === "time";
  const points = rising(state.points, byTime ? T : SAMPLES);
  const measured = rising(byTime ? [...state.validations].sort((a, b) => a[1] - b[1]) : state.validations, byTime ? 1 : 0);
  const first = points.length ? points[0][byTime ? T : SAMPLES] : 0;
  return uPlot.join([
    [points.map((row) => row[byTime ? T : SAMPLES]), points.map((row) => row[TRAIN])],
    [measured.map((row) => Math.max(byTime ? row[1] : row[0], byTime ? first : 0)), measured.map((row) => row[2])],
  ]);
}

function speedData() {
  const points = rising(state.points, T);
  return [points.map((row) => row[T]), points.map((row) => row[SPEED])];
}

function axes(values) {
  const line = { stroke: colour("muted"), font: "12px system-ui", grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  const across = { ...line, grid: { show: false }, space: 96, size: 30 };
  return [across, { ...line, size: 50, values, space: 40 }];
}

function lossOptions() {
  const byTime = axis === "time";
  const bottom = axes((_, ticks) => ticks.map((tick) => tick.toFixed(ticks[1] - ticks[0] < 0.1 ? 2 : 1)));
  if (!byTime) bottom[0].values = (_, ticks) => ticks.map((tick) => count(tick));
  else bottom[0].values = timeValues();
  return {
    scales: { x: { time: byTime, range: (_, low, high) => [low, Math.max(high, low + (byTime ? 30 : 100))] } },
    axes: bottom,
    legend: { show: false },
    padding: [12, 26, 0, 0],
    cursor: { points: { size: 7 }, drag: { x: true, y: false } },
    series: [
      {},
      { stroke: colour("train"), width: 1.6, points: { show: false }, spanGaps: true },
      { stroke: colour("validation"), width: 2.2, points: { show: true, size: 6, fill: colour("validation") }, spanGaps: true },
    ],
    plugins: [marks(), tip((u, index) => [
      ["training", loss(u.data[1][index]), "train"],
      ["validation", loss(u.data[2][index]), "validation"],
    ])],
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
  return (u, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString("en-GB", u.scales.x.max - u.scales.x.min < 600 ? {} : { hour: "2-digit", minute: "2-digit" }));
}

// Small ticks at the foot of the loss curve where a node went: its effect, if any, is seen above.
function marks() {
  return { hooks: { draw: (u) => {
    if (axis !== "time") return;
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
  made.textContent = u.scales.x.time === false ? `${count(x)} samples` : new Date(x * 1000).toLocaleTimeString("en-GB");
  return made;
}

new ResizeObserver(() => update()).observe(document.getElementById("chart-loss"));
