// Keeps conversations in the browser's database (IndexedDB). Where there is none, as in some
// private windows, they are in memory only, and `kept` is false.

const NAME = "chairlift";
const CONVERSATIONS = "conversations";
const MESSAGES = "messages";
const BY_CONVERSATION = "conversation";

const outcome = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

// Opens the database; falls back to memory.
export async function openStore() {
  try {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
      const messages = opening.result.createObjectStore(MESSAGES, { keyPath: "id" });
      messages.createIndex(BY_CONVERSATION, BY_CONVERSATION);
    };
    return new DatabaseStore(await outcome(opening));
  } catch {
    return new MemoryStore();
  }
}

class DatabaseStore {
  kept = true;

  constructor(database) {
    this.database = database;
    // Another tab may want to delete or upgrade the database.
    database.onversionchange = () => database.close();
  }

  // Runs `change` on both stores. Commits at once, so that a reload right after does not undo it.
  async write(change) {
    const transaction = this.database.transaction([CONVERSATIONS, MESSAGES], "readwrite");
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    change(transaction.objectStore(CONVERSATIONS), transaction.objectStore(MESSAGES));
    transaction.commit();
    await done;
  }

  async records() {
    const store = this.database.transaction(CONVERSATIONS).objectStore(CONVERSATIONS);
    return outcome(store.getAll());
  }

  async messages(id) {
    const store = this.database.transaction(MESSAGES).objectStore(MESSAGES);
    return outcome(store.index(BY_CONVERSATION).getAll(id));
  }

  // Saves a conversation's record and some of its messages.
  async save(record, messages = []) {
    await this.write((conversations, all) => {
      conversations.put(record);
      for (const message of messages) all.put(message);
    });
  }

  async delete(id) {
    const messages = await this.messages(id);
    await this.write((conversations, all) => {
      conversations.delete(id);
      for (const message of messages) all.delete(message.id);
    });
  }

  async clear() {
    await this.write((conversations, all) => {
      conversations.clear();
      all.clear();
    });
  }
}

class MemoryStore {
  kept = false;
  conversations = new Map();
  all = new Map();

  async records() {
    return [...this.conversations.values()];
  }

  async messages(id) {
    return [...this.all.values()].filter((message) => message.conversation === id);
  }

  async save(record, messages = []) {
    this.conversations.set(record.id, record);
    for (const message of messages) this.all.set(message.id, message);
  }

  async delete(id) {
    this.conversations.delete(id);
    for (const { id: message } of await this.messages(id)) this.all.delete(message);
  }

  async clear() {
    this.conversations.clear();
    this.all.clear();
  }
}
