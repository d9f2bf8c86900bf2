// What stands on top while the run is not simply training: who is missing and how to join, or how to go on.

import { count, day, element, hour, loss, plural, stageName, stagesName, write } from "./format.js";
import { state } from "./store.js";

const WORDS = ["No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine"];
const at = (id) => document.getElementById(id);
let shown = "";

export function update() {
  const { run, summary } = state;
  if (!run || !summary) return;
  document.body.dataset.phase = summary.phase;
  const empty = summary.replicas.flatMap((serving, stage) => (serving ? [] : [stage]));
  const [title, text, way] = words(run, summary, empty);
  const parts = JSON.stringify([title, text, way, summary.replicas.map(Boolean)]);
  if (parts === shown) return;
  shown = parts;
  at("lead").hidden = !title;
  write(at("lead-title"), title);
  write(at("lead-text"), text);
  write(at("lead-way"), way);
  at("lead-stages").replaceChildren(...(summary.replicas.length <= 48 ? summary.replicas : []).map((serving, stage) =>
    element("li", { class: serving ? "served" : "" }, element("b", {}, stageName(stage)), element("span", {}, serving ? "has a machine" : sleeps(summary, stage) ? "sleeps" : "waits"))));
  at("lead-stages").hidden = !empty.length || ["stopped", "ended"].includes(summary.phase);
  at("join").hidden = !run.join.length;
  at("join").classList.toggle("loud", Boolean(title) && summary.phase !== "looking");
  write(at("join-line"), run.join[0] || "");
  write(at("join-why"), title ? "On each machine, once:" : "Join this run with your machine:");
}

function sleeps(summary, stage) {
  return summary.asleep.some((one) => one.stage === stage);
}

function words(run, summary, empty) {
  const reached = `It trained ${count(summary.tokens)} tokens${summary.trained ? `, the last of them on ${day(summary.trained)}` : ""}${summary.loss_validation === null ? "" : `; its validation loss is ${loss(summary.loss_validation)}`}.`;
  const more = empty.length === 1 ? "One more machine" : `${WORDS[empty.length] || empty.length} more machines`;
  switch (summary.phase) {
    case "waiting":
      if (!empty.length) return ["Every stage has a machine", "The first samples are on their way.", ""];
      return [summary.nodes ? `${more} and training begins` : "Be the first",
        `The model is split into ${plural(run.stages, "stage")}; ${empty.length === run.stages ? "each needs" : empty.length === 1 ? `${stagesName(empty)} needs` : `${stagesName(empty)} need`} a machine. Which one a newcomer takes, it finds out by itself.`,
        run.join.length ? "" : "Ask whoever runs this for an invite."];
    case "broken":
      return [`${more} and training goes on`, `${empty.length === 1 ? `S${stagesName(empty).slice(1)} has` : `S${stagesName(empty).slice(1)} have`} nobody now. A newcomer takes up what was learned there, from the newest copy: a neighbour's, a checkpoint, or the disk of whoever had it. How many samples that lacks, the timeline says then.`, ""];
    case "asleep":
      return [summary.asleep.map((one, index) => `${index ? "s" : "S"}${stageName(one.stage).slice(1)} sleeps${one.until ? ` until ${hour(one.until)}` : ""} with ${one.name}`).join(", "),
        "Training goes on when it wakes, or at once with one more machine. Nothing is lost: it has what was learned there, and gives it to whoever takes the stage.", ""];
    case "stopped":
      return ["This run has stopped: nobody is here", reached, "It goes on when the machines that trained it join again: each has its state on its disk."];
    case "ended":
      return ["This run is complete", reached, "Whoever wants more of it joins again, and its owner gives it a later end: swarmnode amend."];
    case "looking":
      return ["Looking for the run's nodes", "This coordinator has just begun; who is there is known in some seconds.", ""];
    default:
      return ["", "", ""];
  }
}

at("copy").addEventListener("click", async (event) => {
  try {
    await navigator.clipboard.writeText(at("join-line").textContent);
    event.target.textContent = "copied";
  } catch { event.target.textContent = "select it"; }
  setTimeout(() => { event.target.textContent = "copy"; }, 2000);
});
