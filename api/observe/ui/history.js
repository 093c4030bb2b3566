// The last fifteen minutes of the server as charts, and as a table of minutes.

import { Chart, minute } from "./chart.js";
import { count, pace, seconds, share } from "./format.js";

const SPAN_SECONDS = 15 * 60;
const MINUTE_MS = 60_000;
// The smallest distance of two ticks, so that an axis without data has sensible ones.
const PACE = { least: 0.5 };
const LATENCY = { least: 5e-4 };

const element = (id) => document.getElementById(id);
const perSecond = (value) => `${pace(value)}/s`;
const part = (value) => share(value, 1);

function charts() {
  const latencies = (name) => [
    [`${name}_p50`, "median"],
    [`${name}_p99`, "p99"],
  ];
  const choices = [
    ["running", "running"],
    ["waiting", "waiting"],
  ];
  return [
    new Chart(element("chart-output"), "Output tokens", [["generated_pace", "output"]], perSecond, PACE),
    new Chart(element("chart-prompts"), "Prompt tokens", [["prefilled_pace", "prompts"]], perSecond, PACE),
    new Chart(element("chart-ttft"), "Time to first token", latencies("ttft"), seconds, LATENCY),
    new Chart(element("chart-itl"), "Time between tokens", latencies("itl"), seconds, LATENCY),
    new Chart(element("chart-choices"), "Running and waiting choices", choices, count, {
      least: 1,
      failures: true,
    }),
    new Chart(element("chart-kv"), "Used KV memory", [["kv_share", "used"]], part, { fixed: 1 }),
  ];
}

export class History {
  constructor() {
    this.charts = charts();
    this.samples = [];
    this.table = element("history");
    this.table.addEventListener("toggle", () => this.showTable());
  }

  // Adds an event's new samples. Their clock is the server's, and goes on when it is restarted.
  add({ now, history }) {
    let last = this.samples.at(-1)?.at ?? -Infinity;
    if (last > now) {
      this.samples = []; // another machine, or it was booted anew
      last = -Infinity;
    }
    const added = history.filter((sample) => sample.at > last);
    if (!added.length) return;
    this.samples = [...this.samples, ...added].filter((sample) => sample.at > now - SPAN_SECONDS);
    this.show(now);
  }

  show(now) {
    const to = Date.now();
    const time = (at) => to - (now - at) * 1000;
    this.points = this.samples.map((sample) => ({
      ...sample,
      time: time(sample.at),
      start: time(sample.at - sample.seconds),
    }));
    for (const chart of this.charts) chart.show(this.points, to - SPAN_SECONDS * 1000, to);
    this.showTable();
  }

  get failed() {
    return this.samples.reduce((sum, sample) => sum + sample.failed, 0);
  }

  showTable() {
    if (!this.table.open || !this.points) return;
    const byMinute = grouped(this.points);
    element("minutes").replaceChildren(...[...byMinute].reverse().map(row));
  }
}

// The points by minute. NOTE: Map.groupBy is too new for many browsers.
function grouped(points) {
  const found = new Map();
  for (const point of points) {
    const key = Math.floor(point.time / MINUTE_MS);
    found.set(key, [...(found.get(key) ?? []), point]);
  }
  return found;
}

function row([number, points]) {
  const known = (field) => points.map((point) => point[field]).filter((value) => value !== null);
  const cell = (value, format) => (value === undefined ? "–" : format(value));
  const mean = (values) => (values.length ? sum(values) / values.length : undefined);
  const middle = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const most = (values) => (values.length ? Math.max(...values) : undefined);
  const line = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = minute(number * MINUTE_MS);
  line.append(head);
  for (const text of [
    cell(mean(known("generated_pace")), pace),
    cell(mean(known("prefilled_pace")), pace),
    cell(middle(known("ttft_p50")), seconds),
    cell(most(known("ttft_p99")), seconds),
    cell(middle(known("itl_p50")), seconds),
    cell(most(known("itl_p99")), seconds),
    cell(most(known("running")), count),
    cell(most(known("waiting")), count),
    cell(most(known("kv_share")), part),
    count(sum(known("failed"))),
    count(sum(known("restarts"))),
  ]) {
    const made = line.insertCell();
    made.textContent = text;
    made.className = "number";
  }
  return line;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
