// The page: watches what the service tells while it is looked at, and shows it. Nothing can be changed here.

import { token, watch } from "./api.js";
import { handlers } from "./chart.js";
import { fill, h } from "./dom.js";
import { time } from "./format.js";
import { jobView } from "./job.js";
import { jobsView, preprocessorsView } from "./overview.js";
import { hint, prose, section } from "./pieces.js";
import { parsed, questions } from "./route.js";

const AGAIN_MS = 1000; // between two questions, whatever came of the first
const BARRED_AGAIN_MS = 15000; // where it asked for another token, or was busy
const GONE = 404;
const BUSY = 429;
const [WITHOUT_TOKEN, WITHOUT_RIGHT] = [401, 403];

const place = Object.fromEntries(["pages", "link", "banner", "main", "foot", "said"].map((id) => [id, document.getElementById(id)]));
const state = {
  route: parsed(location.hash),
  answers: {}, // the latest good answer to each question of the route
  refused: {}, // the service's sentence where it did not answer one
  needsToken: "", // why, while the service asks for a token
  lostAt: null, // Unix time of the last answer, while there is none
  answeredAt: null,
  filter: "",
  opened: new Set(), // details by id
  cursors: {}, // of charts by id
  width: 600,
};
let asked = 0; // counts questions: what is heard of an older one is dropped
let leaving = new AbortController(); // ends the question that is open
let timer, drawing, pointedAt;
let said = {}; // states of what was announced last

/** Ask for what the route shows, and go on until another route, another token or a hidden tab ends it. */
async function refresh() {
  clearTimeout(timer);
  leaving.abort();
  asked += 1;
  if (document.hidden) return; // nobody looks: it asks when somebody does
  const question = asked;
  leaving = new AbortController();
  const wanted = questions(state.route);
  const began = performance.now();
  const { status, error } = await watch(Object.values(wanted), (parts) => question === asked && hear(wanted, parts), leaving);
  if (question !== asked) return;
  if (status === 0) state.lostAt ??= state.answeredAt ?? Date.now() / 1000;
  else if (status !== 200) hear(wanted, Object.fromEntries(Object.values(wanted).map((path) => [path, { status, body: { error } }])));
  const barred = status === WITHOUT_TOKEN || (status === WITHOUT_RIGHT && token.get());
  state.needsToken = barred ? error : "";
  draw();
  timer = setTimeout(refresh, Math.max(0, began + (barred || status === BUSY ? BARRED_AGAIN_MS : AGAIN_MS) - performance.now()));
}

function hear(wanted, parts) {
  const news = Object.entries(wanted).filter(([, path]) => path in parts);
  news.forEach(([name, path]) => take(name, parts[path]));
  state.answeredAt = Date.now() / 1000;
  if (!news.length && state.lostAt === null) return;
  state.lostAt = null;
  state.needsToken = "";
  draw();
}

function take(name, { status, body }) {
  delete state.refused[name];
  if (status === 200) {
    state.answers[name] = body;
  } else {
    state.refused[name] = body.error ?? `The service answered ${status}.`;
    if (status === GONE) delete state.answers[name];
  }
}

function draw() {
  cancelAnimationFrame(drawing);
  drawing = requestAnimationFrame(show);
}

function show() {
  state.width = Math.max(260, place.main.clientWidth - paddings());
  fill(place.banner, banner());
  fill(place.main, view());
  fill(place.foot, foot());
  for (const link of place.pages.querySelectorAll("a")) {
    const here = link.hash === "#/preprocessors" ? state.route.page === "preprocessors" : state.route.page !== "preprocessors";
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  place.link.className = `link ${state.lostAt !== null ? "lost" : state.answeredAt ? "live" : ""}`;
  fill(place.link, state.lostAt !== null ? "no answer" : state.answeredAt ? "live" : "connecting");
  document.title = state.route.page === "job" ? `${state.route.job} - Headrace` : "Headrace";
  announce();
}

/** The card around a chart and the margins of the page, which styles decide. */
function paddings() {
  const style = getComputedStyle(place.main);
  return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight) + 2 * parseFloat(style.getPropertyValue("--card-padding")) * parseFloat(getComputedStyle(document.documentElement).fontSize) + 2;
}

function view() {
  const { service, jobs, job } = state.answers;
  if (state.needsToken) return tokenForm();
  if (service && service.leading === false) return standby(service);
  if (state.route.page === "preprocessors") return service ? preprocessorsView(state) : waiting("service");
  if (state.route.page === "jobs") return jobs ? jobsView(state) : waiting("jobs");
  return job ? jobView(state) : waiting("job");
}

function waiting(name) {
  if (state.refused[name]) return [h("h1", null, state.route.job ?? "Headrace"), h("p", null, prose(state.refused[name])), h("p", null, h("a", { href: "#/" }, "All jobs"))];
  if (state.lostAt !== null) return [h("h1", null, "No answer"), hint("The reorder service has not answered since this page was opened. Is it running, and is it reached from here?")];
  return hint("Asking the reorder service.");
}

function tokenForm() {
  return [h("h1", null, "This service asks for a token"), h("div", { class: "card" },
    h("p", null, prose(state.needsToken)),
    h("form", { id: "token-form" },
      h("label", { for: "token" }, "A token that may watch"),
      h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true }),
      h("button", { id: "token-button", type: "submit" }, "Show the page")),
    hint("It is kept in this tab until the tab is closed, and sent to this service only."))];
}

