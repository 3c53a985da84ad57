// Addresses within the page: #/, #/preprocessors, #/job/NAME/TAB?key=value. A link to any of them can be kept and sent.

export const TABS = ["steps", "timeline", "mixture", "ranks", "quarantine"];

/** What an address names; an unknown one is the list of jobs. */
export function parsed(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [page, name, tab] = path.split("/").map(text);
  const options = Object.fromEntries(new URLSearchParams(query));
  if (page === "job" && name) return { page: "job", job: name, tab: TABS.includes(tab) ? tab : TABS[0], options };
  return { page: page === "preprocessors" ? page : "jobs", options: {} };
}

export function jobAddress(name, tab, options) {
  const query = options ? `?${new URLSearchParams(options)}` : "";
  return `#/job/${encodeURIComponent(name)}${tab ? `/${tab}` : ""}${query}`;
}

/** What the service is asked for, for a page: paths of its API. The first is always the service itself. */
export function questions(route) {
  if (route.page === "preprocessors") return { service: "service" };
  if (route.page === "jobs") return { service: "service", jobs: "jobs" };
  const job = `jobs/${encodeURIComponent(route.job)}`;
  const more = {
    steps: { steps: `${job}/steps?last=${wholeNumber(route.options.last, 1, 1000, 200)}` },
    timeline: { timeline: `${job}/timeline` },
    quarantine: { quarantine: `${job}/quarantine?first=${wholeNumber(route.options.first, 0, 1e12, 0)}&count=100` },
  };
  return { service: "service", job, ...more[route.tab] };
}

export function wholeNumber(value, least, most, otherwise) {
  const number = Number(value);
  return value !== undefined && Number.isInteger(number) && number >= least && number <= most ? number : otherwise;
}

function text(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
