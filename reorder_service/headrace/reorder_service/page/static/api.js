// Asks the service what it is to show. One answer goes on as long as the page is looked at: a line for each change, as soon as it is known.

const PATIENCE_MS = 8000; // the service says something every 3 s, an empty line where nothing has changed
const TOKEN = "headrace-token";

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

/**
 * Watch paths of the API: `heard` is called with {path: {status, body}} of all of them, then with those that have changed, which may be
 * none. Returns {status, error} when it has ended: status 200 if the service has ended it, which it does now and then, 0 if it broke off,
 * was silent for too long or was left by `leaving.abort()`; else the service has refused, and said why.
 */
export async function watch(paths, heard, leaving) {
  let silence;
  const wait = () => {
    clearTimeout(silence);
    silence = setTimeout(() => leaving.abort(), PATIENCE_MS);
  };
  wait();
  try {
    const query = paths.map((path) => `ask=${encodeURIComponent(path)}`).join("&");
    const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
    const answer = await fetch(`api/watch?${query}`, { headers, cache: "no-store", signal: leaving.signal });
    if (answer.status !== 200) return { status: answer.status, error: await reason(answer) };
    for await (const line of lines(answer.body)) {
      wait();
      heard(line ? JSON.parse(line) : {});
    }
    return { status: 200 };
  } catch {
    return { status: 0 };
  } finally {
    clearTimeout(silence);
  }
}

async function reason(answer) {
  const { error } = await answer.json().catch(() => ({}));
  return error ?? `The service answered ${answer.status} without a reason.`;
}

/** The lines of a body, each as soon as all of it is there. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const [first, ...others] = value.split("\n");
    pieces.push(first);
    for (const next of others) {
      yield pieces.join("");
      pieces = [next];
    }
  }
}
