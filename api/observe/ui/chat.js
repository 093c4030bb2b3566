// The chat with the model. The conversation is in memory only.

import { count, pace, seconds } from "./format.js";
import { call, events } from "./server.js";

const element = (id) => document.getElementById(id);
const number = (id) => (element(id).value === "" ? undefined : element(id).valueAsNumber);

// The token count and the times of a reply. Until the server sends usage, it counts the chunks.
class Speed {
  constructor() {
    this.started = performance.now();
    this.first = this.last = undefined;
    this.chunks = 0;
    this.tokens = undefined;
  }

  addChunk() {
    this.last = performance.now();
    this.first ??= this.last;
    this.chunks += 1;
  }

  get text() {
    if (this.first === undefined) return "no token yet";
    const about = this.tokens === undefined ? "about " : "";
    const tokens = this.tokens ?? this.chunks;
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
    this.running = undefined; // the AbortController of the running reply
    this.log = element("conversation");
    this.empty = element("empty"); // the text shown before the first message
    element("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    // Open the settings if one is invalid, so that the user sees it.
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
      // Without a reply, remove the question from the conversation, so that it can be sent again.
      messages.pop();
      if (messages === this.messages) element("prompt").value ||= text;
    }
    addLine(reply, "note", [speed.text, note].filter(Boolean).join("; "));
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
      speed.addChunk();
      const follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
      if (thought) thoughtOf(reply).append(thought);
      if (content) reply.append(content);
      if (follows) this.log.scrollTop = this.log.scrollHeight;
      element("readout").textContent = speed.text;
    }
    return note;
  }

  fail(reply, error) {
    addLine(reply, "error", error.message);
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

  // While a reply is streamed the log is busy, so that screen readers read it once, when complete.
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

// The box with the reasoning before a reply, which is not part of the conversation.
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
function addLine(reply, kind, text) {
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
