// Conversations as files.

import { download } from "./clipboard.js";
import { textOf } from "./conversation.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result of a function" };

// Everything that is kept of it, with all branches.
export function exportJson(conversation) {
  const { title, created, updated, settings, leaf } = conversation.record;
  const messages = [...conversation.messages.values()];
  const all = { format: "chairlift-conversation", version: 1, title, created, updated, settings };
  const text = JSON.stringify({ ...all, leaf, messages }, null, 2);
  download(`${fileName(title)}.json`, "application/json", `${text}\n`);
}

// What is shown of it.
export function exportMarkdown(conversation) {
  const { title, settings } = conversation.record;
  const parts = [`# ${title || "Conversation"}`];
  if (settings.system) parts.push("## System", settings.system);
  for (const message of conversation.path) {
    parts.push(`## ${NAMES[message.role]}`);
    if (message.thought) parts.push(quoted(message.thought));
    for (const { name, image } of message.files ?? []) {
      if (image) parts.push(`![${name.replace(/[[\]\\]/g, "\\$&")}](${image})`);
    }
    parts.push(message.role === "user" ? textOf(message) : message.content);
    for (const { name, text } of message.calls ?? []) {
      parts.push(`Calls \`${name}\`:`, `\`\`\`json\n${text}\n\`\`\``);
    }
  }
  const text = `${parts.filter(Boolean).join("\n\n")}\n`;
  download(`${fileName(title)}.md`, "text/markdown", text);
}

const quoted = (text) => text.trim().replace(/^/gm, "> ");

function fileName(title) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return name.slice(0, 60) || "conversation";
}
