// Who talks to whom. Few nodes: a map, a column a stage, width by bytes, colour by round trip, dashes for relays. More: a
// matrix of nodes, of many: of stages; strength by bytes, colour by round trip.

import { bytes, colour, element, milliseconds, plural, stageName } from "./format.js";
import { state } from "./store.js";

const SLOW_MS = 200; // a round trip drawn in the colour of the slowest
const TABLE_MAX = 12;
const MAP_MAX = 12, MATRIX_MAX = 120; // nodes; with more, stages take their place
let cells = null; // of the matrix: {items, by, left, top, size}
let places = new Map();
let pointed = null;
let waiting = false;

export function update() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
  table();
}

function draw() {
  const canvas = document.getElementById("map");
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !state.run) return;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  cells = null;
  const here = [...state.nodes.values()].filter((node) => !["left", "gone"].includes(node.state) && node.stage < state.run.stages);
  if (here.length > MAP_MAX) return matrix(pen, width, height, here);
  const many = place(width, height);
  const most = Math.max(1, ...state.links.map((link) => link.nbytes));
  const fast = rgb(colour("train")), slow = rgb(colour("warn")), muted = colour("muted");
  for (const link of [...state.links].reverse()) {
    const a = places.get(link.a), b = places.get(link.b);
    if (!a || !b) continue;
    const lit = pointed && (pointed === link.a || pointed === link.b);
    const share = Math.sqrt(link.nbytes / most);
    const slowness = link.latency_ms === null ? 0 : Math.min(1, link.latency_ms / SLOW_MS);
    pen.strokeStyle = mix(fast, slow, slowness, pointed ? (lit ? 0.95 : 0.06) : (many ? 0.08 : 0.2) + (many ? 0.3 : 0.5) * share);
    pen.lineWidth = many ? 0.5 + 1.5 * share : 1 + 5 * share;
    pen.setLineDash(link.kind === "relayed" ? [5, 4] : []);
    pen.beginPath();
    pen.moveTo(a.x, a.y);
    if (a.stage === b.stage) {
      const bend = a.x + Math.min(60, 18 + Math.abs(a.y - b.y) / 3);
      pen.bezierCurveTo(bend, a.y, bend, b.y, b.x, b.y);
    } else {
      const middle = (a.x + b.x) / 2;
      pen.bezierCurveTo(middle, a.y, middle, b.y, b.x, b.y);
    }
    pen.stroke();
  }
  pen.setLineDash([]);
  for (const [peer, at] of places) {
    pen.fillStyle = colour(`state-${at.state}`) || muted;
    pen.beginPath();
    pen.arc(at.x, at.y, peer === pointed ? at.r + 2 : at.r, 0, 7);
    pen.fill();
  }
  pen.font = "12px system-ui";
  pen.fillStyle = muted;
  pen.textAlign = "center";
  for (let stage = 0; stage < state.run.stages; stage += 1) {
    if (state.run.stages <= 16 || stage % 4 === 0) pen.fillText(state.run.stages <= 8 ? stageName(stage) : stage + 1, column(stage, width), height - 6);
  }
  if (pointed && places.has(pointed)) label(pen, width);
}

