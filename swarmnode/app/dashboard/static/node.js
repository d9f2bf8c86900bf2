// The page of one node.

import { bytes, colour, count, duration, element, loss, milliseconds, percent, plural } from "./format.js";
import { line, team } from "./panels.js";
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
    if (shown !== peer || !state.summary) return void (timer = setTimeout(refresh, 200));
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

// What the days say, [day since 1970, samples signed for]: this week's, and days in a row up to today or yesterday.
function lately(days) {
  const today = Math.floor(state.summary.t / 86400);
  const worked = new Set(days.filter(([, samples]) => samples > 0).map(([day]) => day));
  let streak = 0;
  for (let day = worked.has(today) ? today : today - 1; worked.has(day); day -= 1) streak += 1;
  return { streak, week: days.filter(([day]) => day > today - 7).reduce((sum, [, samples]) => sum + samples, 0) };
}

function bars(days) {
  const today = Math.floor(state.summary.t / 86400), by = new Map(days), most = Math.max(1, ...days.map(([, samples]) => samples));
  return element("div", { class: "days", role: "img", "aria-label": "Samples signed for, each of the last 28 days" }, ...Array.from({ length: 28 }, (_, index) => {
    const samples = by.get(today - 27 + index) || 0;
    const bar = element("i", { title: `${new Date((today - 27 + index) * 86400000).toLocaleDateString("en-GB", { day: "numeric", month: "short" })}: ${plural(samples, "sample")}` });
    bar.style.height = `${Math.max(4, (100 * samples) / most)}%`;
    return bar;
  }));
}

// A picture to share: what others signed for, nothing that the node says of itself but its name.
function card(node) {
  const { standing } = node, { streak, week } = lately(standing.days), thanks = node.contribution.receipts;
  const canvas = element("canvas", { width: 1200, height: 630 });
  const pen = canvas.getContext("2d");
  const put = (text, x, y, font, ink, room = 1060) => { pen.font = `${font} system-ui, sans-serif`; pen.fillStyle = ink; pen.fillText(text, x, y, room); };
  pen.fillStyle = "#11141a";
  pen.fillRect(0, 0, 1200, 630);
  pen.fillStyle = "#7aa5ff";
  pen.fillRect(70, 78, 56, 8);
  put(node.name, 70, 170, "700 64px", "#ffffff");
  put(`helps to train ${state.run.name}, ${count(state.run.parameters)} parameters`, 70, 226, "34px", "#9aa3b2");
  [[count(thanks.samples * state.run.context), "tokens, signed for by others"], [`#${standing.rank} of ${standing.of}`, `${percent(standing.share)} of the work`], [plural(streak, "day"), `in a row · ${count(week * state.run.context)} tokens this week`]]
    .forEach(([big, small], index) => { put(big, 70 + 370 * index, 390, "700 58px", "#f5a66b", 340); put(small, 70 + 370 * index, 436, "24px", "#9aa3b2", 340); });
  put(`swarmnode · run ${state.run.run_id.slice(0, 16)} · ${plural(thanks.peers, "signature")} to check at its page`, 70, 560, "24px", "#9aa3b2");
  const link = element("a", { href: canvas.toDataURL("image/png"), download: `${state.run.name}-${standing.rank}.png` });
  link.click();
}

function place(node) {
  const { standing, contribution } = node, { streak, week } = lately(standing.days);
  if (!contribution || !contribution.receipts) return null;
  const share = element("button", { type: "button", class: "quiet", id: "card" }, "picture to share");
  share.addEventListener("click", () => card(node));
  return panel("Its place", element("div", { class: "place" },
    ...[[`#${standing.rank}`, `of ${plural(standing.of, "node")}`], [percent(standing.share), "of all samples signed for"], [count(week), "samples this week"], [plural(streak, "day"), "in a row"]]
      .map(([big, small]) => element("p", {}, element("b", {}, big), element("span", {}, small)))),
  bars(standing.days), element("p", { class: "tools" }, team(node.name) ? element("span", { class: "note" }, `team ${team(node.name)}`) : null,
    element("a", { class: "quiet", href: `/api/v1/contributors/${node.peer}/receipts` }, "signatures"), share));
}

function render(node, peer) {
  const host = document.getElementById("view-node");
  const focused = host.contains(document.activeElement) ? document.activeElement.id : "";
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
      element("td", {}, link.stage === null ? "–" : String(link.stage + 1)), element("td", { class: "r" }, bytes(link.sent)),
      element("td", { class: "r" }, bytes(link.received)), element("td", { class: "r" }, milliseconds(link.latency_ms)), element("td", {}, link.kind === "unknown" ? "–" : link.kind))))));
  host.replaceChildren(back, title,
    element("p", { class: "note mono" }, node.peer), place(node) || "",
    element("div", { class: "pair" },
      panel("Now", facts([
        ["stage", node.stage + 1], ["why here", node.why], ["waits", node.waits.join("\n")], ["speed", `${node.speed.toFixed(1)} samples/s`], ["feeds", node.tokens_per_s ? `${count(node.tokens_per_s)} tokens/s` : ""],
        ["at work", node.busy === null ? "" : `${percent(node.busy)} of the time`], ["waiting", plural(node.queue, "microbatch", "microbatches")], ["round", node.round], ["inner steps", count(node.steps)], ["training loss", node.loss === null ? "" : loss(node.loss)],
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
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}
