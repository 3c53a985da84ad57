// A step as a timeline: as planned, and as it was run where that was measured.

import { h } from "./dom.js";
import { count, seconds, share, unitOf } from "./format.js";
import { colours, endOf, gantt, key, occupancy, rowFigures } from "./gantt.js";
import { figures, hint, section, table } from "./pieces.js";

/** What puts the rows beside each other. */
const ALIGNED = {
  clock: "Rows are aligned by the clocks of their hosts, and as exactly as these agree.",
  first_action: "The clocks of the hosts differ by more than the step took, so each row begins with its own first action: compare times within a row only.",
};

export function timelineTab(state) {
  const { timeline } = state.answers;
  if (!timeline) return hint("The plans of this job have no timeline: its ranks run no pipeline, or nothing is planned yet.");
  const planned = occupancy(timeline.rows);
  const run = timeline.measured_rows ? occupancy(timeline.measured_rows) : null;
  const palette = colours(timeline.rows);
  const all = [...timeline.rows, ...(timeline.measured_rows ?? [])];
  const end_s = endOf(all);
  const longest = Math.max(...all.map((row) => row.name.length)); // so that both begin at one place
  const drawn = (id, title, rows) => gantt({ id, title, rows, longest, end_s, unit: unitOf(end_s), palette }, state.cursors[id], state.width);
  return [
    section(`Step ${count(timeline.step)} as planned`,
      h("p", { class: "quiet" }, `${seconds(timeline.forecast_s ?? planned.end_s)} by ${timeline.forecast_s === null ? "estimate" : "forecast"}, ${rowsWord(timeline)} idle ${share(planned.idle)} of the time. The number in a box is its microbatch.${timeline.measured_costs === false ? " Times are estimates from the model's operations: none is measured yet." : ""}`),
      key(all, palette), drawn("timeline-planned", "As planned", timeline.rows)),
    section(`Step ${count(timeline.step)} as run`, run
      ? [h("p", { class: "quiet" }, `${seconds(timeline.measured_s ?? run.end_s)} measured${against(timeline)}. From the first action to the last it took ${seconds(run.end_s)}, of which rows computed nothing for ${share(run.idle)}: they waited for data or messages, or for each other. ${ALIGNED[timeline.aligned_by]}`), drawn("timeline-run", "As run", timeline.measured_rows)]
      : hint(timeline.measured_s === null ? "Not measured." : `${seconds(timeline.measured_s)} measured${against(timeline)}; when each action ran was not measured.`)),
    figures("timeline-table", state.opened, "The same in figures", () => [
      rowsTable("Rows as planned", timeline.rows), timeline.measured_rows && rowsTable("Rows as run", timeline.measured_rows)]),
  ];
}

/** Of many replicas, the slowest are shown. */
function rowsWord({ rows, replicas }) {
  const named = new Set(rows.map((row) => /^(replica|pipeline|rank) \d+/.exec(row.name)?.[0] ?? "")).size;
  const some = replicas > named ? ` (the slowest ${named > 1 ? `${count(named)} ` : ""}of ${count(replicas)} replicas)` : "";
  return rows.length === 1 ? `one row${some} is` : `${count(rows.length)} rows${some} are`;
}

function against(timeline) {
  if (!timeline.forecast_s || timeline.measured_s === null) return "";
  const off = timeline.measured_s / timeline.forecast_s - 1;
  return `, ${share(Math.abs(off))} ${off < 0 ? "less" : "more"} than forecast`;
}

function rowsTable(caption, rows) {
  return table(caption, [["row", ""], ["actions", "number"], ["busy", "number"], ["idle", "number"]], rowFigures(rows, seconds));
}
