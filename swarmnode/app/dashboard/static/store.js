// What is known of the run, kept current by the server's event stream.

const POINTS_MAX = 2400;
const ENTRIES_MAX = 300;
const ROUNDS_MAX = 60;

export const state = {
  run: null, summary: null, nodes: new Map(), points: [], validations: [], alarms: [], links: [], rounds: [],
  entries: [], contributors: [], archive: null, models: [], other: null, connected: false,
};

const listeners = [];

// `listener(what)`: `what` has the names of the parts that changed.
export function listen(listener) {
  listeners.push(listener);
}

// What was measured of each checkpoint so far, and its texts: asked for when there is a new one.
async function models() {
  const answer = await fetch("/api/v1/models");
  if (!answer.ok) return;
  state.models = (await answer.json()).models;
  tell(new Set(["models"]));
}

export function tell(what) {
  const begun = performance.now();
  for (const listener of listeners) listener(what);
  performance.measure("swarmnode-update", { start: begun, end: performance.now() });
}

function takePicture(picture) {
  Object.assign(state, picture, { nodes: new Map(picture.nodes.map((row) => [row.peer, row])), connected: true });
  tell(new Set(["picture", "summary", "nodes", "points", "alarms", "links", "rounds", "entries", "contributors", "archive"]));
  models();
}

function takeChange(change) {
  const what = new Set(["summary"]);
  state.summary = change.summary;
  for (const row of change.nodes) state.nodes.set(row.peer, row);
  for (const peer of change.forgotten || []) state.nodes.delete(peer);
  if (change.nodes.length || change.forgotten) what.add("nodes");
  if (JSON.stringify(change.alarms) !== JSON.stringify(state.alarms)) {
    state.alarms = change.alarms;
    what.add("alarms");
  }
  if (change.point) {
    state.points.push(change.point);
    if (state.points.length > POINTS_MAX) state.points = state.points.filter((_, index) => index % 2 || index > POINTS_MAX / 2);
    what.add("points");
  }
  if (change.validations) {
    state.validations.push(...change.validations);
    state.validations.sort((a, b) => a[0] - b[0]);
    what.add("points");
  }
  if (change.rounds) {
    const rounds = new Map(state.rounds.map((row) => [row.round, row]));
    for (const row of change.rounds) rounds.set(row.round, row);
    state.rounds = [...rounds.values()].sort((a, b) => a.round - b.round).slice(-ROUNDS_MAX);
    what.add("rounds");
  }
  if (change.entries) {
    state.entries = [...change.entries.reverse(), ...state.entries].slice(0, ENTRIES_MAX);
    what.add("entries");
  }
  for (const part of ["links", "contributors"]) {
    if (change[part]) {
      state[part] = change[part];
      what.add(part);
    }
  }
  if (change.archive && JSON.stringify(change.archive) !== JSON.stringify(state.archive)) {
    state.archive = change.archive;
    what.add("archive");
    models();
  }
  tell(what);
}

export async function connect() {
  state.run = await (await fetch("/api/v1/run")).json();
  tell(new Set(["run"]));
  const stream = new EventSource("/api/v1/stream");
  stream.addEventListener("picture", (event) => takePicture(JSON.parse(event.data)));
  stream.addEventListener("change", (event) => takeChange(JSON.parse(event.data)));
  stream.addEventListener("error", () => {
    state.connected = false;
    tell(new Set(["connection"]));
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
  });
  addEventListener("pagehide", () => stream.close());
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
}
