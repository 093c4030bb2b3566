// The numbers beside the charts, and the table of recent requests.

import { ago, bytes, count, pace, seconds, share } from "./format.js";
import { History } from "./history.js";

// How a request ended, if not simply by its status.
const ENDS = {
  stopped: "The client left before the end of the reply.",
  failed: "The server failed after it had begun the reply.",
};

const element = (id) => document.getElementById(id);

export function put(id, text) {
  const target = element(id);
  // Screen readers would read an unchanged text again if it were set again.
  if (target.textContent !== text) target.textContent = text;
}

export class Gauges {
  constructor() {
    this.history = new History();
  }

  show(snapshot) {
    this.history.add(snapshot);
    put("summary", summary(snapshot));
    showPace(snapshot);
    showLatency("ttft", snapshot.ttft);
    showLatency("itl", snapshot.itl);
    showChoices(snapshot, this.history.failed);
    showMemory(snapshot.kv);
    showPrefixes(snapshot.prefixes);
    showRequests(snapshot.requests);
  }
}

function summary({ model, running, waiting }) {
  if (!model) return "The chairs come with the model.";
  const queue = waiting ? `, ${count(waiting)} in the queue` : "";
  return `${count(running)} of ${count(model.max_rows)} chairs taken${queue}`;
}

function showPace({ generated_pace: generated, prefilled_pace: prefilled }) {
  put("pace", pace(generated));
  put("prefill", pace(prefilled));
}

function showChoices({ running, waiting }, failed) {
  put("choices", count(running));
  put(
    "choices-more",
    `${count(waiting)} waiting; ${count(failed)} ${failed === 1 ? "request" : "requests"} failed in 15 minutes`,
  );
}

function showLatency(id, latency) {
  put(id, latency ? seconds(latency.p50) : "–");
  put(
    `${id}-more`,
    latency
      ? `median; p95 ${seconds(latency.p95)}, p99 ${seconds(latency.p99)}`
      : "none in the last minute",
  );
}

function showMemory({ used, reserved, prefixes, limit }) {
  put("kv", share(used, limit));
  fill("kv-used", used, limit);
  fill("kv-reserved", reserved, limit);
  put(
    "kv-more",
    limit
      ? `${bytes(used)} used, ${bytes(reserved)} reserved of ${bytes(limit)}; ` +
          `prefixes ${bytes(prefixes)}`
      : "",
  );
}

function showPrefixes({ queried, hit }) {
  put("hits", share(hit, queried));
  fill("hits-bar", hit, queried);
  put(
    "hits-more",
    queried ? `${count(hit)} of ${count(queried)} in the last minute` : "none in the last minute",
  );
}

function fill(id, part, all) {
  element(id).style.width = `${all ? Math.min(100, (100 * part) / all) : 0}%`;
}

function showRequests(requests) {
  element("recent-none").hidden = requests.length > 0;
  element("recent").replaceChildren(...requests.map(row));
}

function row(request) {
  const known = (value, format) => (value === null ? "–" : format(value));
  const line = document.createElement("tr");
  const cell = (text, kind = "") => {
    const made = line.insertCell();
    made.textContent = text;
    made.className = kind;
  };
  cell(ago(request.ago));
  cell(known(request.id, (id) => `…${id.slice(-8)}`), "id");
  cell(request.route);
  const isNamed = request.outcome in ENDS && request.status < 500;
  cell(isNamed ? request.outcome : `${request.status}`, `outcome ${request.outcome}`);
  if (isNamed) line.lastChild.title = ENDS[request.outcome];
  cell(known(request.prompt_tokens, count), "number");
  cell(known(request.cached_tokens, count), "number");
  cell(known(request.output_tokens, count), "number");
  cell(known(request.first_token, seconds), "number");
  cell(seconds(request.seconds), "number");
  return line;
}
