// Asks the service. What has not changed since is told by its ETag and not sent again.

const PATIENCE_MS = 8000;
const TOKEN = "headrace-token";
const MAX_KEPT = 8; // answers; a page needs three

const kept = new Map();

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

/** The answer to a path: {status, body, changed}; status 0 if there was none. Errors of the service have a body {error}. */
export async function ask(path) {
  const before = kept.get(path);
  const headers = {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  if (before) headers["If-None-Match"] = before.etag;
  let answer, body;
  try {
    answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 304 && before) return { status: 200, body: before.body, changed: false };
    body = await answer.json();
  } catch {
    if (!answer) return { status: 0, body: null, changed: true };
    body = { error: `The service answered ${answer.status} without a reason.` };
  }
  const etag = answer.headers.get("ETag");
  kept.delete(path);
  if (answer.status === 200 && etag) kept.set(path, { etag, body });
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
  return { status: answer.status, body, changed: true };
}
