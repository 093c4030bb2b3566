// The messages that are shown, and their scrolling.

import { MessageView, speedText } from "./message.js";

const element = (id) => document.getElementById(id);
const AIM_MS = 300; // time in which the end at which a user aims may have moved
const INTENT_MS = 1000; // time after an input in which scrolling is the user's
const NEAR = 40; // px from the end at which the log follows what arrives

export class Log {
  // `onAct` is called with the control's name, its message, and the control or what it yields.
  constructor(onAct) {
    this.box = element("conversation");
    this.empty = element("empty"); // the text shown before the first message
    this.views = new Map(); // by message
    // Sizes change with what arrives, and with blocks that come into sight.
    this.sizes = new ResizeObserver(() => this.follow());
    this.follows = true;
    this.top = 0;
    this.ends = []; // [time, greatest scrollTop] within AIM_MS, oldest first
    this.touched = -INTENT_MS;
    this.box.addEventListener("scroll", () => this.scrolled());
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      this.box.addEventListener(kind, () => (this.touched = performance.now()), { passive: true });
    }
    this.box.addEventListener("click", (event) => {
      const control = event.target.closest("button[data-act]");
      const view = control && this.viewOf(control);
      if (view) this.click(control, view, onAct);
    });
    this.box.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!event.target.matches(".results")) return;
      const results = [...event.target.querySelectorAll("textarea")].map(({ value }) => value);
      onAct("results", this.viewOf(event.target).message, results);
    });
  }

  // Follows again at the end, and no longer when the user scrolls upwards. Sizes that change scroll,
  // too, so there must have been an input.
  scrolled() {
    const { scrollTop } = this.box;
    const now = this.measure();
    const isUsers = performance.now() - this.touched < INTENT_MS;
    // A reply that arrives quickly moves the end between the user's input and this event.
    const aimed = Math.min(...this.ends.map(([, end]) => end));
    if (now - scrollTop < NEAR) this.setFollows(true);
    else if (isUsers && scrollTop > this.top && aimed - scrollTop < NEAR) {
      this.setFollows(true);
      this.follow();
    } else if (isUsers && scrollTop < this.top) this.setFollows(false);
    this.top = this.box.scrollTop;
  }

  // Records the greatest scrollTop of now, and returns it.
  measure() {
    const now = performance.now();
    const end = this.box.scrollHeight - this.box.clientHeight;
    this.ends = [...this.ends.filter(([time]) => now - time < AIM_MS), [now, end]];
    return end;
  }

  // While the log follows, the browser must not move it to keep other content in place.
  setFollows(is) {
    this.follows = is;
    this.box.classList.toggle("follows", is);
  }

  follow() {
    this.measure();
    if (this.follows) this.box.scrollTop = this.box.scrollHeight;
  }

  viewOf(node) {
    const { id } = node.closest(".message").dataset;
    return [...this.views.values()].find(({ message }) => message.id === id);
  }

  click(control, view, onAct) {
    const { act } = control.dataset;
    const { message } = view;
    if (act === "copy-code") onAct("copy", { content: codeOf(control) }, control);
    else if (act === "probabilities") view.toggleTokens(control);
    else if (act === "edit") view.edit((text) => onAct("edited", message, text));
    else onAct(act, message, control);
  }

  // Shows a conversation's path. `running` is the message that is arriving, if there is one.
  //
  // With `keep`, views of messages that are on the path already stay as they are.
  show(conversation, running, { keep = false } = {}) {
    const path = conversation.path;
    const before = this.views;
    this.views = new Map();
    for (const message of path) {
      const kept = keep && message !== running && before.get(message);
      this.views.set(message, kept || new MessageView(message));
    }
    const roots = [...this.views.values()].map(({ root }) => root);
    for (const [message, { root }] of before) {
      if (this.views.get(message)?.root !== root) root.remove();
    }
    this.empty.remove();
    for (const root of roots.length ? roots : [this.empty]) {
      // Moving a view would lose its scroll position and its focus.
      if (root.parentElement !== this.box) this.box.append(root);
    }
    this.sizes.disconnect();
    for (const root of roots) this.sizes.observe(root);
    this.update(conversation, running);
    this.setFollows(true);
    this.follow();
  }

  // Shows controls and notes anew.
  update(conversation, running) {
    const last = conversation.path.at(-1);
    for (const [message, view] of this.views) {
      view.update({
        siblings: conversation.siblings(message),
        isLast: message === last,
        isRunning: message === running,
      });
    }
  }

  piece(message, piece) {
    this.views.get(message)?.piece(piece);
    if (message.speed) this.readout(message.speed);
  }

  // Shows the speed, once in a frame.
  readout(speed) {
    if (!this.speed) requestAnimationFrame(() => this.drawReadout());
    this.speed = speed;
  }

  drawReadout() {
    const isBusy = this.box.getAttribute("aria-busy") === "true";
    element("readout").textContent = isBusy ? speedText(this.speed) : "";
    this.speed = undefined;
  }

  focus(message, act) {
    const { root } = this.views.get(message);
    const enabled = [...root.querySelectorAll(".actions button:enabled")];
    (enabled.find(({ dataset }) => dataset.act === act) ?? enabled[0])?.focus();
  }

  // While a reply arrives the log is busy, so that screen readers read it once, when complete.
  busy(is) {
    this.box.setAttribute("aria-busy", `${is}`);
    if (!is) element("readout").textContent = "";
  }
}

const codeOf = (control) => control.closest(".code").querySelector("pre").textContent;
