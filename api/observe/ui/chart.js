// Draws a chart of the last minutes as SVG: lines, axes with units, and what happened to the server.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 14, right: 10, bottom: 18, left: 50 };
const Y_TICKS = 3;
const X_TICK_MS = 5 * 60_000;
// Times may differ by this without a gap in the lines.
const TOLERANCE_MS = 500;

const minutes = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
export const minute = (time) => minutes.format(time);

function shape(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

// The distance of at most Y_TICKS ticks up to `highest`: 1, 2 or 5 times a power of ten.
export function tickStep(highest, least) {
  const rough = Math.max(highest / Y_TICKS, least);
  const power = 10 ** Math.floor(Math.log10(rough));
  // The sum of a few binary fractions may be a little more than the decimal number.
  return power * [1, 2, 5, 10].find((factor) => power * factor >= rough * (1 - 1e-9));
}

export class Chart {
  // `lines` are pairs of a point's field and its name in the legend; `format` writes a value with
  // its unit; `least` is the smallest distance of two ticks; `fixed` is the axis's end, if fixed;
  // `failures` marks failed requests.
  constructor(host, name, lines, format, { least = 1e-6, fixed, failures = false } = {}) {
    Object.assign(this, { name, lines, format, least, fixed, hasFailures: failures, points: [], from: 0, to: 0 });
    this.svg = shape("svg", { role: "img", "aria-label": `${name}: no data yet` });
    this.plot = shape("g", {});
    this.cursor = shape("g", { class: "cursor" });
    this.svg.append(this.plot, this.cursor);
    host.append(this.svg);
    if (lines.length > 1) host.append(legend(lines));
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.pointAt(undefined));
    this.width = this.height = 0;
    new ResizeObserver(([{ contentRect }]) => this.resize(contentRect)).observe(this.svg);
  }

  // Shows `points`, in order. Their `start` and `time` are in milliseconds, like `from` and `to`.
  show(points, from, to) {
    Object.assign(this, { points, from, to });
    this.draw();
    this.svg.setAttribute("aria-label", this.summary());
  }

  // NOTE: reading the size when drawing would cost a layout of the page for each chart.
  resize({ width, height }) {
    Object.assign(this, { width, height });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.draw();
  }

  draw() {
    const { width, height } = this;
    // A hidden chart has no size.
    if (width <= MARGIN.left + MARGIN.right || !this.to) return;
    const values = this.points.flatMap((point) => this.lines.map(([field]) => point[field] ?? 0));
    const highest = this.fixed ?? Math.max(...values, 2 * this.least);
    const step = this.fixed ? this.fixed / 2 : tickStep(highest, this.least);
    const top = step * Math.ceil(highest / step - 1e-9);
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    this.x = (time) => MARGIN.left + ((time - this.from) / (this.to - this.from)) * (right - MARGIN.left);
    this.y = (value) => bottom - (value / top) * (bottom - MARGIN.top);
    this.bottom = bottom;
    this.plot.replaceChildren(
      ...this.away(),
      ...this.valueAxis(top, step, right),
      ...this.timeAxis(),
      ...this.restarts(),
      // The first line is the upper one where both are equal.
      ...this.lines
        .map(([field], index) => shape("path", { class: `trace trace-${index}`, d: this.path(field) }))
        .reverse(),
      ...this.failures(),
    );
    this.pointAt(this.pointed);
  }

  valueAxis(top, step, right) {
    const ticks = Array.from({ length: Math.round(top / step) + 1 }, (_, index) => index * step);
    return ticks.flatMap((value) => {
      const y = this.y(value).toFixed(1);
      const label = value ? this.format(value).replace(/\.0(?!\d)/, "") : "0";
      return [
        shape("path", { class: "grid", d: `M${MARGIN.left} ${y}H${right}` }),
        shape("text", { x: MARGIN.left - 6, y, dy: "0.32em", "text-anchor": "end" }, label),
      ];
    });
  }

  timeAxis() {
    const labels = [];
    for (let at = Math.ceil(this.from / X_TICK_MS) * X_TICK_MS; at <= this.to; at += X_TICK_MS) {
      const x = this.x(at);
      const y = this.bottom;
      labels.push(shape("path", { class: "grid", d: `M${x.toFixed(1)} ${MARGIN.top}V${y + 3}` }));
      // A label at the edge would be cut.
      if (this.x(this.to) - x < 16 || x - MARGIN.left < 16) continue;
      labels.push(shape("text", { x, y: y + 14, "text-anchor": "middle" }, minute(at)));
    }
    return labels;
  }

  // A line breaks where a value is missing or time is; a value between two gaps is a dot.
  path(field) {
    const parts = [];
    let last; // the point that the line has reached
    for (const point of this.points) {
      const value = point[field];
      if (value === null) {
        last = undefined;
        continue;
      }
      const goesOn = last && point.start - last.time < TOLERANCE_MS;
      const position = `${this.x(point.time).toFixed(1)} ${this.y(value).toFixed(1)}`;
      parts.push(goesOn ? `L${position}` : `M${position}h0`);
      last = point;
    }
    return parts.join("");
  }

  away() {
    return this.points
      .filter((point) => !point.serving)
      .map((point) => {
        const x = this.x(Math.max(point.start, this.from));
        const width = this.x(point.time) - x + 0.5;
        const height = this.bottom - MARGIN.top;
        return shape("rect", { class: "away", x, y: MARGIN.top, width, height });
      });
  }

  restarts() {
    return this.points
      .filter((point) => point.restarts)
      .map((point) => {
        const line = shape("path", {
          class: "restart",
          d: `M${this.x(point.time).toFixed(1)} ${MARGIN.top}V${this.bottom}`,
        });
        line.append(shape("title", {}, `The engine was restarted before ${clock.format(point.time)}.`));
        return line;
      });
  }

  failures() {
    return this.points
      .filter((point) => this.hasFailures && point.failed)
      .map((point) => shape("circle", { class: "failure", cx: this.x(point.time), cy: this.bottom, r: 3 }));
  }

  // Shows the values nearest to the pointer's position, or none for undefined.
  pointAt(x) {
    this.pointed = x;
    this.cursor.replaceChildren();
    if (x === undefined || !this.x || !this.points.length) return;
    const far = (point) => Math.abs(this.x(point.time) - x);
    const point = this.points.reduce((best, each) => (far(each) < far(best) ? each : best));
    const at = this.x(point.time);
    const isLate = at > (this.x(this.from) + this.x(this.to)) / 2;
    const text = `${clock.format(point.time)}  ${this.values(point)}`;
    this.cursor.append(
      shape("path", { d: `M${at.toFixed(1)} ${MARGIN.top}V${this.bottom}` }),
      shape("text", { x: at, y: MARGIN.top - 4, "text-anchor": isLate ? "end" : "start" }, text),
    );
  }

  values(point) {
    const known = this.lines.filter(([field]) => point[field] !== null);
    if (!known.length) return point.serving ? "–" : "cannot serve";
    return known
      .map(([field, name]) => `${this.lines.length > 1 ? `${name} ` : ""}${this.format(point[field])}`)
      .join(", ");
  }

  summary() {
    const parts = this.lines.map(([field, name]) => {
      const known = this.points.filter((point) => point[field] !== null);
      if (!known.length) return `${name}: none`;
      const peak = known.reduce((best, each) => (each[field] > best[field] ? each : best));
      const [latest, highest] = [known.at(-1)[field], peak[field]].map(this.format);
      return `${name}: latest ${latest}, highest ${highest} at ${minute(peak.time)}`;
    });
    return `${this.name} of the last 15 minutes. ${parts.join("; ")}`;
  }
}

function legend(lines) {
  const list = document.createElement("ul");
  list.className = "keys";
  list.append(
    ...lines.map(([, name], index) => {
      const item = document.createElement("li");
      item.className = `key-${index}`;
      item.textContent = name;
      return item;
    }),
  );
  return list;
}