function standby(service) {
  const there = pageOf(service.leader);
  return [
    h("h1", null, "This service stands by"),
    section("It leads no job at present",
      service.message && h("p", null, prose(service.message)),
      h("p", null, service.leader ? ["The one that leads listens at ", h("code", null, service.leader), "."] : "None leads at this moment. One will in a few seconds, perhaps this one."),
      there && h("p", null, "Started with the same port for its page, it shows the jobs at ", h("a", { id: "leader", href: there }, there), "."),
      hint("This page goes on by itself when this service leads.")),
  ];
}

/** Where the leader's page is if it has this page's port; empty if that is this very page. */
function pageOf(leader) {
  const host = (leader ?? "").replace(/:\d+$/, "");
  if (!/^[\w.:[\]-]+$/.test(host) || host === location.hostname) return "";
  return `${location.protocol}//${host}${location.port ? `:${location.port}` : ""}/${location.hash}`;
}

function banner() {
  if (state.lostAt === null || !state.answeredAt) return null;
  return h("p", { class: "banner" }, h("b", null, "Connection lost. "), `The service has not answered since ${time(state.lostAt)}. What is shown is as it was then; this page asks again by itself.`);
}

function foot() {
  const { service } = state.answers;
  return [
    h("p", null, service ? `Headrace ${service.version}, reorder service at ${service.endpoint}. This page changes nothing.` : "This page changes nothing."),
    token.get() && h("button", { id: "forget", type: "button", "data-forget": true }, "Forget the token"),
  ];
}

/** Tell those who listen what has changed its state, and nothing that moves all the time. */
function announce() {
  const { job } = state.answers;
  const now = { page: location.hash, connection: state.lostAt === null ? "back" : "lost", job: job?.job === state.route.job ? job?.state : undefined };
  const news = [];
  if (said.connection && said.connection !== now.connection) news.push(now.connection === "lost" ? "Connection lost." : "The service answers again.");
  if (said.page === now.page && said.job && now.job && said.job !== now.job) news.push(`${state.route.job} is ${now.job}.`);
  if (news.length) place.said.textContent = news.join(" ");
  said = now;
}

function go() {
  const before = state.route;
  state.route = parsed(location.hash);
  const same = before.page === state.route.page && before.job === state.route.job;
  state.answers = same ? withoutTab(before) : kept(state.answers);
  state.refused = {};
  if (!same) {
    handlers.clear();
    state.cursors = {};
    scrollTo(0, 0);
    place.main.focus({ preventScroll: true });
  }
  draw();
  refresh();
}

/** What is shown at once on another page, until it is asked for again. */
function kept({ service, jobs }) {
  return { ...(service && { service }), ...(jobs && { jobs }) };
}

/** Answers that are still those to the route's questions; other steps, or other pages of the quarantine, come with the next answer. */
function withoutTab(before) {
  const [old, present] = [questions(before), questions(state.route)];
  return Object.fromEntries(Object.entries(state.answers).filter(([name]) => present[name] === old[name] || present[name] === undefined));
}

function pointed(event) {
  const plot = event.target.closest?.("[data-chart]");
  if (pointedAt && pointedAt !== plot) setCursor(pointedAt.dataset.chart, undefined);
  pointedAt = plot;
  if (!plot) return;
  const box = plot.getBoundingClientRect();
  setCursor(plot.dataset.chart, handlers.get(plot.dataset.chart)?.at(event.clientX - box.left, event.clientY - box.top));
}

function setCursor(id, cursor) {
  if (JSON.stringify(state.cursors[id]) === JSON.stringify(cursor)) return;
  state.cursors[id] = cursor;
  draw();
}

function pressed(event) {
  const plot = event.target.closest?.("[data-chart]");
  const cursor = plot && handlers.get(plot.dataset.chart)?.key(event.key, state.cursors[plot.dataset.chart]);
  if (cursor !== undefined && cursor !== null) {
    event.preventDefault();
    setCursor(plot.dataset.chart, cursor);
    return;
  }
  const tab = event.target.closest?.("[role=tab]");
  if (!tab) return;
  const tabs = [...tab.parentNode.children];
  const to = { ArrowLeft: tabs.indexOf(tab) - 1, ArrowRight: tabs.indexOf(tab) + 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const next = tabs[(to + tabs.length) % tabs.length];
  next.focus();
  location.hash = next.hash;
}

addEventListener("hashchange", go);
addEventListener("resize", draw);
document.addEventListener("visibilitychange", refresh);
document.addEventListener("pointermove", pointed);
document.addEventListener("pointerdown", pointed);
document.addEventListener("keydown", pressed);
document.addEventListener("input", (event) => {
  if (event.target.id !== "filter") return;
  state.filter = event.target.value;
  draw();
});
document.addEventListener("toggle", (event) => {
  const { details } = event.target.dataset ?? {};
  if (!details) return;
  if (event.target.open) state.opened.add(details);
  else state.opened.delete(details);
  draw();
}, true);
document.addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(document.getElementById("token").value.trim());
  refresh();
});
document.addEventListener("click", (event) => {
  if (event.target.closest("[data-skip]")) {
    event.preventDefault(); // the address names what is shown
    place.main.focus();
  } else if (event.target.closest("[data-forget]")) {
    token.set("");
    state.answers = {};
    refresh();
  }
});

refresh();
