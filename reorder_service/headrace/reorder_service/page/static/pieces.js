// What several views are put together from: badges, tiles, bars, tables, and sentences with commands in them.

import { h } from "./dom.js";
import { count, NOT_MEASURED, share } from "./format.js";

const ICONS = {
  running: "M5 3.5v9l7-4.5z",
  indexing: "M3 4h10M3 8h10M3 12h6",
  paused: "M5 3.5v9M11 3.5v9",
  done: "M3 8.5l3.5 3.5L13 4.5",
  failed: "M4 4l8 8M12 4l-8 8",
  cancelled: "M3.5 8h9",
};

/** A job's state: a word, and a sign that does not need colour. */
export function badge(state) {
  const sign = h("svg", { viewBox: "0 0 16 16", width: 12, height: 12, "aria-hidden": "true" }, h("path", { d: ICONS[state] ?? "M8 4v8" }));
  return h("span", { class: `badge ${state in ICONS ? state : ""}` }, sign, state.replaceAll("_", " "));
}

/** A sentence; what it has between backticks is a command or a name. */
export function prose(text) {
  return String(text).split("`").map((part, at) => (at % 2 ? h("code", null, part) : part));
}

/** What holds a job up, or that nothing does. */
export function finding(job, level = "") {
  const kind = job.state === "failed" ? "bad" : job.held_up ? "warn" : "well";
  return h("p", { class: `finding ${kind} ${level}` }, prose(job.finding || job.message || "nothing is known yet"));
}

/** A bar of committed steps, with their numbers in words; only the words where the number of all steps is not known. */
export function progress(job) {
  const known = job.num_steps !== null && job.num_steps !== undefined;
  const done = known && job.num_steps ? job.committed_steps / job.num_steps : 0;
  const words = known ? [`${count(job.committed_steps)} of ${count(job.num_steps)} steps`, share(Math.min(1, done))] : [`${count(job.committed_steps)} steps`];
  return h("div", { class: `progress ${job.state}` },
    known && h("progress", { max: 1, value: done, "aria-label": `committed steps of ${job.job}` }),
    h("p", { class: "numbers" }, words.map((word) => h("span", null, word))));
}

/** One figure with its name, and a smaller line below. */
export function tile(name, value, note) {
  const missing = value === NOT_MEASURED;
  return h("div", { class: "tile" }, h("dt", null, name), h("dd", { class: missing ? "missing" : null }, value), note && h("dd", { class: "note" }, note));
}

/** A part of a page with its heading. */
export function section(title, ...children) {
  return h("section", { class: "card" }, h("h2", null, title), ...children);
}

/** A table that scrolls by itself where it is too wide. columns: [heading, "number" | ""]; rows: lists of cells. */
export function table(caption, columns, rows) {
  const head = columns.map(([name, kind]) => h("th", { scope: "col", class: kind || null }, name));
  const cell = (value, at) => {
    const classes = [columns[at][1], value === NOT_MEASURED ? "missing" : ""].filter(Boolean).join(" ");
    return at === 0 ? h("th", { scope: "row", class: classes || null }, value) : h("td", { class: classes || null }, value);
  };
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h("table", null, h("caption", { class: "unseen" }, caption), h("thead", null, h("tr", null, head)),
      h("tbody", null, rows.map((row) => h("tr", null, row.map(cell))))));
}

/** A share of one as a bar of fixed width; how much it is stands beside it. */
export function bar(value, kind = "") {
  const known = value !== null && value !== undefined && Number.isFinite(value);
  const filled = known ? Math.max(0, Math.min(1, value)) : 0;
  return h("svg", { class: `bar ${kind}`, viewBox: "0 0 100 8", width: 100, height: 8, preserveAspectRatio: "none", "aria-hidden": "true" },
    h("rect", { class: "all", width: 100, height: 8 }), filled > 0 && h("rect", { class: "filled", width: 100 * filled, height: 8 }));
}

/** Figures as a table behind a line that opens it; they are only made once it is open. */
export function figures(id, opened, title, make) {
  return h("details", { id, "data-details": id, open: opened.has(id) }, h("summary", { id: `${id}-summary` }, title), opened.has(id) && make());
}

/** Links of which one is the present choice. */
export function choices(label, links) {
  return h("nav", { class: "choices", "aria-label": label }, h("span", { class: "quiet" }, label),
    links.map(([name, address, chosen]) => h("a", { id: `choice-${label}-${name}`.replace(/\W+/g, "-"), href: address, "aria-current": chosen ? "true" : null }, name)));
}

/** Something to do in a terminal. */
export function command(text) {
  return h("pre", { tabindex: "0", "aria-label": "command" }, h("code", null, text));
}

export function hint(...children) {
  return h("p", { class: "quiet" }, ...children);
}
