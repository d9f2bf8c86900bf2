// The words and small pictures around the big ones: header, numbers, alarms, rounds, timeline, contributors.

import { bytes, clock, count, duration, element, loss, plural, write } from "./format.js";
import { state } from "./store.js";

const KINDS = [["", "all"], ["departure arrival move", "coming & going"], ["recovery preemption checkpoint", "recoveries"], ["fault alarm", "trouble"]];
const PEOPLE_MAX = 100;
let wanted = "";
const at = (id) => document.getElementById(id);

export function header() {
  const { run, summary } = state;
  if (!run) return;
  write(at("run-name"), run.name);
  document.title = summary && summary.loss_validation !== null ? `${loss(summary.loss_validation)} · ${run.name}` : `${run.name} · swarmnode`;
  if (!state.connected) return write(at("phrase"), summary ? "connection lost, trying again …" : "connecting …");
  const words = {
    training: `${plural(summary.serving, "node")} training · round ${summary.round}`,
    broken: `${plural(summary.nodes, "node")} here · a stage has nobody`,
    asleep: `${plural(summary.nodes, "node")} here · a stage sleeps`,
    waiting: summary.nodes ? `${plural(summary.nodes, "node")} here · not begun` : "nobody is here yet",
    looking: "looking for its nodes …", stopped: "stopped", ended: "complete",
  };
  write(at("phrase"), words[summary.phase]);
}

export function footer() {
  const { run } = state;
  const about = run.about || {};
  at("about").hidden = !Object.values(about).some(Boolean);
  write(at("about-why"), about.why || run.name);
  write(at("about-by"), [about.by && `Run by ${about.by}`, about.data && `Trained on ${about.data}`, about.licence && `The model's licence: ${about.licence}`].filter(Boolean).join(" · "));
  write(at("facts"), `${count(run.parameters)} parameters in ${plural(run.stages, "stage")}, ${run.layers} layers of width ${run.width} · data ${run.data} · ${run.method}, ${run.codec} · run ${run.run_id.slice(0, 16)} · swarmnode ${run.version}`);
}

