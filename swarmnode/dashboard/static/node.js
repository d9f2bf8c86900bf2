// The page of one node.

import { bytes, count, duration, element, loss, milliseconds, plural } from "./format.js";
import { line } from "./panels.js";
import { state } from "./store.js";

const REFRESH_MS = 3000;
let shown = null;
let timer = 0;

export function show(peer) {
  shown = peer;
  clearTimeout(timer);
  document.getElementById("view-node").replaceChildren(element("p", { class: "note" }, "looking …"));
  refresh();
}

export function hide() {
  shown = null;
  clearTimeout(timer);
}

async function refresh() {
  const peer = shown;
  if (!peer) return;
  try {
    const answer = await fetch(`/api/v1/nodes/${encodeURIComponent(peer)}`);
    if (shown !== peer) return;
    render(answer.ok ? await answer.json() : null, peer);
  } catch { /* the server is away: what is shown stays */ }
  timer = setTimeout(refresh, REFRESH_MS);
}

function facts(rows) {
  return element("dl", { class: "facts" }, ...rows.filter((row) => row[1] !== "" && row[1] !== null && row[1] !== undefined)
    .flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]));
}

function panel(title, ...children) {
  return element("section", { class: "panel" }, element("div", { class: "head" }, element("h2", {}, title)), ...children);
}

function render(node, peer) {
  const host = document.getElementById("view-node");
  const back = element("p", {}, element("a", { href: "/", class: "back" }, "← the whole run"));
  if (!node) {
    host.replaceChildren(back, element("h1", {}, "Not here"), element("p", { class: "note" }, `No node ${peer.slice(-8)} is in the run now. It may have left, or come back under the same name.`));
    return;
  }
  const title = element("h1", {}, node.name, element("span", { class: `pill state-${node.state}` }, node.state));
  const open = host.querySelector("details")?.open;
  const counters = element("details", open ? { open: "" } : {}, element("summary", {}, `${plural(Object.keys(node.counters).length, "counter")}`),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Its counters, a table" }, element("table", { class: "counters" }, element("tbody", {},
      ...Object.entries(node.counters).map(([key, value]) => element("tr", {}, element("th", { scope: "row" }, key), element("td", { class: "r" }, value.toLocaleString("en")))))))); 
  const links = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Its links, a table" }, element("table", {},
    element("thead", {}, element("tr", {}, ...["to", "stage", "sent", "received", "round trip", "way"].map((text, index) => element("th", { scope: "col", class: index > 1 && index < 5 ? "r" : "" }, text)))),
    element("tbody", {}, ...node.links.map((link) => element("tr", {},
      element("th", { scope: "row" }, element("a", { href: `/node/${link.peer}` }, link.name || link.peer.slice(-8))),
      element("td", {}, link.stage === null ? "–" : link.stage === state.run.stages ? "feeder" : String(link.stage)), element("td", { class: "r" }, bytes(link.sent)),
      element("td", { class: "r" }, bytes(link.received)), element("td", { class: "r" }, milliseconds(link.latency_ms)), element("td", {}, link.kind === "unknown" ? "–" : link.kind))))));
  host.replaceChildren(back, title,
    element("p", { class: "note mono" }, node.peer),
    element("div", { class: "pair" },
      panel("Now", facts([
        ["stage", node.stage === state.run.stages ? "none, it only feeds" : node.stage], ["why here", node.why], ["speed", `${node.speed.toFixed(1)} samples/s`], ["feeds", node.tokens_per_s ? `${count(node.tokens_per_s)} tokens/s` : ""],
        ["waiting", plural(node.queue, "microbatch", "microbatches")], ["round", node.round], ["inner steps", count(node.steps)], ["training loss", node.loss === null ? "" : loss(node.loss)],
        ["memory", node.memory ? bytes(node.memory) : ""], ["up", node.up_s ? duration(node.up_s) : ""], ["version", node.version],
        ["from here", milliseconds(node.rtt_ms)], ["its clock", node.skew_s === null ? "" : `${node.skew_s >= 0 ? "+" : ""}${node.skew_s.toFixed(2)} s`],
        ["last answer", node.answered_s_ago === null ? "never" : `${duration(node.answered_s_ago)} ago`], ["gone", node.gone_why], ["addresses", node.addresses.join("\n")],
      ])),
      panel("Given to the run", node.contribution ? facts([
        ["work", duration(node.contribution.worked_s)], ["inner steps", count(node.contribution.steps)], ["samples fed", count(node.contribution.fed)],
        ["signed for by others", node.contribution.receipts ? `${count(node.contribution.receipts.samples)} samples, ${plural(node.contribution.receipts.peers, "node")}` : "nothing yet"],
        ["exchanges", count(node.contribution.exchanges)], ["sent", bytes(node.contribution.sent)], ["lives", node.contribution.lives],
      ]) : element("p", { class: "note" }, "nothing yet"), counters)),
    panel("Links", node.links.length ? links : element("p", { class: "note" }, "none in the last minute")),
    panel("What happened to it", element("ol", { class: "timeline short", tabindex: "0", "aria-label": "What happened to it, newest first" }, ...(node.entries.length ? node.entries.map(line) : [element("li", { class: "note" }, "nothing yet")]))));
}
