// Calls the server that this page came from, with the API key if there is one.

const KEY = "chairlift-key";

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function keep(key) {
  sessionStorage.setItem(KEY, key);
}

// Returns a successful response; throws a ServerError with the server's message otherwise.
export async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  try {
    const { error } = await response.json();
    return new ServerError(response.status, error.message);
  } catch {
    return new ServerError(response.status, `The server answered with status ${response.status}.`);
  }
}

// Yields the objects of an event stream. EventSource cannot send a key, so this parses the stream.
// A stream that is silent for `silenceMs` counts as broken: a lost network ends no connection.
export async function* events(response, silenceMs = Infinity) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await within(silenceMs, reader.read());
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue; // a comment that keeps the connection alive
        const data = part.slice(6);
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The connection broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function within(ms, promise) {
  if (ms === Infinity) return promise;
  let timer;
  const late = new Promise((_, reject) => (timer = setTimeout(reject, ms, new Error("late"))));
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}
