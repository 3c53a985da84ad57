// Lines over step numbers, drawn as SVG. The readout above a chart is its legend: it has the figures of the step that the pointer or
// the arrow keys are at, the latest one without either.

import { h } from "./dom.js";
import { count, figure, NOT_MEASURED } from "./format.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [52, 14, 24, 36];
const [TALL, LOW] = [230, 190];
const NARROW = 560;
const CUT = 3; // how many times the 95th percentile a step may take before the axis ends below it

/** Where pointer and keys are answered: by a chart's id, {at(x, y), key(name, cursor)}, which give a cursor. */
export const handlers = new Map();

/** Round numbers from `low` to `high`, and how to write them; `integral` for what is counted. */
export function ticks(low, high, most, integral = false) {
  const rough = (high - low) / Math.max(1, most) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const found = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const step = integral ? Math.max(1, Math.round(found)) : found;
  const values = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) values.push(at * step);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return { values, write: (value) => value.toFixed(decimals) };
}

/** Where the vertical axis ends: above all values, but for a few that would flatten the others. */
export function top(values) {
  const sorted = values.filter((value) => value !== null && Number.isFinite(value)).sort((a, b) => a - b);
  if (!sorted.length) return { end: 1, above: 0, highest: 0 };
  const usual = sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * 0.95))];
  const highest = sorted[sorted.length - 1];
  const end = highest > CUT * usual && usual > 0 ? usual * 1.5 : highest;
  return { end, above: sorted.filter((value) => value > end).length, highest };
}

/**
 * A chart. what: {id, title, first: number of the first step, unit: {scale, name}, low: where the vertical axis begins,
 * series: [{name, kind, values, area}], marks: [{step, label}], summary}. cursor: index of a step, or undefined.
 */
export function lineChart(what, cursor, width) {
  const size = { width, height: width < NARROW ? LOW : TALL };
  const length = what.series[0].values.length;
  const scale = scales(what, length, size);
  const latest = latestKnown(what.series);
  const at = Math.max(0, Math.min(length - 1, cursor ?? latest));
  handlers.set(what.id, {
    at: (x) => Math.max(0, Math.min(length - 1, Math.round(((x - LEFT) / (size.width - LEFT - RIGHT)) * (length - 1)))),
    key: (name, now) => moved(name, now ?? latest, length),
  });
  const readout = `step ${what.first + at}: ${what.series.map((series) => `${series.name} ${written(series.values[at], what.unit)}`).join(", ")}`;
  return h("figure", { class: "chart" },
    h("figcaption", null, h("h3", null, what.title), legend(what, at)),
    h("div", {
      id: what.id, class: "plot", "data-chart": what.id, tabindex: "0", role: "slider", "aria-label": `${what.title}, by step`, "aria-valuemin": what.first,
      "aria-valuemax": what.first + length - 1, "aria-valuenow": what.first + at, "aria-valuetext": readout, "aria-describedby": `${what.id}-summary`,
    }, drawing(what, scale, size, cursor === undefined ? null : at)),
    h("p", { id: `${what.id}-summary`, class: "quiet small" }, what.summary, scale.above > 0 && ` ${aboveWords(scale, what.unit)}`, what.marks?.length > 0 && " Nodes were lost at the upright dashed line."));
}

function scales(what, length, size) {
  const { end, above, highest } = top(what.series.flatMap((series) => series.values));
  const { low } = what;
  const rows = ticks(low * what.unit.scale, Math.max(end, low + 1e-9) * what.unit.scale * 1.04, 5);
  const high = Math.max(end * what.unit.scale * 1.04, ...rows.values) / what.unit.scale;
  const columns = ticks(what.first, what.first + length - 1, Math.max(2, Math.floor((size.width - LEFT - RIGHT) / 55)), true);
  const x = (index) => LEFT + (length < 2 ? 0.5 : index / (length - 1)) * (size.width - LEFT - RIGHT);
  const y = (value) => size.height - BOTTOM - ((Math.min(value, high) - low) / (high - low || 1)) * (size.height - TOP - BOTTOM);
  return { x, y, rows, columns, above, highest };
}

