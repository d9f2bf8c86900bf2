// The newest model, what each checkpoint writes and scores, and where its files are.

import * as charts from "./charts.js";
import { bytes, count, day, duration, element, loss, plural, write } from "./format.js";
import { state } from "./store.js";

const at = (id) => document.getElementById(id);
let chosen = null; // a label; null: the newest

// What the owner's archive holds. Files of a checkpoint are asked for when somebody wants to see them.
export function archive() {
  const kept = state.archive;
  shown();
  at("checkpoints-all").hidden = !kept || !kept.entries.length;
  at("model-newest").hidden = !kept;
  if (!kept) return;
  const [row] = kept.entries;
  const age = row && state.summary ? duration(Math.max(0, state.summary.t - row.t)).replace(/ \d+ (s|min)$/, "") : "";
  write(at("archive-note"), kept.status);
  at("model-newest").replaceChildren(...(row ? [
    element("p", {}, element("b", {}, `Newest: round ${count(row.round)}`), ` ${count(row.samples * state.run.context)} tokens · validation ${row.measured === "later" ? "being measured" : loss(row.loss)}${row.measured === "swarm" ? " (as nodes say)" : ""} · ${bytes(row.nbytes)} · ${age} old`),
    row.urls ? element("p", {}, element("code", {}, `wget -P model -i ${location.origin}${row.urls}`)) : element("p", { class: "note" }, "Its files are its owner's."),
  ] : [element("p", { class: "note" }, "No checkpoint yet.")]));
  document.querySelector("#checkpoints tbody").replaceChildren(...kept.entries.map((one) => {
    const agreed = one.agree.length ? Math.min(...one.agree) : 0;
    const said = agreed ? `each stage confirmed by ${plural(agreed, "other replica")}` : "not every stage confirmed";
    const refused = one.liars.length ? `; refused: ${one.liars.join(", ")}` : "";
    const link = one.urls ? element("details", {}, element("summary", {}, "files"), element("ul", { class: "files" })) : element("span", {}, "of its owner");
    if (one.urls) link.addEventListener("toggle", () => files(one.label, link.querySelector("ul")), { once: true });
    return element("tr", {},
      element("th", { scope: "row" }, `round ${count(one.round)}`, one.best ? element("span", { class: "best" }, " best") : null),
      element("td", { class: "r", "data-of": "samples" }, count(one.samples)),
      element("td", { class: "r", "data-of": "validation", title: one.measured === "later" ? "being measured" : one.measured ? `measured by the ${one.measured}` : "not measured" }, one.measured === "later" ? "…" : loss(one.loss)),
      element("td", { class: "r", "data-of": "size" }, bytes(one.nbytes)), element("td", { "data-of": "copies" }, said + refused), element("td", { "data-of": "get it" }, link));
  }));
}

function shown() {
  at("archive").hidden = !state.archive && !state.models.length;
}

async function files(label, host) {
  const found = await (await fetch("/api/v1/archive")).json();
  const row = found.entries.find((each) => each.label === label);
  host.replaceChildren(...(row ? row.files : []).map((file) => element("li", {},
    element("a", { href: file.href, download: file.name }, file.name), ` ${bytes(file.nbytes)} `,
    element("small", { title: file.sha256 }, `sha256 ${file.sha256.slice(0, 16)}…`))));
}

const written = () => state.models.filter((one) => one.continuations.length);

export function models() {
  shown();
  const list = written();
  at("texts").hidden = !list.length;
  at("texts-none").hidden = list.length > 0 || !state.archive;
  at("texts-when").max = Math.max(0, list.length - 1);
  at("texts-when").disabled = list.length < 2;
  if (list.length) texts(list);
  charts.scores();
}

// What the chosen checkpoint makes of each prompt: the slider goes through time.
function texts(list) {
  const found = list.findIndex((one) => one.label === chosen);
  const index = found < 0 ? list.length - 1 : found;
  const one = list[index];
  at("texts-when").value = index;
  const when = `round ${count(one.round)}, ${count(one.samples * state.run.context)} tokens, loss ${loss(one.loss)}, ${day(one.t)}`;
  at("texts-when").setAttribute("aria-valuetext", when);
  write(at("texts-at"), `${when}${index === list.length - 1 ? " · the newest" : ""}`);
  at("continuations").replaceChildren(...one.continuations.map((each) => element("li", {}, element("b", {}, each.prompt), element("span", {}, each.text))));
}

at("texts-when").addEventListener("input", (event) => {
  const list = written();
  const index = Number(event.target.value);
  chosen = index === list.length - 1 ? null : list[index].label;
  texts(list);
});
