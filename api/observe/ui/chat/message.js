// The view of one message.

import { count, pace, seconds } from "../format.js";
import { Blocks } from "./blocks.js";
import { callBox, resultForm } from "./calls.js";
import { button, make } from "./dom.js";
import { picture } from "./images.js";
import { tokenView } from "./tokens.js";

const TITLES = { user: "You", assistant: "Model", tool: "Result" };
const ENDS = {
  length: "cut at the most tokens",
  stopped: "stopped",
  content_filter: "cut by a filter",
  interrupted: "interrupted",
};

// Tokens that arrive within fewer seconds come from one read: they tell no speed of the model.
const SHORTEST = 0.05;

export function speedText({ tokens, about, gaps, seconds: took, first }) {
  if (first === undefined) return "no token yet";
  const speed = took >= SHORTEST && gaps ? `, ${pace(gaps / took)} tokens/s` : "";
  const number = `${about ? "about " : ""}${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`;
  return `${number}${speed}, first after ${seconds(first)}`;
}

export class MessageView {
  constructor(message) {
    this.message = message;
    this.root = make("div", `message ${message.role}`);
    this.root.dataset.id = message.id;
    this.body = make("div", "text");
    this.below = make("div", "below");
    this.callBoxes = [];
    this.root.append(make("h3", "", TITLES[message.role]), this.body, this.below);
    if (message.role === "assistant") this.showReply();
    else this.showPlain();
  }

  showPlain() {
    this.body.textContent = this.message.content;
    for (const { name, text, image } of this.message.files ?? []) {
      if (image) {
        this.body.before(picture({ name, image }));
        continue;
      }
      const box = document.createElement("details");
      const content = make("pre", "", text);
      content.tabIndex = 0;
      box.append(make("summary", "", `${name}, ${count(text.length)} characters`), content);
      this.body.before(box);
    }
  }

  showReply() {
    this.blocks = new Blocks(this.body);
    this.add(this.message);
    this.message.calls.forEach((call, index) => this.addCall({ index, ...call }));
  }

  // Shows a piece of a reply that arrives.
  piece({ content, thought, calls }) {
    this.add({ content, thought });
    for (const { index, function: { name, arguments: text } = {} } of calls) {
      this.addCall({ index, name, text });
    }
  }

  add({ content, thought }) {
    if (thought) this.addThought(thought);
    if (content) this.blocks.append(content);
  }

  addCall({ index, name = "", text = "" }) {
    this.callBoxes[index] ??= callBox(this.below);
    this.callBoxes[index].add(name, text);
  }

  // The thought is folded; it is rendered only when it is unfolded for the first time.
  addThought(text) {
    if (!this.thought) {
      this.thought = make("details", "thought");
      this.thought.append(make("summary", "", "Thought"));
      this.body.before(this.thought);
      this.thought.addEventListener("toggle", () => this.unfoldThought(), { once: true });
    }
    this.thoughtBlocks?.append(text);
  }

  unfoldThought() {
    const box = make("div", "text");
    this.thought.append(box);
    this.thoughtBlocks = new Blocks(box);
    this.thoughtBlocks.append(this.message.thought);
    if (this.isComplete) this.thoughtBlocks.finish();
  }

  // Shows what can be done with the message, and how its reply went.
  //
  // `siblings` are its versions with itself, `isLast` is whether no message follows on the path.
  update({ siblings, isLast, isRunning }) {
    const { message } = this;
    const isReply = message.role === "assistant";
    const focused = this.root.contains(document.activeElement) && document.activeElement.dataset.act;
    this.root.querySelector(".actions")?.remove();
    for (const node of this.root.querySelectorAll(".note, .error, .results")) node.remove();
    this.isComplete = !isRunning;
    if (isRunning) return;
    this.blocks?.finish();
    this.thoughtBlocks?.finish();
    if (isReply) this.addNotes(isLast);
    const actions = make("div", "actions");
    if (siblings.length > 1) actions.append(...branches(siblings, message));
    if (message.content) actions.append(button("copy", "Copy", "Copy the message"));
    if (message.role === "user") actions.append(button("edit", "Edit", "Edit the message"));
    if (isReply) actions.append(button("regenerate", message.finish === "error" ? "Retry" : "Regenerate"));
    if (isReply && isLast && canContinue(message)) actions.append(button("continue", "Continue"));
    if (message.tokens?.length) actions.append(this.tokenButton());
    this.root.append(actions);
    if (focused) actions.querySelector(`[data-act="${focused}"]`)?.focus();
  }

  addNotes(isLast) {
    const { model, speed, finish = "interrupted", error, calls } = this.message;
    if (error) this.below.append(make("div", "error", error));
    if (isLast && calls.length && finish !== "interrupted") this.below.append(resultForm(calls));
    const text = speed ? speedText(speed) : "";
    const note = make("div", "note", [text, ENDS[finish]].filter(Boolean).join("; "));
    if (model) note.prepend(make("span", "model", `${model} · `));
    this.below.append(note);
  }

  tokenButton() {
    const toggle = button("probabilities", "Probabilities", "Token probabilities");
    toggle.setAttribute("aria-pressed", `${Boolean(this.tokens)}`);
    return toggle;
  }

  toggleTokens(toggle) {
    if (this.tokens) this.tokens.remove();
    this.tokens = this.tokens ? undefined : tokenView(this.message.tokens);
    if (this.tokens) this.body.after(this.tokens);
    this.body.hidden = Boolean(this.tokens);
    toggle.setAttribute("aria-pressed", `${Boolean(this.tokens)}`);
  }

  // Replaces the text with a field. `onSave` is called with the changed text; if it returns false,
  // the text stays in the field.
  edit(onSave) {
    if (this.editor) return;
    this.editor = make("form", "editor");
    this.editor.setAttribute("aria-label", "Edit the message");
    const field = document.createElement("textarea");
    field.value = this.message.content;
    field.rows = Math.min(12, field.value.split("\n").length + 1);
    field.setAttribute("aria-label", "Message");
    const save = make("button", "small", "Send");
    const cancel = button("cancel", "Cancel");
    this.editor.append(field, save, cancel);
    const close = () => {
      this.editor.remove();
      this.editor = undefined;
      this.body.hidden = false;
      this.root.querySelector('[data-act="edit"]')?.focus();
    };
    const submit = () => {
      const text = field.value.trim();
      if (!text && !this.message.files?.length) return;
      if (onSave(text)) close();
    };
    this.editor.addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    this.editor.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.target === field && sends(event)) submit();
      else return;
      event.preventDefault();
      event.stopPropagation(); // Escape would stop a reply
    });
    cancel.addEventListener("click", close);
    this.body.hidden = true;
    this.body.after(this.editor);
    field.focus();
  }
}

const sends = ({ key, shiftKey, isComposing }) => key === "Enter" && !shiftKey && !isComposing;

function canContinue({ content, calls, finish }) {
  return content !== "" && !calls.length && finish !== "stop";
}

function branches(siblings, message) {
  const at = siblings.indexOf(message);
  const previous = button("previous", "‹", "Previous version");
  const next = button("next", "›", "Next version");
  previous.disabled = at === 0;
  next.disabled = at === siblings.length - 1;
  return [previous, make("span", "place", `${at + 1} / ${siblings.length}`), next];
}