function drawing(what, scale, size, at) {
  const floor = size.height - BOTTOM;
  const { x, y } = scale;
  return h("svg", { width: size.width, height: size.height, "aria-hidden": "true" },
    scale.rows.values.map((value) => [
      h("line", { class: "grid", x1: LEFT, x2: size.width - RIGHT, y1: round(y(value / what.unit.scale)), y2: round(y(value / what.unit.scale)) }),
      h("text", { x: LEFT - 8, y: round(y(value / what.unit.scale)) + 4, class: "end" }, scale.rows.write(value)),
    ]),
    h("text", { x: LEFT - 8, y: 12, class: "end" }, what.unit.name),
    scale.columns.values.map((step) => h("text", { x: round(x(step - what.first)), y: floor + 16, class: "middle" }, String(step))),
    h("text", { x: size.width - RIGHT, y: size.height - 5, class: "end" }, "step"),
    h("line", { class: "axis", x1: LEFT, x2: size.width - RIGHT, y1: floor, y2: floor }),
    what.marks?.map(({ step }) => h("line", { class: "mark", x1: round(x(step - what.first)), x2: round(x(step - what.first)), y1: TOP, y2: floor })),
    what.series.map((series) => [
      series.area && h("path", { class: `area ${series.kind}`, d: area(series.values, x, y, floor) }),
      h("path", { class: `line ${series.kind}`, d: line(series.values, x, y) }),
    ]),
    at !== null && h("line", { class: "cursor", x1: round(x(at)), x2: round(x(at)), y1: TOP, y2: floor }),
    at !== null && what.series.map((series) => series.values[at] !== null && h("circle", { class: `dot ${series.kind}`, cx: round(x(at)), cy: round(y(series.values[at])), r: 3.5 })));
}

function legend(what, at) {
  return h("ul", { class: "legend", "aria-hidden": "true" }, h("li", null, h("span", { class: "name" }, "step"), h("b", null, String(what.first + at))),
    what.series.map((series) => h("li", null,
      h("svg", { width: 18, height: 10 }, h("path", { class: `line ${series.kind}`, d: "M1 5h16" })),
      h("span", { class: "name" }, series.name), h("b", null, written(series.values[at], what.unit)))));
}

function written(value, unit) {
  return value === null || value === undefined ? NOT_MEASURED : `${figure(value * unit.scale)}${unit.name && unit.name !== "×" ? ` ${unit.name}` : ""}`;
}

function aboveWords(scale, unit) {
  return `${scale.above === 1 ? "One value is" : `${count(scale.above)} values are`} above the chart, the highest ${written(scale.highest, unit)}.`;
}

/** Lines break where nothing was measured; what stands alone is a dot. */
function line(values, x, y) {
  let path = "";
  values.forEach((value, at) => {
    if (value === null) return;
    const starts = at === 0 || values[at - 1] === null;
    path += `${starts ? "M" : "L"}${round(x(at))} ${round(y(value))}`;
    if (starts && (at + 1 >= values.length || values[at + 1] === null)) path += "h.01";
  });
  return path;
}

function area(values, x, y, floor) {
  let path = "", open = -1;
  values.forEach((value, at) => {
    if (value !== null) {
      path += open < 0 ? `M${round(x(at))} ${floor}L${round(x(at))} ${round(y(value))}` : `L${round(x(at))} ${round(y(value))}`;
      open = at;
    }
    if (open >= 0 && (value === null || at === values.length - 1)) {
      path += `L${round(x(open))} ${floor}Z`;
      open = -1;
    }
  });
  return path;
}

/** The next index for a key; undefined for other keys. */
export function moved(name, now, length) {
  const to = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, PageDown: now - 10, PageUp: now + 10, Home: 0, End: length - 1 }[name];
  return to === undefined ? undefined : Math.max(0, Math.min(length - 1, to));
}

/** The latest index that the first series knows; if it knows none, that of any. */
function latestKnown(series) {
  const last = ({ values }) => values.findLastIndex((value) => value !== null);
  const first = last(series[0]);
  return Math.max(0, first >= 0 ? first : Math.max(...series.map(last)));
}

export function round(number) {
  return Math.round(number * 10) / 10;
}
