// Tabs of a job that are tables: its mixture, its ranks and nodes, its quarantine.

import { h } from "./dom.js";
import { count, NOT_MEASURED, plural, seconds, share, time } from "./format.js";
import { bar, choices, hint, prose, section, table } from "./pieces.js";
import { jobAddress, wholeNumber } from "./route.js";

const MOST_RANKS = 128; // of the table: those that wait longest
const PAGE = 100;
const SIGNS = { // by modality: what a screen reader says, and the outline
  image: ["an image, of which nothing can be seen", "M6 7h12v10H6zM6 15l3.5-3.5 3 3 2-2 3.5 3.5M15 9.5h.01"],
  audio: ["a recording", "M7 11v2M9.5 9v6M12 7v10M14.5 9.5v5M17 11v2"],
  text: ["a text", "M7 8h10M7 11h10M7 14h10M7 17h6"],
};
const WAITS = 0.05; // share of a step; more is marked

export function mixtureTab(state) {
  const { mixture } = state.answers.job;
  if (!mixture.length) return hint("Nothing is known of the mixture yet.");
  const off = mixture.filter(({ delivered }) => delivered !== null).map(({ asked, delivered }) => Math.abs(delivered - asked));
  const said = off.length ? `Of the committed samples; ${deviation(Math.max(...off))}.` : "Nothing is committed yet.";
  return section("Mixture, asked for and delivered", h("p", { class: "quiet" }, said), h("ul", { class: "mixture" }, mixture.map(source)));
}

function source({ source: name, asked, delivered }) {
  return h("li", null, h("h3", null, name),
    h("p", { class: "numbers" }, h("span", null, `asked ${share(asked)}`), bar(asked, "plain")),
    h("p", { class: "numbers" }, h("span", { class: delivered === null ? "missing" : null }, `delivered ${share(delivered)}`), bar(delivered)));
}

function deviation(most) {
  const points = (most * 100).toFixed(1);
  return points === "0.0" ? "every source has the share that was asked for" : `no source is off by more than ${points} points`;
}

export function ranksTab(state) {
  const { job } = state.answers;
  return [
    section("Ranks", job.ranks.length ? ranksTable(job) : hint("No trainer is connected.")),
    job.nodes.length > 0 && section("Nodes", h("ul", { class: "nodes" }, job.nodes.map(node))),
    (job.nodes.length > 0 || job.recoveries.length > 0) && section("Recoveries", job.recoveries.length
      ? h("ol", { class: "recoveries" }, job.recoveries.map((one) => h("li", null, h("b", null, `step ${count(one.step)}`), h("span", { class: "quiet" }, when(one)), h("span", null, prose(one.sentence)))))
      : hint("Nothing was lost so far.")),
  ];
}

function when(one) {
  return [one.when && time(one.when), one.took_s && `after ${seconds(one.took_s)}`].filter(Boolean).join(", ");
}

function ranksTable(job) {
  const waits = (rank) => (rank.step_s ? rank.data_wait_s / rank.step_s : null);
  const many = job.ranks.length > MOST_RANKS;
  const shown = many ? [...job.ranks].sort((a, b) => (waits(b) ?? 0) - (waits(a) ?? 0)).slice(0, MOST_RANKS) : job.ranks;
  const has = (field) => job.ranks.some((rank) => rank[field] !== null && rank[field] !== undefined);
  const columns = [["rank", "number"], has("unit") && ["unit", ""], has("host") && ["host", ""], ["committed", "number"], ["a step", "number"], ["waits", "number"], ["of a step", ""]].filter(Boolean);
  const rows = shown.map((rank) => [
    rank.connected === false ? `${rank.rank}, gone` : String(rank.rank), has("unit") && (rank.unit ?? ""), has("host") && (rank.host ?? ""), count(rank.committed_steps), seconds(rank.step_s || null),
    seconds(rank.step_s ? rank.data_wait_s : null), waits(rank) === null ? NOT_MEASURED : [bar(waits(rank), waits(rank) >= WAITS ? "warn" : ""), ` ${share(waits(rank))}`],
  ].filter((cell) => cell !== false));
  return [many && hint(`${plural(job.ranks.length, "rank")}; the ${MOST_RANKS} that wait longest are shown.`), table("Ranks and how long they wait for data", columns, rows)];
}

function node({ node: name, state, host }) {
  return h("li", null, h("b", null, name), h("span", null, state), h("span", { class: "quiet small" }, host ?? ""));
}

export function quarantineTab(state) {
  const { quarantine, job } = state.answers;
  const { total, rejections } = quarantine;
  if (!total) return hint("No sample is in quarantine.");
  const first = wholeNumber(state.route.options.first, 0, 1e12, 0);
  const seen = rejections.some((one) => isPicture(one.thumbnail) || one.modality);
  const times = rejections.some((one) => one.when !== null && one.when !== undefined);
  const columns = [["sample", ""], seen && ["seen", ""], ["reason", ""], ["in detail", "words"], ["shard", ""], ["row", "number"], times && ["when", ""]].filter(Boolean);
  const rows = rejections.map((one) => [
    one.sample, seen && picture(one), one.reason.replaceAll("_", " "), one.detail, one.shard ?? "", one.row === null || one.row === undefined ? "" : count(one.row),
    times && (one.when ? time(one.when) : ""),
  ].filter((cell) => cell !== false));
  return section("Quarantine", h("p", { class: "quiet" }, `${plural(total, "sample")} not used. ${reasons(rejections, total)}`),
    table("Samples in quarantine and why", columns, rows), total > PAGE && pager(job, first, total));
}

function reasons(rejections, total) {
  const numbers = new Map();
  for (const { reason } of rejections) numbers.set(reason, (numbers.get(reason) ?? 0) + 1);
  const words = [...numbers].sort((a, b) => b[1] - a[1]).map(([reason, number]) => `${count(number)} ${reason.replaceAll("_", " ")}`).join(", ");
  return rejections.length < total ? `Of these ${count(rejections.length)}: ${words}.` : `${words}.`;
}

function isPicture(address) {
  return typeof address === "string" && address.startsWith("data:image/jpeg;base64,");
}

/** What can be seen of a refused sample, or else a sign of what was at fault: an image, a recording or a text. */
function picture(one) {
  if (isPicture(one.thumbnail)) return h("img", { src: one.thumbnail, alt: `what can be seen of ${one.sample}`, width: 56, height: 56 });
  return one.modality in SIGNS ? modalitySign(...SIGNS[one.modality]) : "";
}

function modalitySign(name, outline) {
  return h("svg", { class: "sign", viewBox: "0 0 24 24", width: 56, height: 56, role: "img", "aria-label": name },
    h("path", { d: outline, fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linejoin": "round", "stroke-linecap": "round" }));
}

function pager(job, first, total) {
  const at = (from) => jobAddress(job.job, "quarantine", { first: from });
  const links = [];
  if (first > 0) links.push(["earlier ones", at(Math.max(0, first - PAGE)), false]);
  if (first + PAGE < total) links.push(["later ones", at(first + PAGE), false]);
  return choices(`${count(first + 1)} to ${count(Math.min(total, first + PAGE))} of ${count(total)}`, links);
}
