// The page of `swarmnode ui`: the node on this machine. Every call carries the token of the address that was printed.

import { bytes, count, day, duration, element, loss, plural, stageName, write } from "./format.js";
import { themeButton } from "./theme-button.js";

const AGAIN_MS = 2000;
const RECORD_MS = 20000;
const at = (id) => document.getElementById(id);

const token = location.hash.slice(1) || sessionStorage.getItem("token") || "";
sessionStorage.setItem("token", token);
history.replaceState(null, "", "/"); // not in the address bar, where it could be copied along

// The response to a verb; throws an Error with what the server says, and `status`.
async function post(verb, given = {}) {
  const answer = await fetch(`/v1/${verb}`, {
    method: "POST", body: JSON.stringify(given), headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
  });
  if (answer.ok) return answer;
  throw Object.assign(new Error((await answer.json()).error), { status: answer.status });
}

const ask = async (verb, given) => (await post(verb, given)).json();

function say(text, wrong = false) {
  write(at("said"), text);
  at("said").classList.toggle("wrong", wrong);
}

async function tell(verb, given, said) {
  try {
    await ask(verb, given);
    say(said);
  } catch (error) { say(error.message, true); }
}

let drawn = "";

// on-ac-only: On AC only
const words = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("-", " ").replace(" ac ", " AC ");

