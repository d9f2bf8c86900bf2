// Puts the parts together: what changed decides what is drawn; addresses decide which view is shown.

import * as charts from "./charts.js";
import * as lead from "./lead.js";
import * as links from "./links.js";
import * as model from "./model.js";
import * as node from "./node.js";
import * as panels from "./panels.js";
import * as swarm from "./swarm.js";
import * as waits from "./waits.js";
import { connect, listen } from "./store.js";
import { themeButton } from "./theme-button.js";

const PARTS = {
  run: [panels.header, panels.footer, lead.update],
  connection: [panels.header],
  summary: [panels.header, panels.numbers, lead.update, waits.update],
  nodes: [swarm.update],
  points: [charts.update],
  alarms: [panels.alarms],
  links: [links.update],
  rounds: [panels.rounds],
  entries: [panels.timeline],
  contributors: [panels.people],
  archive: [model.archive],
  models: [model.models],
};

listen((what) => {
  const todo = new Set([...what].flatMap((part) => PARTS[part] || []));
  for (const draw of todo) draw();
});

// One document, two views.
function route() {
  const found = location.pathname.match(/^\/node\/([1-9A-HJ-NP-Za-km-z]+)$/);
  document.getElementById("view-run").hidden = Boolean(found);
  document.getElementById("view-node").hidden = !found;
  if (found) node.show(found[1]);
  else {
    node.hide();
    charts.update();
    links.update();
  }
}

function visit(address) {
  history.pushState(null, "", address);
  route();
  scrollTo(0, 0);
  document.getElementById("main").focus({ preventScroll: true });
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const address = link.getAttribute("href");
  if (address === "/" || address.startsWith("/node/")) {
    event.preventDefault();
    visit(address);
  }
});
document.addEventListener("visit", (event) => visit(event.detail));
addEventListener("popstate", route);

// Theme: the system's, until the reader chooses.
themeButton(document.getElementById("theme"), () => {
  charts.rebuild();
  links.update();
});

document.querySelectorAll('input[name="axis"]').forEach((input) => input.addEventListener("change", () => charts.set("axis", input.value)));
const at = (id) => document.getElementById(id);
at("log").addEventListener("change", (event) => charts.set("log", event.target.checked));
at("smooth").addEventListener("input", (event) => charts.set("smooth", Number(event.target.value)));
at("csv").addEventListener("click", charts.csv);
at("compare").addEventListener("change", (event) => {
  if (event.target.files.length) charts.compare(event.target.files[0]);
  event.target.value = "";
});
at("alone").addEventListener("click", charts.alone);

panels.kinds();
route();
connect();
