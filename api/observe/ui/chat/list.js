// The list of conversations, and what can be done with each.

import { button, make } from "./dom.js";

const element = (id) => document.getElementById(id);
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export const titleOf = (record) => record.title || "New conversation";

export class ConversationList {
  // `actions` are functions of a conversation's id by name: open, rename (also of the new title),
  // markdown, json, remove; and removeAll.
  constructor(actions) {
    this.actions = actions;
    this.panel = element("conversations");
    this.toggle = element("conversations-toggle");
    this.toggle.addEventListener("click", () => this.show(this.panel.hidden));
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.show(false);
      this.toggle.focus();
    });
    element("conversation-list").addEventListener("click", (event) => this.click(event));
    element("delete-all").addEventListener("click", async () => {
      const number = element("conversation-list").children.length;
      if (await confirmed(`Delete all ${number} conversations?`)) actions.removeAll();
    });
  }

  show(is) {
    this.panel.hidden = !is;
    this.toggle.setAttribute("aria-expanded", `${is}`);
    if (is) this.actions.list();
  }

  close() {
    this.show(false);
    element("prompt").focus();
  }

  fill(records, current) {
    const focused = document.activeElement;
    const isWithin = this.panel.contains(focused);
    const id = focused?.closest("li")?.dataset.id;
    const sorted = records.toSorted((one, other) => other.updated - one.updated);
    element("conversation-list").replaceChildren(...sorted.map((record) => entry(record, current)));
    element("delete-all").hidden = sorted.length === 0;
    element("no-conversations").hidden = sorted.length > 0;
    // The control that had the focus may be gone: it goes to its conversation, or else to the list.
    if (!isWithin) return;
    const items = [...element("conversation-list").children];
    const item = items.find(({ dataset }) => dataset.id === id);
    (item?.querySelector(".title") ?? this.toggle).focus();
  }

  async click(event) {
    const act = event.target.closest("button")?.dataset.act;
    if (!act) return;
    const item = event.target.closest("li");
    const { id } = item.dataset;
    const title = item.querySelector(".title");
    if (act === "rename") this.rename(item, id);
    else if (act !== "remove") this.actions[act](id);
    else if (await confirmed(`Delete “${title.textContent}”?`)) this.actions.remove(id);
  }

  rename(item, id) {
    const form = make("form", "rename");
    form.setAttribute("aria-label", "Rename");
    const field = document.createElement("input");
    field.value = item.querySelector(".title").textContent;
    field.maxLength = 200;
    field.required = true;
    field.setAttribute("aria-label", "Title");
    form.append(field, make("button", "small", "Save"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const title = field.value.trim();
      if (title) this.actions.rename(id, title);
    });
    item.replaceChildren(form);
    field.select();
  }
}

function entry(record, current) {
  const item = make("li");
  item.dataset.id = record.id;
  const open = button("open", titleOf(record));
  open.className = "title";
  if (record.id === current) open.setAttribute("aria-current", "true");
  const of = (what) => `${what}: ${titleOf(record)}`;
  const tools = make("div", "tools");
  tools.append(
    make("span", "more", day.format(record.updated)),
    button("rename", "Rename", of("Rename")),
    button("markdown", "Markdown", of("Export as Markdown")),
    button("json", "JSON", of("Export as JSON")),
    button("remove", "Delete", of("Delete")),
  );
  item.append(open, tools);
  return item;
}

// Asks the user. Resolves to whether the answer is yes.
function confirmed(question) {
  const dialog = element("confirm");
  element("confirm-question").textContent = question;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    element("confirm-yes").onclick = () => dialog.close("yes");
    element("confirm-no").onclick = () => dialog.close("");
  });
}
