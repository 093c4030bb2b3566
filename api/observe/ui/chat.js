// A conversation with the model, kept in memory only.

import { count, pace, seconds } from "./format.js";
import { call, events } from "./server.js";

const element = (id) => document.getElementById(id);
const number = (id) => (element(id).value === "" ? undefined : element(id).valueAsNumber);

// One reply's tokens and times. Until the server has told the tokens, its pieces are counted.
class Speed {
  constructor() {
    this.started = performance.now();
    this.first = this.last = undefined;
    this.pieces = 0;
    this.tokens = undefined;
  }

  piece() {
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
  }

  get text() {
    if (this.first === undefined) return "no token yet";
    const about = this.tokens === undefined ? "about " : "";
    const tokens = this.tokens ?? this.pieces;
    const took = (this.last - this.first) / 1000;
    const speed = took && tokens > 1 ? `, ${pace((tokens - 1) / took)} tokens/s` : "";
    const first = seconds((this.first - this.started) / 1000);
    return `${about}${count(tokens)} ${tokens === 1 ? "token" : "tokens"}${speed}, first after ${first}`;
  }
}

export class Chat {
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.messages = [];
    this.running = undefined; // the AbortController of the reply that is coming
    this.log = element("conversation");
    this.empty = element("empty"); // what stands there while nothing is said
    element("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    // What is wrong must be seen to be put right.
    element("settings").addEventListener("invalid", () => (element("settings").open = true), true);
    element("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      element("chat-form").requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    element("stop").addEventListener("click", () => this.stop());
    element("clear").addEventListener("click", () => this.clear());
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren(this.empty);
    element("prompt").focus();
  }

  async send() {
    const text = element("prompt").value.trim();
    if (!text || this.running) return;
    element("prompt").value = "";
    this.empty.remove();
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.add("user", "You").textContent = text;
    const reply = this.add("assistant", "Model");
    const speed = new Speed();
    this.running = new AbortController();
    this.busy(true);
    let note = "";
    try {
      note = await this.stream(messages, reply, speed, this.running.signal);
    } catch (error) {
      if (error.name === "AbortError") note = "stopped";
      else this.fail(reply, error);
    }
    if (reply.textContent) messages.push({ role: "assistant", content: reply.textContent });
    else {
      // What nothing answered is no part of the conversation, and can be sent again.
      messages.pop();
      if (messages === this.messages) element("prompt").value ||= text;
    }
    tell(reply, "note", [speed.text, note].filter(Boolean).join("; "));
    element("readout").textContent = "";
    this.running = undefined;
    this.busy(false);
  }

  async stream(messages, reply, speed, signal) {
    const response = await call("v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request(messages)),
    });
    let note = "";
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) speed.tokens = chunk.usage.completion_tokens;
      const [choice] = chunk.choices;
      if (!choice) continue;
      if (choice.finish_reason === "length") note = "cut at the most tokens";
      const { content, reasoning_content: thought } = choice.delta;
      if (!content && !thought) continue;
      speed.piece();
      const follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
      if (thought) thoughtOf(reply).append(thought);
      if (content) reply.append(content);
      if (follows) this.log.scrollTop = this.log.scrollHeight;
      element("readout").textContent = speed.text;
    }
    return note;
  }

  fail(reply, error) {
    tell(reply, "error", error.message);
    if (error.status === 401) this.onUnauthorized();
  }

  add(role, name) {
    const message = document.createElement("div");
    message.className = `message ${role}`;
    const title = document.createElement("h3");
    title.textContent = name;
    const text = document.createElement("div");
    message.append(title, text);
    this.log.append(message);
    this.log.scrollTop = this.log.scrollHeight;
    return text;
  }

  // While a reply comes the log is busy, so that it is read out once, when it is whole.
  busy(is) {
    this.log.setAttribute("aria-busy", `${is}`);
    const focused = document.activeElement;
    element("stop").hidden = !is;
    element("send").hidden = is;
    if (focused === element("send")) element("stop").focus();
    if (focused === element("stop")) element("prompt").focus();
    if (!is) this.log.scrollTop = this.log.scrollHeight;
  }
}

// Where the thought before a reply is shown. It is no part of the conversation.
function thoughtOf(reply) {
  const above = reply.previousElementSibling;
  if (above.className === "thought") return above;
  const box = document.createElement("details");
  box.className = "thought";
  box.open = true;
  const title = document.createElement("summary");
  title.textContent = "Thought";
  box.append(title);
  reply.before(box);
  return box;
}

// Adds a line below a reply.
function tell(reply, kind, text) {
  const line = document.createElement("div");
  line.className = kind;
  line.textContent = text;
  reply.parentElement.append(line);
}

function request(messages) {
  const system = element("system").value.trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
  };
}
