// The timeline of one step: a row for each stage or rank, a box for each action. Boxes of one kind are one path, so that thousands of
// them cost little.

import { h } from "./dom.js";
import { handlers, round, ticks } from "./chart.js";
import { figure, share } from "./format.js";

const [TOP, BOTTOM, ROW, BOX] = [4, 34, 24, 18];
const DIGIT = 6.5; // pixels of a digit of a box's number
const UNITS = ["vision", "llm", "audio", "generator"]; // the order of their colours; other units take the colours that are left
const WHOLE = "whole"; // of a rank that has all units: forward and backward of a microbatch in one
const REDUCTION = "reduction"; // no computation: the wait for sums of gradients behind the last action, of no microbatch
const PASSES = ["forward", "backward", "weight", REDUCTION]; // in the order of the legend

/** The colours of a timeline: by unit, a number. `encoder` stands for vision and audio where they share stages. */
export function colours(rows) {
  const units = [...new Set(rows.flatMap((row) => row.actions.map((action) => action.unit)))].filter(Boolean);
  const taken = new Map();
  for (const unit of units) {
    const own = UNITS.indexOf(unit === "encoder" ? "vision" : unit);
    if (own >= 0) taken.set(unit, own);
  }
  for (const unit of units) {
    if (!taken.has(unit)) taken.set(unit, [0, 1, 2, 3].find((colour) => ![...taken.values()].includes(colour)) ?? taken.size % 4);
  }
  return taken;
}

const computed = (row) => row.actions.filter((action) => action.kind !== REDUCTION);
const latest = (actions) => Math.max(0, ...actions.map((action) => action.end_s));

/** Where all boxes of the rows have ended. */
export const endOf = (rows) => latest(rows.flatMap((row) => row.actions));

/** When the rows have computed all, and which share of that time they have nothing to do. */
export function occupancy(rows) {
  const end_s = latest(rows.flatMap(computed));
  const busy_s = rows.reduce((sum, row) => sum + busyOf(row), 0);
  return { end_s, idle: end_s && rows.length ? Math.max(0, 1 - busy_s / (end_s * rows.length)) : null };
}

export function busyOf(row) {
  return computed(row).reduce((sum, action) => sum + action.end_s - action.begin_s, 0);
}

/** A timeline. what: {id, title, rows, longest: letters of a name, end_s: where the axis ends, unit: {scale, name}, palette}; cursor:
 * {row, at} or undefined. */
export function gantt(what, cursor, width) {
  const left = Math.min(110, 14 + 7 * what.longest);
  const x = (at_s) => left + (at_s / (what.end_s || 1)) * (width - left - 10);
  const height = TOP + BOTTOM + ROW * what.rows.length;
  handlers.set(what.id, { at: (px, py) => under(what, px, py, x), key: (name, now) => next(what.rows, name, now) });
  const action = cursor && what.rows[cursor.row]?.actions[cursor.at];
  const readout = action ? words(what, what.rows[cursor.row], action) : "no action chosen";
  const total = what.rows.reduce((sum, row) => sum + row.actions.length, 0);
  const before = what.rows.slice(0, cursor?.row ?? 0).reduce((sum, row) => sum + row.actions.length, 0);
  return h("div", { class: "gantt" },
    h("div", {
      id: what.id, class: "plot", "data-chart": what.id, tabindex: "0", role: "slider", "aria-label": `${what.title}, by action`, "aria-valuemin": 0,
      "aria-valuemax": Math.max(0, total - 1), "aria-valuenow": action ? before + cursor.at : 0, "aria-valuetext": readout,
    },
    h("svg", { width, height, "aria-hidden": "true" },
      what.rows.map((row, at) => [
        h("text", { x: left - 8, y: TOP + ROW * at + 14, class: "end" }, row.name),
        h("rect", { class: "idle", x: left, y: TOP + ROW * at, width: round(width - left - 10), height: BOX }),
      ]),
      boxes(what, x), numbers(what, x), axis(what, x, height),
      action && h("rect", { class: "chosen", x: round(x(action.begin_s)), y: TOP + ROW * cursor.row - 1, width: Math.max(2, round(x(action.end_s) - x(action.begin_s))), height: BOX + 2 }))),
    h("p", { class: "readout small", "aria-hidden": "true" }, action ? readout : "Point at a box, or use the arrow keys, to read what it is."));
}

