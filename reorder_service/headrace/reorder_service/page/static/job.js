// The page of one job: what it is doing, what holds it up, and tabs for the rest.

import { h } from "./dom.js";
import { count, figure, plural, rate, seconds, share, time } from "./format.js";
import { badge, finding, hint, progress, prose, tile } from "./pieces.js";
import { jobAddress, TABS } from "./route.js";
import { stepsTab } from "./steps_tab.js";
import { timelineTab } from "./timeline_tab.js";
import { mixtureTab, quarantineTab, ranksTab } from "./job_tabs.js";

const NAMES = { steps: "Steps", timeline: "Timeline", mixture: "Mixture", ranks: "Ranks", quarantine: "Quarantine" };
const OVER = new Set(["done", "failed", "cancelled"]);
const VIEWS = { steps: stepsTab, timeline: timelineTab, mixture: mixtureTab, ranks: ranksTab, quarantine: quarantineTab };

export function jobView(state) {
  const { job } = state.answers;
  const { tab } = state.route;
  return [
    h("nav", { class: "crumbs", "aria-label": "Way back" }, h("a", { href: "#/" }, "Jobs")),
    h("div", { class: "title" }, h("h1", null, job.job), badge(job.state), h("p", { class: "quiet" }, dates(job))),
    finding(job),
    job.state === "failed" && job.message && !job.finding.includes(job.message) && h("p", null, prose(job.message)),
    job.warning && h("p", { class: "finding warn" }, prose(job.warning)),
    progress(job),
    tiles(job),
    h("div", { class: "tabs", role: "tablist", "aria-label": `Parts of ${job.job}` }, TABS.map((name) => tabLink(job, name, tab))),
    h("div", { id: "panel", class: "panel", role: "tabpanel", "aria-labelledby": `tab-${tab}` }, refusalOf(state, tab) ?? VIEWS[tab](state)),
  ];
}

function tabLink(job, name, chosen) {
  const number = name === "quarantine" && job.quarantined ? h("span", { class: "number" }, count(job.quarantined)) : null;
  return h("a", {
    id: `tab-${name}`, role: "tab", href: jobAddress(job.job, name), "aria-selected": String(name === chosen), "aria-controls": name === chosen ? "panel" : null,
    tabindex: name === chosen ? "0" : "-1",
  }, NAMES[name], number);
}

/** Why there is nothing to show in a tab yet; null where there is. */
function refusalOf(state, tab) {
  if (tab === "mixture" || tab === "ranks") return null;
  if (state.refused[tab]) return hint(prose(state.refused[tab]));
  return tab in state.answers ? null : hint("Asking the service.");
}

function dates(job) {
  const parts = job.started ? [`started ${time(job.started)}`] : [];
  if (job.ended) parts.push(`ended ${time(job.ended)}`);
  if (job.generation > 1) parts.push(`generation ${count(job.generation)}`);
  return parts.join(", ");
}

function tiles(job) {
  const measured = job.ranks.filter((rank) => rank.step_s);
  const slowest = measured.length ? Math.max(...measured.map((rank) => rank.step_s)) : null;
  const waits = measured.length ? measured.reduce((sum, rank) => sum + rank.data_wait_s / rank.step_s, 0) / measured.length : null;
  return h("dl", { class: "tiles" },
    !OVER.has(job.state) && tile("Rate", rate(job.samples_per_s), left(job)),
    tile("A step", seconds(slowest), plural(job.ranks.length, "rank")),
    tile("Waits for data", share(waits), "of a step, on average"),
    !OVER.has(job.state) && tile("Planned ahead", plural(job.planned_steps, "step"), `strategy ${job.strategy}`),
    tile("Samples", count(job.samples), `${count(job.batch_size)} a step`),
    OVER.has(job.state) && tile("Strategy", job.strategy),
    tile("Loss", figure(job.loss), "of the latest step"));
}

/** How long the steps that are left take at the present rate. */
function left(job) {
  if (job.state !== "running" || !job.samples_per_s || job.num_steps === null || job.num_steps === undefined) return null;
  return `about ${seconds(((job.num_steps - job.committed_steps) * job.batch_size) / job.samples_per_s)} left`;
}
