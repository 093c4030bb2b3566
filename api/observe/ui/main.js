// Shows the server's snapshots, and asks for an API key if the server needs one.

import { Chairs } from "./chairs.js";
import { Chat } from "./chat/chat.js";
import { Gauges, put } from "./gauges.js";
import { call, events, keep } from "./server.js";

const RETRY_MS = 2000;
// Snapshots come twice a second.
const SILENCE_MS = 10_000;

const element = (id) => document.getElementById(id);
const chairs = new Chairs(element("chairs"), element("queue"));
const gauges = new Gauges();
const chat = new Chat(() => askForKey(""));
let onKey; // called when the user has entered a key

function state(kind, text) {
  element("state").dataset.state = kind;
  put("state", text);
}

function show(snapshot) {
  const { status, reason, model, models } = snapshot;
  if (status === "ok") state("ok", "Serving");
  else state("waiting", reason[0].toUpperCase() + reason.slice(1));
  if (models.length > 1) put("model", models.map(({ name, state }) => `${name}: ${state}`).join(" · "));
  else if (model) put("model", `${model.name} · ${model.dtype} on ${model.device}`);
  chat.offer(models);
  chairs.show(snapshot);
  gauges.show(snapshot);
  put("live-brief", element("summary").textContent);
}

function askForKey(error) {
  const form = element("key-form");
  if (!form.hidden) element("key-error").textContent = error;
  form.hidden = false;
  element("key").focus();
}

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep(element("key").value);
  onKey();
});

async function watch() {
  for (;;) {
    // A request of the chat may need another key while the events still arrive with the old one.
    const controller = new AbortController();
    onKey = () => controller.abort();
    try {
      const response = await call("ui/events", { signal: controller.signal });
      element("key-form").hidden = true;
      element("key-error").textContent = "";
      for await (const snapshot of events(response, SILENCE_MS)) show(snapshot);
      state("lost", "The server has ended; looking for it …");
    } catch (error) {
      if (error.name === "AbortError") continue;
      if (error.status === 401) {
        state("waiting", "Waiting for an API key");
        askForKey(error.message);
        await new Promise((resolve) => (onKey = resolve));
        continue;
      }
      state("lost", error.status ? error.message : "The server cannot be reached; trying again …");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

// Beside the chat there is room for the live view; below it, it is folded at first.
const beside = matchMedia("(min-width: 70rem)");
const unfold = () => (element("live").open = beside.matches);
beside.addEventListener("change", unfold);
unfold();

watch();
