// A conversation is a tree of messages: editing a message or regenerating a reply adds a sibling.
// What is shown, and sent to the model, is the path from the first message to the leaf.

const TITLE = 60; // characters of a title made from the first message

// The settings of a request, by the names of their fields; see settings.js.
export const DEFAULTS = Object.freeze({ max_tokens: 2048 });

export class Conversation {
  // `record` is as the store keeps it; `messages` are all of it, in any order.
  constructor(record, messages = []) {
    this.record = record;
    this.messages = new Map(messages.map((message) => [message.id, message]));
    // Another tab, or the end of this one, may have kept the leaf itself from being saved.
    const newest = [...messages].sort(byAge).at(-1);
    if (!this.messages.has(record.leaf)) record.leaf = newest?.id ?? null;
  }

  static create() {
    const now = Date.now();
    const record = { id: randomId(), title: "", leaf: null };
    return new Conversation({ ...record, created: now, updated: now, settings: { ...DEFAULTS } });
  }

  get id() {
    return this.record.id;
  }

  get isEmpty() {
    return this.messages.size === 0;
  }

  get path() {
    const path = [];
    for (let id = this.record.leaf; this.messages.has(id); id = path[0].parent) {
      path.unshift(this.messages.get(id));
    }
    return path;
  }

  // Adds a message below `parent`, null for the first, and makes it the leaf.
  add(message, parent = this.record.leaf) {
    const all = { id: randomId(), conversation: this.id, parent, created: Date.now(), ...message };
    this.messages.set(all.id, all);
    this.record.leaf = all.id;
    this.record.updated = all.created;
    if (!this.record.title && all.role === "user") this.record.title = titleOf(all);
    return all;
  }

  // The message and those that stand in its place in other branches, oldest first.
  siblings({ parent }) {
    const all = [...this.messages.values()].filter((other) => other.parent === parent);
    return all.sort(byAge);
  }

  // Shows the branch that `message` is in, up to its newest end.
  choose(message) {
    let leaf = message;
    for (;;) {
      const next = this.siblings({ parent: leaf.id }).at(-1);
      if (!next) break;
      leaf = next;
    }
    this.record.leaf = leaf.id;
  }
}

const byAge = (one, other) => one.created - other.created;

function titleOf({ content, files }) {
  const line = (content.trim() || files?.[0]?.name || "").split("\n", 1)[0].trim();
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}

// NOTE: crypto.randomUUID exists only on https and localhost.
function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The text that the model gets for a user's message: its text files, quoted, and then its own.
export function textOf({ content, files = [] }) {
  const quoted = files.filter(({ image }) => !image).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...quoted, content].filter(Boolean).join("\n\n");
}

// The messages of a request. An empty reply, of a request that failed, is left out; the user's
// messages around it are joined, because some models' templates want the roles to alternate.
export function requestMessages(path, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    const sent = sentForm(message);
    const last = messages.at(-1);
    if (!sent) continue;
    if (sent.role === "user" && last?.role === "user") last.content = joined(last.content, sent.content);
    else messages.push(sent);
  }
  return messages;
}

// The content of two messages in one: a text, or parts if there are images.
function joined(one, other) {
  if (typeof one === "string" && typeof other === "string") return `${one}\n\n${other}`;
  const parts = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);
  return [...parts(one), ...parts(other)];
}

function userContent(message) {
  const text = textOf(message);
  const images = (message.files ?? []).filter(({ image }) => image);
  if (!images.length) return text;
  const parts = images.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function sentForm(message) {
  const { role, content, calls = [], call } = message;
  if (role === "user") return { role, content: userContent(message) };
  if (role === "tool") return { role, content, tool_call_id: call };
  if (!calls.length) return content ? { role, content } : undefined;
  const tool_calls = calls.map(({ id, name, text }) => ({
    id,
    type: "function",
    function: { name, arguments: text },
  }));
  return { role, content: content || null, tool_calls };
}
