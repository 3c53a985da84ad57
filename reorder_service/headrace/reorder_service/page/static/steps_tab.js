// The steps of a job: forecast and measured time, waits for data, and how even the batches are before and after planning.

import { h } from "./dom.js";
import { count, figure, NOT_MEASURED, plural, seconds, share, unitOf } from "./format.js";
import { lineChart } from "./chart.js";
import { choices, figures, hint, section, table } from "./pieces.js";
import { jobAddress } from "./route.js";

const LENGTHS = [50, 200, 1000];
const ROWS = 200; // of the table: as many as a reader would go through

export function stepsTab(state) {
  const { steps, job } = state.answers;
  const length = steps.samples.length;
  if (!length) return hint("No step is planned yet. What holds it up is said above.");
  const chosen = Number(state.route.options.last ?? 200);
  const chart = (what) => lineChart({ first: steps.first_step, marks: marksOf(job, steps.first_step, length), ...what }, state.cursors[what.id], state.width);
  return [
    choices("latest steps", LENGTHS.map((last) => [count(last), jobAddress(job.job, "steps", { last }), last === chosen])),
    section("Time of a step", chart(timeChart(steps))),
    section("Balance", h("p", { class: "quiet" }, "Cost of the slowest rank or microbatch over the mean of all: 1 is even, 2 means that the others wait half of the time."), balanceChart(steps, chart)),
    figures("steps-table", state.opened, "The same in figures", () => stepsTable(steps)),
  ];
}

function marksOf(job, first, length) {
  return job.recoveries.filter(({ step }) => step >= first && step < first + length);
}

function timeChart(steps) {
  const { forecast_s: forecast, measured_s: measured, data_wait_s: waits } = steps;
  const longest = Math.max(0, ...[...forecast, ...measured].filter((value) => value !== null));
  return {
    id: "steps-time", title: "Measured and forecast", unit: unitOf(longest), low: 0, summary: timeSummary(steps),
    series: [
      { name: "measured", kind: "measured", values: measured },
      { name: "forecast", kind: "forecast", values: forecast },
      { name: "waits for data", kind: "waits", values: waits, area: true },
    ],
  };
}

function timeSummary(steps) {
  const measured = mean(steps.measured_s);
  if (measured === null) return "None of these steps has been measured yet.";
  const known = steps.measured_s.filter((value) => value !== null).length;
  const both = steps.measured_s.map((value, at) => [value, steps.forecast_s[at]]).filter(([one, other]) => one !== null && other !== null);
  const off = both.length ? mean(both.map(([one, other]) => Math.abs(other / one - 1))) : null;
  const waits = mean(steps.data_wait_s);
  return `Mean of ${plural(known, "measured step")}: ${seconds(measured)}`
    + `${off === null ? "" : `; forecasts are off by ${share(off)} on average`}`
    + `${waits === null ? "" : `; ${share(waits / measured)} is waiting for data`}.`;
}

function balanceChart(steps, chart) {
  const { balance_before: before, balance_after: after } = steps;
  const known = [...before, ...after].filter((value) => value !== null);
  if (!known.length) return hint("Not measured for these steps.");
  const [was, is] = [mean(before), mean(after)];
  return chart({
    id: "steps-balance", title: "Slowest over mean", unit: { scale: 1, name: "×" }, low: Math.min(1, ...known),
    summary: was === null || is === null ? "" : `On average ${figure(was)} in arrival order, ${figure(is)} as planned.`,
    series: [
      { name: "as planned", kind: "measured", values: after },
      { name: "in arrival order", kind: "before", values: before },
    ],
  });
}

function stepsTable(steps) {
  const length = steps.samples.length;
  const rows = [];
  for (let at = length - 1; at >= Math.max(0, length - ROWS); at -= 1) {
    const plain = (value) => (value === null ? NOT_MEASURED : figure(value));
    rows.push([
      String(steps.first_step + at), count(steps.samples[at]), seconds(steps.measured_s[at]), seconds(steps.forecast_s[at]), seconds(steps.data_wait_s[at]),
      plain(steps.balance_before[at]), plain(steps.balance_after[at]),
    ]);
  }
  const columns = [["step", "number"], ["samples", "number"], ["measured", "number"], ["forecast", "number"], ["waits for data", "number"], ["balance in arrival order", "number"], ["as planned", "number"]];
  return table("Steps, the latest first", columns, rows);
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