function matrix(pen, width, height, here) {
  const stages = here.length > MATRIX_MAX;
  const items = stages ? [...new Set(here.map((node) => node.stage))].sort((a, b) => a - b).map((stage) => ({ key: stage, stage, name: stageName(stage) }))
    : here.map((node) => ({ key: node.peer, stage: node.stage, name: node.name })).sort((a, b) => a.stage - b.stage || (a.name < b.name ? -1 : 1));
  const index = new Map(items.map((item, place) => [item.key, place]));
  const of = (peer) => index.get(stages ? state.nodes.get(peer)?.stage : peer);
  const by = new Map();
  for (const link of state.links) {
    const a = of(link.a), b = of(link.b);
    if (a === undefined || b === undefined) continue;
    const key = a < b ? `${a},${b}` : `${b},${a}`;
    const cell = by.get(key) || { nbytes: 0, links: 0, slow: [], relayed: 0 };
    cell.nbytes += link.nbytes;
    cell.links += 1;
    if (link.latency_ms !== null) cell.slow.push(link.latency_ms);
    cell.relayed += link.kind === "relayed";
    by.set(key, cell);
  }
  const words = (height - 20) / items.length >= 12;
  pen.font = "11px system-ui";
  const margin = words ? Math.min(width / 3, 10 + Math.max(...items.map((item) => pen.measureText(item.name).width))) : 58;
  const size = Math.min((width - margin - 4) / items.length, (height - 8) / items.length);
  const left = margin, top = 4;
  cells = { items, by, left, top, size };
  places = new Map();
  const most = Math.max(1, ...[...by.values()].map((cell) => cell.nbytes));
  const fast = rgb(colour("train")), slow = rgb(colour("warn")), muted = colour("muted"), paper = colour("line");
  pen.fillStyle = paper;
  pen.globalAlpha = 0.35;
  items.forEach((item, row) => items.forEach((other, column) => {
    if (item.stage === other.stage) pen.fillRect(left + column * size, top + row * size, size, size);
  }));
  pen.globalAlpha = 1;
  for (const [key, cell] of by) {
    const [a, b] = key.split(",").map(Number);
    cell.slow.sort((x, y) => x - y);
    cell.ms = cell.slow.length ? cell.slow[cell.slow.length >> 1] : null;
    pen.fillStyle = mix(fast, slow, cell.ms === null ? 0 : Math.min(1, cell.ms / SLOW_MS), 0.15 + 0.85 * Math.sqrt(cell.nbytes / most));
    const inset = size > 6 ? 0.5 : 0;
    for (const [row, column] of a === b ? [[a, a]] : [[a, b], [b, a]]) pen.fillRect(left + column * size + inset, top + row * size + inset, size - 2 * inset, size - 2 * inset);
  }
  pen.fillStyle = muted;
  pen.textAlign = "right";
  items.forEach((item, row) => {
    const first = row === 0 || items[row - 1].stage !== item.stage;
    const text = words ? item.name : first && items.filter((one) => one.stage === item.stage).length * size >= 11 ? stageName(item.stage) : "";
    if (text) pen.fillText(text, left - 6, top + (row + 0.5) * size + 4, left - 8);
    if (first && row) pen.fillRect(left, top + row * size, items.length * size, 0.5);
  });
  if (pointed && pointed.includes(",")) {
    const [row, column] = pointed.split(",").map(Number), cell = by.get(row < column ? pointed : `${column},${row}`);
    const names = row === column ? `within ${items[row].name}` : `${items[row].name} – ${items[column].name}`;
    bubble(pen, width, left + column * size, top + row * size, `${names}: ${cell ? `${bytes(cell.nbytes)}, ${milliseconds(cell.ms)}${cell.links > 1 ? `, ${plural(cell.links, "link")}` : ""}${cell.relayed ? `, ${cell.relayed === cell.links ? "" : `${cell.relayed} `}relayed` : ""}` : "no link"}`);
  }
}

function column(stage, width) {
  const stages = state.run.stages;
  return stages === 1 ? width / 2 : 34 + (stage * (width - 84)) / (stages - 1);
}

function place(width, height) {
  const byStage = new Map();
  for (const node of state.nodes.values()) {
    if (node.state === "left" || node.state === "gone" || node.stage >= state.run.stages) continue;
    if (!byStage.has(node.stage)) byStage.set(node.stage, []);
    byStage.get(node.stage).push(node);
  }
  places = new Map();
  let many = false;
  for (const [stage, nodes] of byStage) {
    nodes.sort((a, b) => (a.name < b.name ? -1 : 1));
    const gap = (height - 44) / nodes.length;
    if (gap < 8) many = true;
    nodes.forEach((node, index) => places.set(node.peer, {
      x: column(stage, width), y: 16 + gap * (index + 0.5), r: Math.max(1.6, Math.min(6, gap / 2.4)), stage, state: node.state, name: node.name,
    }));
  }
  return many;
}

