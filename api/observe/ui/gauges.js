// The numbers beside the chairs, and the table of recent requests.

import { ago, bytes, count, pace, seconds, share } from "./format.js";

const CURVE_POINTS = 120;
const CURVE_HEIGHT = 40;

const element = (id) => document.getElementById(id);

export function put(id, text) {
  const target = element(id);
  // Screen readers would read an unchanged text again if it were set again.
  if (target.textContent !== text) target.textContent = text;
}

export class Gauges {
  constructor() {
    this.paces = [];
  }

  show(snapshot) {
    put("summary", summary(snapshot));
    this.showPace(snapshot);
    showLatency("ttft", snapshot.ttft);
    showLatency("itl", snapshot.itl);
    showMemory(snapshot.kv);
    showPrefixes(snapshot.prefixes);
    showRequests(snapshot.requests);
  }

  showPace({ generated_pace: generated, prefilled_pace: prefilled }) {
    this.paces = [...this.paces, generated].slice(-CURVE_POINTS);
    put("pace", pace(generated));
    put("prefill", `prompts: ${pace(prefilled)} tokens/s`);
    const highest = Math.max(1, ...this.paces);
    const first = CURVE_POINTS - this.paces.length;
    const points = this.paces.map((value, index) => {
      const height = (CURVE_HEIGHT - 3) * (1 - value / highest) + 1.5;
      return `${first + index} ${height.toFixed(1)}`;
    });
    const line = points.join("L");
    const [area, stroke] = element("curve").children;
    stroke.setAttribute("d", `M${line}`);
    area.setAttribute("d", `M${first} ${CURVE_HEIGHT}L${line}V${CURVE_HEIGHT}Z`);
  }
}

function summary({ model, running, waiting }) {
  if (!model) return "The chairs come with the model.";
  const queue = waiting ? `, ${count(waiting)} in the queue` : "";
  return `${count(running)} of ${count(model.max_rows)} chairs taken${queue}`;
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
  cell(`${request.status}`, request.status < 400 ? "" : "failed");
  cell(known(request.prompt_tokens, count), "number");
  cell(known(request.cached_tokens, count), "number");
  cell(known(request.output_tokens, count), "number");
  cell(known(request.first_token, seconds), "number");
  cell(seconds(request.seconds), "number");
  return line;
}