/** What the colours mean. */
export function key(rows, palette) {
  const kinds = new Map();
  for (const row of rows) for (const action of row.actions) kinds.set(classOf(action, palette), nameOf(action));
  return h("ul", { class: "legend" }, [...kinds].sort(([one], [other]) => rankOf(one).localeCompare(rankOf(other))).map(([kind, name]) => h("li", null,
    h("svg", { width: 14, height: 14, "aria-hidden": "true" }, h("rect", { class: `box ${kind}`, width: 14, height: 14, rx: 2 })), h("span", { class: "name" }, name))),
    h("li", null, h("svg", { width: 14, height: 14, "aria-hidden": "true" }, h("rect", { class: "idle", width: 14, height: 14, rx: 2 })), h("span", { class: "name" }, "idle")));
}

/** By unit, forward first; what is of all units comes last. */
function rankOf(kind) {
  const [unit, pass] = kind.split(" ");
  return pass ? `0${unit}${PASSES.indexOf(pass)}` : `1${unit}`;
}

/** What an action does, in words. */
function nameOf({ kind, unit }) {
  return { [WHOLE]: "all units, forward and backward", [REDUCTION]: `${unit} sums of gradients` }[kind] ?? `${unit} ${kind}`;
}

function classOf(action, palette) {
  return action.kind === WHOLE ? action.kind : `unit${palette.get(action.unit) ?? 0} ${action.kind}`;
}

function boxes(what, x) {
  const paths = new Map();
  what.rows.forEach((row, at) => {
    for (const action of row.actions) {
      const [from, to] = [x(action.begin_s), x(action.end_s)];
      const gap = to - from > 3 ? 1 : 0; // between boxes that touch
      const box = `M${round(from)} ${TOP + ROW * at}h${round(Math.max(0.5, to - from - gap))}v${BOX}h${-round(Math.max(0.5, to - from - gap))}z`;
      const kind = classOf(action, what.palette);
      paths.set(kind, (paths.get(kind) ?? "") + box);
    }
  });
  return [...paths].sort().map(([kind, d]) => h("path", { class: `box ${kind}`, d }));
}

/** Numbers of microbatches, where they fit into their boxes. */
function numbers(what, x) {
  return what.rows.map((row, at) => row.actions.filter(({ microbatch }) => microbatch !== undefined).map((action) => {
    const wide = x(action.end_s) - x(action.begin_s);
    if (wide < DIGIT * String(action.microbatch).length + 5) return null;
    return h("text", { class: `number ${classOf(action, what.palette)}`, x: round(x(action.begin_s) + wide / 2), y: TOP + ROW * at + 13 }, String(action.microbatch));
  }));
}

function axis(what, x, height) {
  const floor = height - BOTTOM;
  const { values, write } = ticks(0, what.end_s * what.unit.scale, Math.max(2, Math.floor((x(what.end_s) - x(0)) / 80)));
  return [
    h("line", { class: "axis", x1: round(x(0)), x2: round(x(what.end_s)), y1: floor, y2: floor }),
    values.map((value) => h("text", { x: round(x(value / what.unit.scale)), y: floor + 16, class: "middle" }, write(value))),
    h("text", { x: round(x(what.end_s)), y: height - 4, class: "end" }, `${what.unit.name} since the start of the step`),
  ];
}

function words(what, row, action) {
  const { scale, name } = what.unit;
  const of = action.microbatch === undefined ? "" : ` of microbatch ${action.microbatch}${action.chunk ? `, chunk ${action.chunk}` : ""}`;
  return `${row.name}: ${nameOf(action)}${of}, ${figure(action.begin_s * scale)} to ${figure(action.end_s * scale)} ${name}`;
}

function under(what, px, py, x) {
  const row = Math.floor((py - TOP) / ROW);
  const at = what.rows[row]?.actions.findIndex((action) => x(action.begin_s) <= px && px < x(action.end_s)) ?? -1;
  return at < 0 ? undefined : { row, at };
}

function next(rows, name, now) {
  if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(name)) return undefined;
  if (!now) return { row: 0, at: 0 };
  const row = Math.max(0, Math.min(rows.length - 1, now.row + (name === "ArrowDown") - (name === "ArrowUp")));
  const last = Math.max(0, rows[row].actions.length - 1);
  const there = { ArrowLeft: now.at - 1, ArrowRight: now.at + 1, Home: 0, End: last }[name];
  return { row, at: Math.max(0, Math.min(last, there ?? nearest(rows[row], rows[now.row].actions[now.at]))) };
}

/** In another row, the action that begins about when this one did. */
function nearest(row, action) {
  const found = row.actions.findIndex((other) => other.end_s > (action?.begin_s ?? 0));
  return found < 0 ? row.actions.length - 1 : found;
}

/** The timeline in figures, for who does not see it. */
export function rowFigures(rows, write) {
  const { end_s } = occupancy(rows);
  return rows.map((row) => [row.name, String(computed(row).length), write(busyOf(row)), share(end_s ? 1 - busyOf(row) / end_s : null)]);
}
