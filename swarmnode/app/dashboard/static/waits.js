// Who holds up whom: how much of the time the machines of each stage compute, and what all of it costs.

import { bytes, count, element, milliseconds, percent, plural, stageName, write } from "./format.js";
import { state } from "./store.js";

const BUSY = 0.7; // from here on a stage's machines, not the ways between them, set the speed; guess
const EVEN = 0.1; // stages whose shares differ by less work equally; guess
const EVERY_MS = 2000; // between two drawings
const at = (id) => document.getElementById(id);
let drawn = -Infinity;

const mean = (list) => (list.length ? list.reduce((sum, value) => sum + value, 0) / list.length : null);

export function update() {
  const { run, summary } = state;
  if (!run || !summary || performance.now() - drawn < EVERY_MS) return;
  drawn = performance.now();
  const rows = Array.from({ length: run.stages }, (_, stage) => ({ stage, nodes: [] }));
  for (const node of state.nodes.values()) if (node.state === "training" && node.stage < run.stages) rows[node.stage].nodes.push(node);
  for (const row of rows) {
    row.busy = mean(row.nodes.map((node) => node.busy).filter((busy) => busy !== null));
    row.queue = mean(row.nodes.map((node) => node.queue));
    row.speed = row.nodes.reduce((sum, node) => sum + node.speed, 0);
  }
  const all = mean(rows.flatMap((row) => row.nodes.map((node) => node.busy)).filter((busy) => busy !== null));
  const late = summary.staleness, gradients = late.reduce((sum, value) => sum + value, 0);
  write(at("waits-note"), `machines compute ${percent(all)} of the time${gradients ? ` · ${percent((late[0] + late[1]) / gradients)} of gradients at most one step old` : ""}`);
  const worst = rows.filter((row) => row.busy !== null).sort((a, b) => b.busy - a.busy)[0];
  write(at("waits-verdict"), verdict(rows, worst));
  document.querySelector("#waits tbody").replaceChildren(...rows.slice(0, 64).map((row) => {
    const bar = element("i", { class: "share", hidden: row.busy ? null : "" });
    bar.style.width = `${100 * (row.busy || 0)}%`;
    return element("tr", { class: row === worst && row.busy >= BUSY && all !== null && row.busy - all >= EVEN / 2 ? "worst" : "" },
      element("th", { scope: "row" }, stageName(row.stage), element("div", { class: "shares" }, bar)),
      element("td", { class: "r", "data-of": "machines" }, String(row.nodes.length)),
      element("td", { class: "r", "data-of": "at work" }, percent(row.busy)),
      element("td", { class: "r", "data-of": "waiting each" }, row.queue === null ? "–" : row.queue.toFixed(1)),
      element("td", { class: "r", "data-of": "samples/s" }, row.speed.toFixed(1)));
  }));
  cost(summary);
}

function verdict(rows, worst) {
  const empty = rows.filter((row) => !row.nodes.length);
  if (empty.length) return `Nothing gets through: ${stageName(empty[0].stage)} has no machine.`;
  if (!worst) return "Nothing is known yet.";
  const name = (node) => node.name;
  if (worst.busy >= BUSY) {
    const most = [...worst.nodes].sort((a, b) => b.queue - a.queue)[0];
    const rest = mean(rows.filter((row) => row !== worst).map((row) => row.busy).filter((busy) => busy !== null));
    if (rest !== null && worst.busy - rest < EVEN) return `No stage waits for another: the machines of all stages compute about ${percent((worst.busy + rest) / 2)} of the time. More machines anywhere help.`;
    return `S${stageName(worst.stage).slice(1)} sets the speed: its ${worst.nodes.length === 1 ? "machine computes" : "machines compute"} ${percent(worst.busy)} of the time${rest === null ? "" : `, those of other stages ${percent(rest)}`}. ${most.queue ? `Most waits for ${name(most)} (${plural(most.queue, "microbatch", "microbatches")}). ` : ""}One more machine there helps most.`;
  }
  const far = state.links.filter((link) => {
    const [a, b] = [state.nodes.get(link.a), state.nodes.get(link.b)];
    return a && b && a.stage !== b.stage && link.latency_ms !== null;
  }).sort((a, b) => b.latency_ms - a.latency_ms)[0];
  const way = far ? ` The slowest way between stages: ${name(state.nodes.get(far.a))} – ${name(state.nodes.get(far.b))}, ${milliseconds(far.latency_ms)}${far.kind === "relayed" ? ", through a relay" : ""}.` : "";
  return `No stage is short of arithmetic: even the machines of ${stageName(worst.stage)} compute only ${percent(worst.busy)} of the time. They wait for each other's packets, for text, or keep to their owners' limits.${way}`;
}

// Energy and money by rates that the reader chooses, where a machine's owner did not tell its watts; hours are those that
// machines computed.
function cost(summary) {
  const hours = summary.worked_s / 3600, sent = Object.values(summary.sent).reduce((sum, value) => sum + value, 0);
  const guessed = Math.max(0, hours - summary.metered_s / 3600);
  const kwh = summary.kwh + (guessed * rate("watts")) / 1000, price = kwh * rate("price") + (sent / 1e9) * rate("egress");
  write(at("cost"), `${hours < 10 ? hours.toFixed(1) : count(hours)} hours of computing · ${bytes(sent)} sent · ${kwh < 10 ? kwh.toFixed(2) : count(kwh)} kWh · ${price < 10 ? price.toFixed(2) : count(price)} by your prices`);
}

const rate = (id) => Math.max(0, Number(at(id).value) || 0);

for (const id of ["watts", "price", "egress"]) {
  try { at(id).value = localStorage.getItem(id) || at(id).value; } catch { /* not kept */ }
  at(id).addEventListener("input", () => {
    try { localStorage.setItem(id, at(id).value); } catch { /* not kept */ }
    if (state.summary) cost(state.summary);
  });
}
