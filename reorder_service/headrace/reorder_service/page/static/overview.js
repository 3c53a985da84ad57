// The pages of the whole service: its jobs, its preprocessors, and what to do where there is none of them.

import { h } from "./dom.js";
import { bytes, count, NOT_MEASURED, plural, rate } from "./format.js";
import { badge, bar, command, finding, hint, progress, prose, section } from "./pieces.js";
import { jobAddress } from "./route.js";

const MAX_SHOWN = 200; // jobs on one page; the filter finds the others
const FILTER_FROM = 8;
const FIRST = ["running", "indexing", "paused", "failed", "done", "cancelled"];

export function jobsView(state) {
  const { jobs, left_out: left } = state.answers.jobs;
  if (!jobs.length) return noJobs(state.answers.service);
  const wanted = state.filter.trim().toLowerCase();
  const found = jobs.filter((job) => job.job.toLowerCase().includes(wanted) || job.state === wanted);
  const ordered = found.map((job, at) => ({ job, at, rank: FIRST.indexOf(job.state) })).sort((a, b) => a.rank - b.rank || a.at - b.at);
  return [
    h("div", { class: "title" }, h("h1", null, "Jobs"), h("p", { class: "quiet" }, byState(jobs))),
    jobs.length >= FILTER_FROM && h("p", { class: "filter" }, h("label", { for: "filter" }, "Show those whose name or state is"), h("input", { id: "filter", type: "search", autocomplete: "off", spellcheck: "false" })),
    h("ul", { class: "jobs" }, ordered.slice(0, MAX_SHOWN).map(({ job }) => jobCard(job))),
    found.length > MAX_SHOWN && hint(`${count(found.length - MAX_SHOWN)} more are not shown.`),
    left > 0 && hint(prose(`${plural(left, "older job")} more: \`headrace job list\` has them.`)),
    found.length === 0 && hint("No job is called so."),
    preprocessorsLine(state.answers.service),
  ];
}

function byState(jobs) {
  const states = FIRST.map((state) => [state, jobs.filter((job) => job.state === state).length]).filter(([, number]) => number);
  return states.map(([state, number]) => `${count(number)} ${state}`).join(", ");
}

function jobCard(job) {
  return h("li", { class: "card job", id: `card-${encodeURIComponent(job.job)}` },
    h("div", { class: "jobname" }, h("h2", null, h("a", { id: `open-${encodeURIComponent(job.job)}`, href: jobAddress(job.job) }, job.job)), badge(job.state)),
    progress(job),
    h("p", { class: "numbers" }, h("span", null, job.samples_per_s === null ? (job.state === "running" ? "rate not measured" : "") : rate(job.samples_per_s)), h("span", null, plural(job.ranks, "rank"))),
    finding(job, "small"));
}

function noJobs(service) {
  const endpoint = service?.endpoint ?? "HOST:PORT";
  return [
    h("h1", null, "No job yet"),
    section("Submit one",
      h("p", null, "A job says which data is trained on, in which batches, and how they are planned. Write it into a file and submit it:"),
      command(`headrace job submit job.yaml --endpoint ${endpoint}`),
      h("p", null, "It is shown here as soon as the service has it. Its steps begin when preprocessors and a trainer are there:"),
      command(`headrace preprocessor --endpoint ${endpoint}\nheadrace train --endpoint ${endpoint} --job NAME`),
      hint(prose("`headrace demo` writes such a file and runs all of it on bundled data."))),
    preprocessorsLine(service),
  ];
}

function preprocessorsLine(service) {
  const members = service?.preprocessors ?? [];
  if (!members.length) return null;
  return h("p", { class: "quiet" }, h("a", { href: "#/preprocessors" }, plural(members.length, "preprocessor")), `, ${totalRate(members)}.`);
}

function totalRate(members) {
  const rates = members.map((member) => member.samples_per_s).filter((value) => value !== null && value !== undefined);
  return rates.length ? rate(rates.reduce((sum, value) => sum + value, 0)) : `rate ${NOT_MEASURED}`;
}

export function preprocessorsView(state) {
  const { service } = state.answers;
  const members = service.preprocessors;
  if (!members.length) {
    return [
      h("h1", null, "No preprocessor is connected"),
      section("Start one", h("p", null, "On any host that reaches the data; it needs no GPU, and may come and go at any time:"),
        command(`headrace preprocessor --endpoint ${service.endpoint}`)),
    ];
  }
  return [
    h("div", { class: "title" }, h("h1", null, "Preprocessors"), h("p", { class: "quiet" }, `${plural(members.length, "preprocessor")}, ${totalRate(members)}`)),
    hint("Parts pass from left to right. Where they wait is in front of the slowest stage."),
    h("ul", { class: "members" }, members.map(member)),
  ];
}

function member(one) {
  const full = one.store_budget_bytes ? one.store_bytes / one.store_budget_bytes : null;
  const busy = one.threads ? one.decoding / one.threads : null;
  return h("li", { class: "card member", id: `member-${encodeURIComponent(one.id)}` },
    h("div", { class: "jobname" }, h("h2", null, one.id), one.silent ? h("span", { class: "badge paused" }, "silent") : one.late > 0 && h("span", { class: "badge paused" }, `late with ${plural(Number(one.late), "lease")}`)),
    h("p", { class: "numbers" }, h("span", null, one.host), h("span", null, one.samples_per_s === null || one.samples_per_s === undefined ? `rate ${NOT_MEASURED}` : rate(one.samples_per_s))),
    h("ol", { class: "stages" },
      stage("waiting", count(one.waiting), one.waiting === 1 ? "part" : "parts"),
      stage("read", count(one.read), "in memory"),
      stage("decoding", `${count(one.decoding)} of ${count(one.threads)}`, "threads", bar(busy)),
      stage("stored", bytes(one.store_bytes), `of ${bytes(one.store_budget_bytes)}`, bar(full, full > 0.75 ? "warn" : ""))));
}

function stage(name, value, note, drawn) {
  return h("li", null, h("span", { class: "quiet small" }, name), h("b", { class: value === NOT_MEASURED ? "missing" : null }, value), h("span", { class: "quiet small" }, note), drawn);
}
