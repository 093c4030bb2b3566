// The chat with the model: sends messages, shows replies, and keeps conversations.

import { announce, copy } from "./clipboard.js";
import { Conversation, textOf } from "./conversation.js";
import { exportJson, exportMarkdown } from "./export.js";
import { Files } from "./files.js";
import { ConversationList, titleOf } from "./list.js";
import { Log } from "./log.js";
import { speedText } from "./message.js";
import { stream } from "./reply.js";
import { Settings } from "./settings.js";
import { openStore } from "./store.js";

const element = (id) => document.getElementById(id);
const CURRENT = "chairlift-conversation"; // the conversation of this tab
const SAVE_MS = 2000; // how often a reply that is arriving is saved

export class Chat {
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.running = undefined; // the reply that is arriving: conversation, message, controller
    this.log = new Log((act, message, control) => this.act(act, message, control));
    this.settings = new Settings((settings) => {
      this.change({ settings });
      this.files.offer(this.settings.sees);
    });
    this.files = new Files(element("chat"), () => this.saveDraft());
    this.list = new ConversationList(this.listActions());
    this.listen();
    this.ready = this.start();
  }

  listen() {
    element("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    element("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      element("chat-form").requestSubmit();
    });
    element("prompt").addEventListener("input", () => this.saveDraft());
    document.addEventListener("keydown", (event) => {
      // In a dialog or an input method, Escape cancels what is done there.
      const isOther = event.isComposing || event.target.closest("dialog");
      if (event.key === "Escape" && !isOther) this.stop();
    });
    addEventListener("pagehide", () => this.saveRunning());
    element("stop").addEventListener("click", () => this.stop());
    element("new").addEventListener("click", () => {
      this.show(Conversation.create());
      this.list.close();
    });
  }

  // Offers the server's models, and images if the conversation's model takes them.
  offer(models) {
    this.settings.offer(models);
    this.files.offer(this.settings.sees);
  }

  // Opens the tab's last conversation, or else the newest one.
  async start() {
    const id = sessionStorage.getItem(CURRENT);
    this.show(Conversation.create());
    this.store = await openStore();
    element("not-kept").hidden = this.store.kept;
    const records = await this.records();
    const newest = records.toSorted((one, other) => one.updated - other.updated).at(-1);
    const record = records.find((each) => each.id === id) ?? (id ? undefined : newest);
    // What was typed meanwhile stays.
    if (record && !element("prompt").value && this.conversation.isEmpty) await this.open(record.id);
  }

  // The kept conversations. One without messages and draft is not worth keeping.
  async records() {
    const records = await this.store.records();
    return records.filter(({ leaf, draft }) => leaf || draft?.text || draft?.files.length);
  }

  async open(id) {
    const { running } = this;
    if (running?.conversation.id === id) return this.show(running.conversation);
    const record = (await this.store.records()).find((each) => each.id === id);
    if (record) this.show(new Conversation(record, await this.store.messages(id)));
  }

  show(conversation) {
    this.conversation = conversation;
    const { id, settings, draft } = conversation.record;
    sessionStorage.setItem(CURRENT, id);
    element("prompt").value = draft?.text ?? "";
    this.files.open(draft?.files ?? []);
    this.settings.show(settings);
    this.files.offer(this.settings.sees);
    this.log.show(conversation, this.running?.message);
    element("conversation-title").textContent = titleOf(conversation.record);
  }

  saveDraft() {
    const draft = { text: element("prompt").value, files: this.files.files };
    this.change({ draft });
  }

  // Changes and keeps the conversation's record.
  change(changes) {
    Object.assign(this.conversation.record, changes);
    this.save(this.conversation);
  }

  async save(conversation, messages = []) {
    try {
      await this.ready;
      if (!conversation.isDeleted) await this.store.save(conversation.record, messages);
    } catch (error) {
      element("file-error").textContent = `This browser does not keep the conversation: ${error.message}`;
    }
  }

  // Saves the reply that is arriving, but for the probabilities: they are many.
  saveRunning() {
    const { conversation, message } = this.running ?? {};
    if (message) this.save(conversation, [{ ...message, tokens: undefined }]);
  }

  stop() {
    this.running?.controller.abort();
  }

  async send() {
    const { conversation } = this;
    if (this.files.reading) {
      await this.files.reading;
      if (conversation !== this.conversation || element("file-error").textContent) return;
    }
    const content = element("prompt").value.trim();
    const { files } = this.files;
    if ((!content && !files.length) || this.running) return;
    element("prompt").value = "";
    element("file-error").textContent = "";
    this.files.open([]);
    this.conversation.record.draft = undefined;
    this.ask({ role: "user", content, ...(files.length && { files }) });
  }

  // Adds a message of the user below `parent`, and a reply to it.
  ask(message, parent) {
    const added = this.conversation.add(message, parent);
    this.save(this.conversation, [added]);
    element("conversation-title").textContent = titleOf(this.conversation.record);
    this.reply(added.id);
  }

  reply(parent) {
    const empty = { role: "assistant", content: "", thought: "", calls: [] };
    this.generate(this.conversation.add(empty, parent));
  }

  // Has the model write `message`, which is empty or is continued.
  async generate(message) {
    const { conversation } = this;
    const controller = new AbortController();
    this.running = { conversation, message, controller };
    delete message.finish;
    delete message.error;
    this.log.show(conversation, message, { keep: true });
    this.busy(true);
    this.save(conversation, [message]);
    let saved = performance.now();
    try {
      const { settings } = conversation.record;
      await stream(conversation.path, settings, controller.signal, (piece) => {
        this.log.piece(message, piece);
        if (performance.now() - saved < SAVE_MS) return;
        saved = performance.now();
        this.saveRunning();
      });
      message.finish ??= "interrupted";
    } catch (error) {
      this.fail(message, error);
    }
    this.running = undefined;
    conversation.record.updated = Date.now();
    this.save(conversation, [message]);
    if (conversation === this.conversation) this.log.update(conversation);
    this.busy(false);
    announce(message.error ?? `The reply is complete. ${message.speed ? speedText(message.speed) : ""}`);
  }

  fail(message, error) {
    if (error.name === "AbortError") {
      message.finish = "stopped";
      return;
    }
    message.finish = "error";
    message.error = error.message;
    if (error.status === 401) this.onUnauthorized();
  }

  // Carries out a control of a message. Returns false if a reply that is arriving forbids it.
  act(act, message, control) {
    const { conversation } = this;
    const siblings = conversation.siblings(message);
    const at = siblings.indexOf(message);
    if (act === "copy") copy(message.role === "user" ? textOf(message) : message.content, control);
    else if (act === "previous" || act === "next") this.choose(siblings[at + (act === "next" ? 1 : -1)], act);
    else if (this.running) {
      announce("A reply is arriving. Stop it first.");
      return false;
    } else if (act === "regenerate") this.reply(message.parent);
    else if (act === "continue") this.generate(message);
    else if (act === "edited") this.ask({ ...content(message), content: control }, message.parent);
    else if (act === "results") this.sendResults(message, control);
    return true;
  }

  choose(message, act) {
    this.conversation.choose(message);
    this.log.show(this.conversation, this.running?.message, { keep: true });
    this.log.focus(message, act);
    this.save(this.conversation);
  }

  // Adds the results of the calls in `message`, and a reply to them.
  sendResults(message, results) {
    const added = message.calls.map(({ id }, index) =>
      this.conversation.add({ role: "tool", call: id, content: results[index] }),
    );
    this.save(this.conversation, added);
    this.reply(added.at(-1).id);
  }

  // While a reply arrives, Stop is in the place of Send. It gets the focus of controls that are gone.
  busy(is) {
    const focused = document.activeElement;
    element("stop").hidden = !is;
    element("send").hidden = is;
    if (is && (focused === element("send") || focused === document.body)) element("stop").focus();
    if (focused === element("stop")) element("prompt").focus();
    this.log.busy(is);
  }

  listActions() {
    const load = async (id) => {
      // The record of these would overwrite a change of a copy.
      const inUse = [this.conversation, this.running?.conversation].find((each) => each?.id === id);
      if (inUse) return inUse;
      const record = (await this.store.records()).find((each) => each.id === id);
      return new Conversation(record, await this.store.messages(id));
    };
    const list = async () => {
      await this.ready;
      this.list.fill(await this.records(), this.conversation.id);
    };
    return {
      list,
      open: async (id) => {
        await this.open(id);
        this.list.close();
      },
      markdown: async (id) => exportMarkdown(await load(id)),
      json: async (id) => exportJson(await load(id)),
      rename: async (id, title) => {
        const conversation = await load(id);
        conversation.record.title = title;
        await this.save(conversation);
        element("conversation-title").textContent = titleOf(this.conversation.record);
        await list();
      },
      remove: async (id) => {
        this.forget((conversation) => conversation.id === id);
        await this.store.delete(id);
        await list();
      },
      removeAll: async () => {
        this.forget(() => true);
        await this.store.clear();
        await list();
      },
    };
  }

  // Ends what goes on in conversations that are being deleted, and shows a new one for them.
  forget(isDeleted) {
    for (const conversation of [this.conversation, this.running?.conversation]) {
      if (!conversation || !isDeleted(conversation)) continue;
      conversation.isDeleted = true;
      if (conversation === this.running?.conversation) this.stop();
      if (conversation === this.conversation) this.show(Conversation.create());
    }
  }
}

// What an edited message keeps of the original.
const content = ({ role, files }) => ({ role, ...(files && { files }) });