function moment(text) {
  const when = new Date(text), today = when.toDateString() === new Date().toDateString();
  return when.toLocaleString("en-GB", today ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

function show(now) {
  const running = !now.paused;
  document.body.dataset.running = running;
  write(at("run-name"), now.run_name);
  document.title = `${running ? now.trains ? "training" : "waiting" : "paused"} · ${now.run_name} on this machine`;
  write(at("phrase"), now.trains_nothing ? "meeting point" : running ? `round ${count(now.round)}` : "paused");
  write(at("title"), running ? now.headline[0].toUpperCase() + now.headline.slice(1) : "Paused");
  write(at("why"), running ? [now.limits.reason.replace("within its limits", ""), ...now.waits].filter(Boolean).join(" · ") : now.paused);
  at("doing").hidden = at("rules").hidden = at("numbers").hidden = now.trains_nothing;
  const asked = !running && ["asked to pause", "snoozed"].includes(now.limits.reason);
  at("pause").hidden = asked;
  at("resume").hidden = !asked;
  const mine = now.state === "NODE_STATE_UNSPECIFIED" ? -1 : now.stage, many = now.stages > 48;
  at("stages").hidden = many || now.trains_nothing;
  if (!many) at("stages").replaceChildren(...Array.from({ length: now.stages }, (_, stage) => element("li", { class: `${now.empty.includes(stage) ? "" : "served"} ${stage === mine ? "mine" : ""}` },
    element("b", {}, stageName(stage)), element("span", {}, stage === mine ? "yours" : now.empty.includes(stage) ? "waits" : "has a machine"))));
  write(at("n-given"), count(Number(now.tokens_given)));
  write(at("n-up"), `tokens in ${duration(now.uptime_s)}`);
  write(at("n-speed"), count(now.speed.tokens_given));
  write(at("n-whole"), `of ${count(now.speed.tokens_total)} tokens/s`);
  write(at("n-loss"), loss(now.loss_train || now.loss_validation || null));
  write(at("n-traffic"), bytes(Number(now.limits.quota_used_nbytes)));
  write(at("n-quota"), now.limits.limits.quota ? `of ${now.limits.limits.quota}` : "no quota");
  rules(now);
  write(at("facts"), `${now.home} · peer ${now.peer_id} · run ${now.run_id.slice(0, 16)} · swarmnode ${now.version}`);
  at("way").replaceChildren(...(now.page ? [element("a", { href: now.page, rel: "noreferrer" }, "this machine on the run's page")] : []));
  if (now.clock) say(now.clock, true);
}

// The form is drawn again only when the limits changed: what is being typed stays.
function rules(now) {
  const set = now.limits.limits, key = JSON.stringify(set);
  if (key === drawn) return;
  drawn = key;
  at("limits").replaceChildren(...now.kinds.map((kind) => {
    const id = `limit-${kind.name}`, value = set[kind.name] || "";
    const input = kind.example ? element("input", { id, name: kind.name, value, placeholder: `none, or ${kind.example}`, "aria-describedby": `${id}-help`, spellcheck: "false" })
      : element("input", { id, name: kind.name, type: "checkbox", checked: value || null, "aria-describedby": `${id}-help` });
    return element("p", {}, element("label", { for: id }, words(kind.name)), input, element("span", { id: `${id}-help`, class: "note" }, kind.help));
  }), element("p", { class: "doing" }, element("button", { type: "submit", class: "act main" }, "Apply")));
  write(at("config"), now.config);
  write(at("toml"), Object.keys(set).length ? `[join]\n${Object.entries(set).map(([name, text]) => `${name} = ${name === "on-ac-only" ? "true" : JSON.stringify(text)}`).join("\n")}` : "# no limit is set");
}

at("limits").addEventListener("submit", (event) => {
  event.preventDefault();
  const set = JSON.parse(drawn), changed = {};
  for (const input of at("limits").querySelectorAll("input")) {
    const text = input.type === "checkbox" ? (input.checked ? "yes" : "") : input.value.trim();
    if (text !== (set[input.name] || "")) changed[input.name] = text || "none";
  }
  const names = Object.keys(changed);
  if (names.length) tell("limit", { changed }, `changed: ${names.map((name) => `${words(name)} ${changed[name]}`).join(", ")}`);
  else say("nothing was changed");
});

function record(told) {
  const today = Math.floor(Date.now() / 86400000), by = new Map(told.days), most = Math.max(1, ...told.days.map((one) => one[1]));
  write(at("gave"), told.samples ? `${count(told.samples)} samples, signed by ${plural(told.clients, "machine")}` : "nothing yet");
  at("days").hidden = !told.samples;
  at("days").replaceChildren(...Array.from({ length: 28 }, (_, index) => {
    const date = today - 27 + index, samples = by.get(date) || 0;
    const bar = element("i", { title: `${new Date(date * 86400000).toLocaleDateString("en-GB", { day: "numeric", month: "short" })}: ${plural(samples, "sample")}` });
    bar.style.height = `${Math.max(4, (100 * samples) / most)}%`;
    return bar;
  }));
  document.querySelector("#receipts tbody").replaceChildren(...told.receipts.map((one) => element("tr", {},
    element("th", { scope: "row", title: one.client }, one.client.slice(-8)), element("td", { "data-of": "run" }, one.run.slice(0, 8)),
    element("td", { class: "r", "data-of": "samples" }, count(one.samples)), element("td", { class: "r", "data-of": "until" }, day(one.until)))));
  at("timeline").replaceChildren(...(told.entries.length ? told.entries.map((entry) => element("li", { class: `kind-${entry.kind} ${entry.level}` },
    element("time", { datetime: entry.ts }, moment(entry.ts)), element("p", {}, entry.text))) : [element("li", { class: "note" }, "nothing yet")]));
}

function missing(error) {
  document.body.dataset.running = false;
  at("doing").hidden = at("rules").hidden = at("numbers").hidden = at("stages").hidden = true;
  write(at("phrase"), error.status ? "" : "connection lost, trying again …");
  if (!error.status) return;
  write(at("title"), error.status === 401 ? "This address has no valid token" : error.status === 404 ? "No node runs here now" : "The node does not answer");
  write(at("why"), error.message);
}

// Shows each line that the node pushes, until it ends.
async function watch() {
  try {
    const lines = (await post("watch")).body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await lines.read();
      if (done) return;
      const whole = (rest + value).split("\n");
      rest = whole.pop();
      if (whole.length) show(JSON.parse(whole.at(-1)));
    }
  } catch (error) { missing(error); }
}

async function repeat(work, ms) {
  try { await work(); } catch { /* `watch` says it */ }
  setTimeout(() => repeat(work, ms), ms);
}

at("pause").addEventListener("click", () => tell("pause", { reason: "asked to pause" }, "It finishes what it holds, and takes nothing new. Its stage stays in memory."));
at("resume").addEventListener("click", () => tell("resume", {}, "It works again as soon as its limits allow."));
for (const button of document.querySelectorAll("[data-snooze]")) button.addEventListener("click", () => {
  const morning = new Date();
  morning.setHours(8, 0, 0, 0);
  if (morning <= Date.now()) morning.setDate(morning.getDate() + 1);
  const seconds = button.dataset.snooze === "morning" ? (morning - Date.now()) / 1000 : Number(button.dataset.snooze);
  tell("pause", { for_s: seconds, reason: "snoozed" }, "The others are told when to expect it back.");
});
// Leaving cannot be taken back from here, so it takes two clicks.
let sure = 0;
at("finish").addEventListener("click", () => {
  if (Date.now() < sure) {
    tell("finish", { reason: "swarmnode ui" }, "It finishes all that it holds, saves, and leaves. Start it again with swarmnode join.");
    return;
  }
  sure = Date.now() + 5000;
  write(at("finish"), "Sure? It stops until you join again");
  setTimeout(() => write(at("finish"), "Finish and leave"), 5000);
});

themeButton(at("theme"));

repeat(watch, AGAIN_MS);
repeat(async () => record(await ask("record")), RECORD_MS);
