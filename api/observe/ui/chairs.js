// Draws the batch as a chairlift: a chair is a row, a rider is a generating choice, and waiting
// choices stand in the queue. Many rows are small squares, so that all of them fit a screen.

import { count, seconds } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const JACKETS = 5;
const MAX_QUEUE_SHOWN = 40;
// The most rows of each density; the style sheet has their sizes.
const DENSITIES = [
  [32, "few"],
  [96, "many"],
  [384, "dense"],
  [1536, "denser"],
  [Infinity, "densest"],
];

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function drawing() {
  const svg = shape("svg", { viewBox: "0 0 32 46", "aria-hidden": "true" });
  const rider = shape("g", { class: "rider" });
  rider.append(
    shape("circle", { cx: 14.6, cy: 18.4, r: 3.5 }),
    shape("path", { d: "M13.9 24.6V29H21.4V37", "stroke-width": 4.2 }),
    shape("path", { class: "ski", d: "M16.5 41H28.2Q30 41 30.6 39.2", "stroke-width": 1.7 }),
  );
  svg.append(shape("path", { class: "chair", d: "M16 1V8C16 12.5 9.3 12 9.3 17.5V32H23" }), rider);
  return svg;
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
    this.detail = document.getElementById("seat-detail");
    this.hint = this.detail.textContent;
    this.riders = []; // by seat: the rider's id, or undefined
    this.texts = []; // by seat: its description
    this.chosen = this.pointed = undefined; // seats
    line.addEventListener("pointerover", (event) => this.pointAt(this.seatOf(event)));
    line.addEventListener("pointerleave", () => this.pointAt(undefined));
    line.addEventListener("click", (event) => {
      const seat = this.seatOf(event);
      this.choose(seat === this.chosen ? undefined : seat);
    });
    line.addEventListener("keydown", (event) => this.move(event));
  }

  show({ model, running, waiting, riders }) {
    const rows = model ? model.max_rows : 0;
    if (this.line.childElementCount !== rows) this.build(rows);
    this.board(riders, rows);
    const known = new Map(riders.map((rider) => [rider.id, rider]));
    let boarding = Math.max(0, running - riders.length);
    for (const [index, cell] of [...this.line.children].entries()) {
      const rider = known.get(this.riders[index]);
      const boards = rider === undefined && boarding > 0;
      if (boards) boarding -= 1;
      set(cell, "className", rider ? "seat taken" : boards ? "seat boarding" : "seat");
      if (rider) cell.dataset.jacket = jacket(rider.id);
      this.texts[index] = `${name(index)}: ${describe(rider, boards)}`;
    }
    this.showDetail();
    this.wait(waiting);
  }

  build(rows) {
    const density = DENSITIES.find(([most]) => rows <= most)[1];
    const isDrawn = density === "few" || density === "many";
    this.line.dataset.crowd = density;
    this.line.replaceChildren(
      ...Array.from({ length: rows }, (_, index) => {
        const cell = document.createElement("div");
        cell.id = `seat-${index}`;
        cell.setAttribute("role", "option");
        cell.setAttribute("aria-label", name(index));
        cell.setAttribute("aria-selected", "false");
        if (isDrawn) cell.append(drawing());
        return cell;
      }),
    );
    this.riders = [];
    this.texts = [];
    this.chosen = this.pointed = undefined;
    this.line.removeAttribute("aria-activedescendant");
    // A list box must not be empty.
    if (rows) this.line.setAttribute("role", "listbox");
    else this.line.removeAttribute("role");
    this.line.tabIndex = rows ? 0 : -1;
  }

  // Riders keep their chairs; a new rider takes the first free one.
  board(riders, rows) {
    const here = new Set(riders.map((rider) => rider.id));
    const seated = new Set();
    for (let index = 0; index < rows; index++) {
      if (!here.has(this.riders[index])) this.riders[index] = undefined;
      else seated.add(this.riders[index]);
    }
    let free = 0;
    for (const id of here) {
      if (seated.has(id)) continue;
      while (free < rows && this.riders[free] !== undefined) free++;
      if (free === rows) return;
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

  seatOf(event) {
    const cell = event.target.closest(".seat");
    return cell ? [...this.line.children].indexOf(cell) : undefined;
  }

  pointAt(seat) {
    this.pointed = seat;
    this.showDetail();
  }

  choose(seat) {
    const cells = this.line.children;
    if (this.chosen !== undefined) {
      cells[this.chosen].setAttribute("aria-selected", "false");
      cells[this.chosen].setAttribute("aria-label", name(this.chosen));
    }
    this.chosen = seat;
    if (seat === undefined) {
      this.line.removeAttribute("aria-activedescendant");
    } else {
      cells[seat].setAttribute("aria-selected", "true");
      this.line.setAttribute("aria-activedescendant", cells[seat].id);
    }
    this.showDetail();
  }

  move(event) {
    const cells = [...this.line.children];
    const below = cells.findIndex((cell) => cell.offsetTop > cells[0].offsetTop);
    const columns = below === -1 ? cells.length : below;
    const at = this.chosen ?? -1;
    const target = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: at < 0 ? 0 : at + columns,
      ArrowUp: at - columns,
      Home: 0,
      End: cells.length - 1,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    if (target >= 0 && target < cells.length) this.choose(target);
  }

  // Only the chosen chair has a full label: others would change hundreds of texts a second.
  showDetail() {
    const seat = this.pointed ?? this.chosen;
    set(this.detail, "textContent", this.texts[seat] ?? this.hint);
    if (this.chosen === undefined) return;
    this.line.children[this.chosen].setAttribute("aria-label", this.texts[this.chosen]);
  }
}

const name = (seat) => `Chair ${seat + 1}`;

function describe(rider, boards) {
  if (boards) return "its prompt is being read";
  if (!rider) return "free";
  const tokens = `${count(rider.tokens)} ${rider.tokens === 1 ? "token" : "tokens"}`;
  return `request …${rider.id}, ${tokens} in ${seconds(rider.seconds)}`;
}

// Unchanged values are not set again: that would cost a layout for each chair.
function set(target, property, value) {
  if (target[property] !== value) target[property] = value;
}
