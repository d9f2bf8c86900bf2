// The page of `swarmnode chat --page`. Every call carries the token of the address that was printed.

import { count, element, loss, write } from "./format.js";
import { themeButton } from "./theme-button.js";

const at = (id) => document.getElementById(id);

const token = location.hash.slice(1) || sessionStorage.getItem("token") || "";
sessionStorage.setItem("token", token);
history.replaceState(null, "", "/"); // not in the address bar, where it could be copied along

let said = [];
let first = [];
let seed = 0;
let answering = null;

async function post(verb, given, signal) {
  const answer = await fetch(`/v1/${verb}`, {
    method: "POST", body: JSON.stringify(given), signal, headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
  });
  if (answer.ok) return answer;
  throw new Error((await answer.json()).error);
}

function wrong(text) { write(at("wrong"), text); }

// A line of the conversation; returns the paragraph of its text. Never HTML: a model writes what it likes.
function show(role, text) {
  const paragraph = element("p", {}, text);
  at("talk").append(element("li", { class: role }, element("b", {}, role === "user" ? "you" : "the model"), paragraph));
  paragraph.scrollIntoView({ block: "nearest" });
  return paragraph;
}

function told(about) {
  write(at("run-name"), about.run);
  document.title = `talk with ${about.run}`;
  const parts = [`${count(about.parameters)} parameters`, `${count(about.samples)} samples`];
  if (about.validation !== null) parts.push(`loss ${loss(about.validation)}`);
  write(at("phrase"), parts.join(" · "));
  const changes = about.changes ? "; each new conversation takes the newest model of the run" : "";
  write(at("facts"), `${about.kind}, round ${count(about.round)}; a context of ${count(about.context)} tokens${changes}`);
}

async function begin() {
  if (answering) answering.abort();
  wrong("");
  at("talk").replaceChildren();
  write(at("speed"), "");
  try {
    const about = await (await post("begin", {})).json();
    told(about);
    first = about.system ? [{ role: "system", content: about.system }] : [];
    if (!at("tokens").value) {
      at("tokens").value = about.tokens;
      at("temperature").value = about.temperature;
    }
  } catch (error) {
    write(at("phrase"), "no model");
    wrong(error.message);
  }
  said = [...first];
  at("message").focus();
}

async function read(answer, paragraph) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const from = performance.now();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    text += value;
    write(paragraph, text);
    paragraph.scrollIntoView({ block: "nearest" });
  }
  const seconds = (performance.now() - from) / 1000;
  if (seconds > 0.5) write(at("speed"), `${Math.round(text.length / seconds)} characters/s`);
}

async function send() {
  const text = at("message").value.trim();
  if (!text || answering) return;
  wrong("");
  at("message").value = "";
  said.push({ role: "user", content: text });
  show("user", text);
  const paragraph = show("assistant", "");
  paragraph.parentElement.classList.add("waits");
  answering = new AbortController();
  at("stop").hidden = false;
  at("send").disabled = true;
  const asked = { messages: said, tokens: Number(at("tokens").value), temperature: Number(at("temperature").value), seed: seed++ };
  try {
    await read(await post("say", asked, answering.signal), paragraph);
  } catch (error) {
    if (error.name !== "AbortError") wrong(error.message);
  }
  const answer = paragraph.textContent.trim();
  if (answer) said.push({ role: "assistant", content: answer });
  else said.pop();
  paragraph.parentElement.classList.remove("waits");
  if (!answer) write(paragraph, "(no words)");
  answering = null;
  at("stop").hidden = true;
  at("send").disabled = false;
  at("message").focus();
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
at("stop").addEventListener("click", () => answering && answering.abort());
at("again").addEventListener("click", begin);
themeButton(at("theme"));
begin();
