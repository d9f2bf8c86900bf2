// Numbers, times and elements as this page shows them.

const NONE = "–";

export function loss(nats) {
  return nats === null || nats === undefined ? NONE : nats.toFixed(3);
}

export function count(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size < 10000) return Math.round(value).toLocaleString("en");
  for (const [bound, unit] of [[1e6, "k"], [1e9, "M"], [1e12, "G"], [1e15, "T"]]) {
    if (size < bound) return `${(value / (bound / 1000)).toPrecision(3)} ${unit}`;
  }
  return value.toExponential(2);
}

export function bytes(value) {
  let size = value || 0;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (size < 1000) return `${unit === "B" ? Math.round(size) : size.toPrecision(3)} ${unit}`;
    size /= 1000;
  }
  return `${size.toPrecision(3)} PB`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return NONE;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function day(unix) {
  return new Date(unix * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" });
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

// The time of a day, with the day if it is not today.
export function hour(unix) {
  const then = new Date(unix * 1000);
  const day = then.toDateString() === new Date().toDateString() ? {} : { weekday: "short", day: "numeric", month: "short" };
  return then.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

export function milliseconds(value) {
  return value === null || value === undefined ? NONE : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

// An element: attributes by name, children as text or elements. Never HTML: names are chosen by strangers.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Write only what differs: most of the page stays as it was.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function plural(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

// Stages as people read them, counted from 1; the API's count from 0.
export function stageName(stage) {
  return `stage ${stage + 1}`;
}

export function stagesName(stages) {
  return `${stages.length === 1 ? "stage" : "stages"} ${stages.slice(0, 8).map((stage) => stage + 1).join(", ")}`;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
