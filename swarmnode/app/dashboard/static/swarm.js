// Stages × replicas: a tile a node, a small square a node when there are many.

import { count, element, hour, milliseconds, plural, stageName, write } from "./format.js";
import { state } from "./store.js";

const ROOMY_MAX = 16; // nodes of one stage that still get tiles with words
const STATES = ["training", "joining", "syncing", "paused", "draining", "silent", "gone", "left"];
const tiles = new Map();
const rows = new Map();
let shape = "";

export function update() {
  const nodes = [...state.nodes.values()];
  const stages = state.run ? state.run.stages : 0;
  const sizes = new Array(stages).fill(0);
  for (const node of nodes) if (node.stage < stages) sizes[node.stage] += 1;
  const dense = Math.max(0, ...sizes) > ROOMY_MAX;
  const wanted = `${stages}/${dense}`;
  if (wanted !== shape) build(stages, dense, wanted);
  // In steps of a quarter, so that bars need not all be drawn again whenever the fastest node speeds up a little.
  const fastest = 1.25 ** Math.ceil(Math.log(Math.max(1e-9, ...nodes.map((node) => node.speed))) / Math.log(1.25));
  const seen = new Set();
  const fresh = new Map();
  for (const node of nodes) {
    if (node.stage >= stages) continue;
    seen.add(node.peer);
    const kept = tiles.get(node.peer);
    if (kept && kept.row === node && kept.fastest === fastest) continue;
    const tile = kept || make(node, dense);
    fill(tile, node, dense, fastest);
    if (tile.stage !== node.stage) {
      tile.stage = node.stage;
      if (!fresh.has(node.stage)) fresh.set(node.stage, []);
      fresh.get(node.stage).push(tile.element);
    }
  }
  for (const [stage, made] of fresh) rows.get(stage).list.append(...made);
  for (const [peer, tile] of tiles) {
    if (!seen.has(peer)) {
      tile.element.remove();
      tiles.delete(peer);
    }
  }
  for (let stage = 0; stage < stages; stage += 1) heading(stage);
  roving();
}

function build(stages, dense, wanted) {
  shape = wanted;
  tiles.clear();
  rows.clear();
  const host = document.getElementById("stages");
  host.classList.toggle("dense", dense);
  host.replaceChildren();
  for (let stage = 0; stage < stages; stage += 1) {
    const note = element("span", { class: "note" });
    const list = element("ul", { "aria-label": `Replicas of ${stageName(stage)}` });
    const title = `${count(state.run.stage_parameters[stage])} parameters`;
    const row = element("section", { class: "stage" },
      element("h3", { title }, `S${stageName(stage).slice(1)}`, note), list);
    host.append(row);
    rows.set(stage, { list, note, row });
  }
  const legend = document.getElementById("states");
  legend.replaceChildren(...STATES.slice(0, 7).map((name) => element("span", { class: `key state-${name}` }, name)));
  host.onkeydown = arrows;
}

function heading(stage) {
  const { note, row } = rows.get(stage);
  const serving = state.summary ? state.summary.replicas[stage] : 0;
  const sleeper = state.summary && state.summary.asleep.find((one) => one.stage === stage);
  const nobody = sleeper ? `sleeps${sleeper.until ? ` until ${hour(sleeper.until)}` : ""} with ${sleeper.name}` : "nobody serves it";
  write(note, serving ? plural(serving, "replica") : nobody);
  row.classList.toggle("empty", !serving);
}

function make(node, dense) {
  const link = element("a", { href: `/node/${node.peer}`, tabindex: "-1" });
  const tile = { element: element("li", {}, link), link, stage: -1, row: null, fastest: 0, parts: null };
  if (!dense) {
    const [name, speed, facts, bar] = ["b", "span", "small", "i"].map((tag) => element(tag));
    link.append(name, speed, element("span", { class: "speed" }, bar), facts);
    tile.parts = { name, speed, facts, bar };
  }
  tiles.set(node.peer, tile);
  return tile;
}

function fill(tile, node, dense, fastest) {
  const { link, parts } = tile;
  const work = `${node.speed.toFixed(1)} samples/s, ${node.queue} waiting, round ${node.round}`;
  const told = `${node.name}: ${node.state}, ${work}`;
  tile.row = node;
  tile.fastest = fastest;
  link.className = `node state-${node.state}`;
  link.setAttribute("aria-label", told);
  link.title = `${told}, version ${node.version}${node.rtt_ms === null ? "" : `, ${milliseconds(node.rtt_ms)} away`}${node.why ? `\nhere because: ${node.why}` : ""}`;
  const share = Math.max(0.04, node.speed / fastest);
  if (dense) {
    link.style.setProperty("--share", (0.35 + 0.65 * share).toFixed(2));
    return;
  }
  write(parts.name, node.name);
  write(parts.speed, node.state !== "training" ? node.state : `${node.speed.toFixed(1)}/s`);
  write(parts.facts, `${plural(node.queue, "waiting", "waiting")} · round ${node.round}`);
  parts.bar.style.transform = `scaleX(${share.toFixed(2)})`;
}

// One tab stop for all nodes; arrow keys go on from there.
function roving() {
  const links = document.querySelectorAll("#stages a.node");
  if (links.length && !document.querySelector('#stages a.node[tabindex="0"]')) links[0].tabIndex = 0;
}

function arrows(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step || !event.target.matches("a.node")) return;
  const links = [...document.querySelectorAll("#stages a.node")];
  const next = links[links.indexOf(event.target) + step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