export function numbers() {
  const { summary } = state;
  if (!summary) return;
  write(at("amendments"), summary.amendments.join(" · "));
  write(at("n-validation"), loss(summary.loss_validation));
  const first = summary.loss_validation_first;
  const perplexity = summary.loss_validation === null ? "" : `perplexity ${Math.exp(summary.loss_validation).toPrecision(3)}`;
  write(at("n-validation-note"), first !== null && summary.loss_validation !== null && first > summary.loss_validation ? `from ${loss(first)} · ${perplexity}` : perplexity);
  write(at("n-train"), loss(summary.loss_train));
  write(at("n-speed"), count(summary.tokens_per_s));
  const target = summary.samples_target;
  at("meter").hidden = !target;
  if (target) {
    const share = Math.min(1, summary.samples / target);
    write(at("n-progress"), `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
    write(at("n-left"), `${count(summary.samples)} of ${count(target)} samples${summary.time_left_s ? ` · ${duration(summary.time_left_s)} left` : ""}`);
    at("meter").setAttribute("aria-valuenow", (100 * share).toFixed(1));
    at("meter").firstElementChild.style.transform = `scaleX(${share.toFixed(5)})`;
  } else {
    write(at("n-progress"), count(summary.tokens));
    write(at("n-left"), `tokens so far, ${count(summary.samples)} samples · no end is set`);
  }
  const sent = Object.values(summary.sent).reduce((sum, value) => sum + value, 0);
  const gradients = summary.staleness.reduce((sum, value) => sum + value, 0);
  const late = gradients ? ` · ${((100 * (summary.staleness[0] + summary.staleness[1])) / gradients).toFixed(1)} % of gradients at most one step old` : "";
  write(at("traffic-note"), `${bytes(sent)} sent in all · ${count(summary.microbatches.retried)} microbatches rerouted, ${count(summary.microbatches.lost)} lost${late}`);
}

export function alarms() {
  const host = at("alarms");
  if (!state.alarms.length) {
    host.replaceChildren(...(state.summary && state.summary.phase === "training" ? [element("p", { class: "well" }, "All is well")] : []));
    return;
  }
  host.replaceChildren(...state.alarms.map((alarm) => element("article", { class: `alarm ${alarm.level}${["stopped", "stage_empty"].includes(alarm.kind) ? " led" : ""}` },
    element("b", {}, alarm.title), element("span", {}, alarm.reason))));
}

export function rounds() {
  const { rounds: list, summary } = state;
  const most = Math.max(1, ...list.map((row) => row.paired + row.lone + row.refused + row.single));
  const part = (name, number) => {
    const made = element("i", { class: name });
    made.style.height = `${(100 * number) / most}%`;
    return made;
  };
  at("rounds").replaceChildren(...list.map((row) => element("span",
    { title: `round ${row.round}: ${row.paired} paired, ${row.lone} lone, ${row.refused} refused, ${row.single} of stages with one replica${row.mean_s === null ? "" : `, ${row.mean_s.toFixed(2)} s each`}` },
    part("refused", row.refused), part("lone", row.lone), part("single", row.single), part("paired", row.paired))));
  if (!summary) return;
  const sum = (key) => list.reduce((total, row) => total + row[key], 0);
  const [paired, steps] = [sum("paired"), sum("paired") + sum("lone")];
  const parts = steps ? [`${count(steps)} outer steps that could have a partner, ${Math.round((100 * paired) / steps)} % had one`]
    : [list.length ? "each stage has one replica: nobody to meet yet" : "no round yet"];
  if (summary.meets_every_steps) {
    const [every, planned] = [summary.meets_every_steps, summary.meets_every_steps_planned];
    const as = Math.round(every) <= Math.round(planned) ? "as planned" : `planned: every ${planned}`;
    parts.push(`replicas meet every ${Math.round(10 * every) / 10} steps (${as})`);
  }
  const saved = summary.gossip_dense - summary.sent.gossip;
  if (summary.sent.gossip) parts.push(`gossip sent ${bytes(summary.sent.gossip)}`);
  if (saved > 0 && summary.sent.gossip) parts.push(`${bytes(saved)} saved (${Math.round((100 * saved) / summary.gossip_dense)} % less than fp32 pairs)`);
  write(at("rounds-note"), parts.join(" · "));
}

export function kinds() {
  at("kinds").replaceChildren(...KINDS.map(([value, text]) => element("label", {},
    element("input", { type: "radio", name: "kind", value, checked: value === "" ? "" : null }), element("span", {}, text))));
  at("kinds").addEventListener("change", (event) => {
    wanted = event.target.value;
    timeline();
  });
}

export function timeline() {
  const chosen = state.entries.filter((entry) => !wanted || wanted.split(" ").includes(entry.kind));
  at("timeline").replaceChildren(...(chosen.length ? chosen.slice(0, 120).map(line) : [element("li", { class: "note" }, "nothing yet")]));
}

export function line(entry) {
  const who = entry.peer ? element("a", { href: `/node/${entry.peer}` }, entry.name) : null;
  return element("li", { class: `kind-${entry.kind} ${entry.level}` },
    element("time", { datetime: new Date(entry.t * 1000).toISOString() }, clock(entry.t)),
    element("p", {}, who, who ? ` ${entry.text}` : entry.text));
}

export function team(name) {
  return name.includes("@") ? name.slice(name.lastIndexOf("@") + 1) : "";
}

export function people() {
  const list = state.contributors; // the hundred who gave most
  const signed = (row) => (row.receipts ? row.receipts.samples : 0);
  const most = Math.max(1e-9, ...list.map(signed));
  document.querySelector("#people tbody").replaceChildren(...list.slice(0, PEOPLE_MAX).map((row) => {
    const share = element("i", { class: "share" });
    share.style.width = `${(100 * signed(row)) / most}%`;
    const here = state.nodes.get(row.peer);
    const name = here ? element("a", { href: `/node/${row.peer}` }, row.name) : element("span", {}, row.name);
    return element("tr", { class: here && !["gone", "left"].includes(here.state) ? "" : "away" },
      element("th", { scope: "row" }, name, element("div", { class: "shares" }, share)),
      element("td", { class: "r", "data-of": "samples", title: row.receipts ? `signed by ${plural(row.receipts.peers, "node")}` : "no receipt yet" },
        row.receipts ? element("a", { href: `/api/v1/contributors/${row.peer}/receipts` }, count(signed(row))) : "–"),
      element("td", { class: "r", "data-of": "work" }, duration(row.worked_s)), element("td", { class: "r", "data-of": "steps" }, count(row.steps)), element("td", { class: "r", "data-of": "sent" }, bytes(row.sent)));
  }));
  const teams = new Map(); // of a node called NAME@TEAM
  for (const row of list) if (team(row.name)) teams.set(team(row.name), (teams.get(team(row.name)) || 0) + signed(row));
  const ranked = [...teams].sort((a, b) => b[1] - a[1]).slice(0, 8);
  write(at("teams"), ranked.length ? `Teams: ${ranked.map(([name, samples]) => `${name} ${count(samples)}`).join(" · ")}` : "");
}