function label(pen, width) {
  const at = places.get(pointed);
  const own = state.links.filter((link) => link.a === pointed || link.b === pointed);
  bubble(pen, width, at.x, at.y, `${at.name}: ${plural(own.length, "link")}, ${bytes(own.reduce((sum, link) => sum + link.nbytes, 0))}`);
}

function bubble(pen, width, atX, atY, text) {
  pen.font = "600 12px system-ui";
  const wide = pen.measureText(text).width + 16;
  const x = Math.min(Math.max(4, atX - wide / 2), width - wide - 4), y = atY > 50 ? atY - 34 : atY + 12;
  pen.fillStyle = colour("raised");
  pen.strokeStyle = colour("line");
  pen.lineWidth = 1;
  pen.beginPath();
  pen.roundRect(x, y, wide, 24, 6);
  pen.fill();
  pen.stroke();
  pen.fillStyle = colour("ink");
  pen.textAlign = "left";
  pen.fillText(text, x + 8, y + 16);
}

function table() {
  const name = (peer) => (state.nodes.get(peer) || { name: peer.slice(-8) }).name;
  const way = { direct: "direct", relayed: "relayed", unknown: "not known" };
  document.querySelector("#links-table tbody").replaceChildren(...state.links.slice(0, TABLE_MAX).map((link) => element("tr", {},
    element("th", { scope: "row" }, name(link.a)), element("td", { "data-of": "and" }, name(link.b)), element("td", { class: "r", "data-of": "bytes" }, bytes(link.nbytes)),
    element("td", { class: "r", "data-of": "round trip" }, milliseconds(link.latency_ms)), element("td", { "data-of": "way" }, way[link.kind]))));
  const measured = state.links.map((link) => link.latency_ms).filter((ms) => ms !== null).sort((a, b) => a - b);
  const relayed = state.links.filter((link) => link.kind === "relayed").length;
  const parts = [plural(state.links.length, "link")];
  if (measured.length) parts.push(`median ${milliseconds(measured[measured.length >> 1])}`);
  if (relayed) parts.push(`${relayed} relayed`);
  document.getElementById("links-note").textContent = parts.join(" · ");
}

function rgb(text) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = text;
  const hex = pen.fillStyle;
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function mix(from, to, share, alpha) {
  const parts = from.map((value, index) => Math.round(value + (to[index] - value) * share));
  return `rgba(${parts.join(",")},${alpha.toFixed(3)})`;
}

const canvas = document.getElementById("map");

function nearest(event) {
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  if (cells) {
    const [row, column] = [Math.floor((y - cells.top) / cells.size), Math.floor((x - cells.left) / cells.size)];
    const inside = (place) => place >= 0 && place < cells.items.length;
    return inside(row) && inside(column) ? `${row},${column}` : null;
  }
  let found = null, best = 18 * 18;
  for (const [peer, at] of places) {
    const far = (at.x - x) ** 2 + (at.y - y) ** 2;
    if (far < best) [found, best] = [peer, far];
  }
  return found;
}

canvas.addEventListener("pointermove", (event) => {
  const found = nearest(event);
  canvas.style.cursor = found && !cells ? "pointer" : "";
  if (found !== pointed) {
    pointed = found;
    draw();
  }
});
canvas.addEventListener("pointerleave", () => {
  pointed = null;
  draw();
});
canvas.addEventListener("click", (event) => {
  const found = nearest(event);
  if (found && !cells) canvas.dispatchEvent(new CustomEvent("visit", { bubbles: true, detail: `/node/${found}` }));
});
new ResizeObserver(() => draw()).observe(canvas);
