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
  const words = summary.serving
    ? `${plural(summary.serving, "node")} training · round ${summary.round}`
    : summary.nodes ? `${plural(summary.nodes, "node")} getting ready` : "nobody is here";
  write(at("phrase"), words);
}

export function footer() {
  const { run } = state;
  write(at("facts"), `${count(run.parameters)} parameters in ${plural(run.stages, "stage")}, ${run.layers} layers of width ${run.width} · data ${run.data} · ${run.method}, ${run.codec} · run ${run.run_id.slice(0, 16)} · swarmnode ${run.version}`);
  at("join").hidden = !run.join.length;
  write(at("join-line"), run.join[0] || "");
}

export function numbers() {
  const { summary } = state;
  if (!summary) return;
  write(at("n-validation"), loss(summary.loss_validation));
  const first = summary.loss_validation_first;
  const perplexity = summary.loss_validation === null ? "" : `perplexity ${Math.exp(summary.loss_validation).toPrecision(3)}`;
  write(at("n-validation-note"), first !== null && summary.loss_validation !== null && first > summary.loss_validation ? `from ${loss(first)} · ${perplexity}` : perplexity);
  write(at("n-train"), loss(summary.loss_train));
  write(at("n-speed"), count(summary.tokens_per_s));
  const share = summary.samples_target ? Math.min(1, summary.samples / summary.samples_target) : 0;
  write(at("n-progress"), `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
  write(at("n-left"), `${count(summary.samples)} of ${count(summary.samples_target)} samples${summary.time_left_s === null ? "" : ` · ${duration(summary.time_left_s)} left`}`);
  at("meter").setAttribute("aria-valuenow", (100 * share).toFixed(1));
  at("meter").firstElementChild.style.transform = `scaleX(${share.toFixed(5)})`;
  const sent = Object.values(summary.sent).reduce((sum, value) => sum + value, 0);
  const gradients = summary.staleness.reduce((sum, value) => sum + value, 0);
  const late = gradients ? ` · ${((100 * (summary.staleness[0] + summary.staleness[1])) / gradients).toFixed(1)} % of gradients at most one step old` : "";
  write(at("traffic-note"), `${bytes(sent)} sent in all · ${count(summary.microbatches.retried)} microbatches rerouted, ${count(summary.microbatches.lost)} lost${late}`);
}

export function alarms() {
  const host = at("alarms");
  if (!state.alarms.length) {
    host.replaceChildren(element("p", { class: "well" }, state.summary && state.summary.serving ? "All is well" : "Waiting for nodes"));
    return;
  }
  host.replaceChildren(...state.alarms.map((alarm) => element("article", { class: `alarm ${alarm.level}` },
    element("b", {}, alarm.title), element("span", {}, alarm.reason))));
}

export function rounds() {
  const { rounds: list, summary } = state;
  const most = Math.max(1, ...list.map((row) => row.paired + row.lone + row.refused));
  const part = (name, number) => {
    const made = element("i", { class: name });
    made.style.height = `${(100 * number) / most}%`;
    return made;
  };
  at("rounds").replaceChildren(...list.map((row) => element("span",
    { title: `round ${row.round}: ${row.paired} paired, ${row.lone} lone, ${row.refused} refused${row.mean_s === null ? "" : `, ${row.mean_s.toFixed(2)} s each`}` },
    part("refused", row.refused), part("lone", row.lone), part("paired", row.paired))));
  if (!summary) return;
  const steps = summary.paired + summary.lone;
  const parts = steps ? [`${count(steps)} outer steps, ${Math.round((100 * summary.paired) / steps)} % with a partner`] : ["no round yet"];
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

// What the owner's archive holds. Files of a checkpoint are asked for when somebody wants to see them.
export function archive() {
  const { archive: kept } = state;
  at("archive").hidden = !kept;
  if (!kept) return;
  newestModel();
  document.querySelector("#checkpoints tbody").replaceChildren(...kept.entries.map((row) => {
    const agreed = row.agree.length ? Math.min(...row.agree) : 0;
    const said = agreed ? `each stage confirmed by ${plural(agreed, "other replica")}` : "not every stage confirmed";
    const refused = row.liars.length ? `; refused: ${row.liars.join(", ")}` : "";
    const link = row.urls
      ? element("details", {}, element("summary", {}, "files"), element("code", {}, `wget -P model -i ${location.origin}${row.urls}`), element("ul", { class: "files" }))
      : element("span", {}, "of its owner");
    if (row.urls) link.addEventListener("toggle", () => files(row.label, link.querySelector("ul")), { once: true });
    return element("tr", {},
      element("th", { scope: "row" }, `round ${count(row.round)}`, row.best ? element("span", { class: "best" }, " best") : null),
      element("td", { class: "r" }, count(row.samples)),
      element("td", { class: "r", title: row.measured ? `measured by the ${row.measured}` : "not measured" }, loss(row.loss)),
      element("td", { class: "r" }, bytes(row.nbytes)), element("td", {}, said + refused), element("td", {}, link));
  }));
  scores(kept.entries);
}

// The newest model and its age, and what the archive does now.
export function newestModel() {
  const { archive: kept, summary } = state;
  if (!kept || !summary) return;
  const [row] = kept.entries;
  const age = row && duration(summary.t - row.t).replace(/ \d+ (s|min)$/, "");
  write(at("archive-note"), row ? `newest: round ${count(row.round)}, ${count(row.samples)} samples, ${age} old, validation ${loss(row.loss)} · ${kept.status}` : kept.status);
}

// What [evaluation] of the manifest lists: a column for each score, and what the newest checkpoint makes of each prompt.
function scores(entries) {
  const names = [...new Map(entries.flatMap((row) => row.scores.map((one) => [one.name, one.metric])))];
  at("scores").hidden = !names.length;
  document.querySelector("#scores thead tr").replaceChildren(element("th", { scope: "col" }, "scores"),
    ...names.map(([name, metric]) => element("th", { scope: "col", class: "r" }, name, element("small", {}, ` ${metric}`))));
  document.querySelector("#scores tbody").replaceChildren(...entries.filter((row) => row.scores.length).map((row) => element("tr", {},
    element("th", { scope: "row" }, `round ${count(row.round)}`),
    ...names.map(([name]) => {
      const found = row.scores.find((one) => one.name === name);
      return element("td", { class: "r" }, found ? loss(found.value) : "–");
    }))));
  const newest = entries.find((row) => row.continuations.length);
  at("continuations").replaceChildren(...(newest ? newest.continuations : []).map((one) => element("li", {},
    element("b", {}, one.prompt), element("span", {}, one.text))));
}

async function files(label, host) {
  const found = await (await fetch("/api/v1/archive")).json();
  const row = found.entries.find((each) => each.label === label);
  host.replaceChildren(...(row ? row.files : []).map((file) => element("li", {},
    element("a", { href: file.href, download: file.name }, file.name), ` ${bytes(file.nbytes)} `,
    element("small", { title: file.sha256 }, `sha256 ${file.sha256.slice(0, 16)}…`))));
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
      element("td", { class: "r", title: row.receipts ? `signed by ${plural(row.receipts.peers, "node")}` : "no receipt yet" },
        row.receipts ? element("a", { href: `/api/v1/contributors/${row.peer}/receipts` }, count(signed(row))) : "–"),
      element("td", { class: "r" }, duration(row.worked_s)), element("td", { class: "r" }, count(row.steps)), element("td", { class: "r" }, bytes(row.sent)));
  }));
}
