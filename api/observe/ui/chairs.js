// Draws the batch as a chairlift: a chair is a row, a rider is a generating choice, and waiting
// choices stand in the queue.

const SVG = "http://www.w3.org/2000/svg";
const JACKETS = 5;
const CROWDED_ROWS = 64;
const MAX_QUEUE_SHOWN = 40;

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function seat() {
  const cell = document.createElement("div");
  cell.className = "seat";
  const svg = shape("svg", { viewBox: "0 0 32 46" });
  const rider = shape("g", { class: "rider" });
  rider.append(
    shape("circle", { cx: 14.6, cy: 18.4, r: 3.5 }),
    shape("path", { d: "M13.9 24.6V29H21.4V37", "stroke-width": 4.2 }),
    shape("path", { class: "ski", d: "M16.5 41H28.2Q30 41 30.6 39.2", "stroke-width": 1.7 }),
  );
  svg.append(
    shape("path", { class: "chair", d: "M16 1V8C16 12.5 9.3 12 9.3 17.5V32H23" }),
    rider,
  );
  cell.append(svg);
  return cell;
}

function jacket(id) {
  let sum = 0;
  for (const char of id) sum = (sum * 31 + char.charCodeAt(0)) % 9973;
  return sum % JACKETS;
}

export class Chairs {
  constructor(line, queue) {
    this.line = line;
    this.queue = queue;
    this.riders = []; // by seat: the rider's id, or undefined
  }

  show({ model, running, waiting, riders }) {
    const rows = model ? model.max_rows : 0;
    if (this.line.childElementCount !== rows) this.build(rows);
    this.board(riders, rows);
    const tokens = new Map(riders.map((rider) => [rider.id, rider.tokens]));
    let boarding = Math.max(0, running - riders.length);
    for (const [index, cell] of [...this.line.children].entries()) {
      const id = this.riders[index];
      const boards = id === undefined && boarding > 0;
      if (boards) boarding -= 1;
      cell.className = id !== undefined ? "seat taken" : boards ? "seat boarding" : "seat";
      cell.title = id !== undefined ? `${tokens.get(id)} tokens` : "";
      if (id !== undefined) cell.dataset.jacket = jacket(id);
    }
    this.wait(waiting);
  }

  build(rows) {
    this.line.dataset.crowd = rows > CROWDED_ROWS ? "many" : "few";
    this.line.replaceChildren(...Array.from({ length: rows }, seat));
    this.riders = [];
  }

  // Riders keep their chairs; a new rider takes the first free one.
  board(riders, rows) {
    const here = new Set(riders.map((rider) => rider.id));
    const seated = new Set();
    for (let index = 0; index < rows; index++) {
      if (!here.has(this.riders[index])) this.riders[index] = undefined;
      else seated.add(this.riders[index]);
    }
    for (const id of here) {
      if (seated.has(id)) continue;
      const free = this.riders.indexOf(undefined);
      if (free === -1) return;
      this.riders[free] = id;
    }
  }

  wait(waiting) {
    const shown = Math.min(waiting, MAX_QUEUE_SHOWN);
    const label = document.createElement("b");
    label.textContent = waiting ? `${waiting}` : "empty";
    this.queue.replaceChildren(
      ...Array.from({ length: shown }, () => document.createElement("span")),
      label,
    );
  }
}
