// The model, the system prompt and the parameters of a conversation. An empty field leaves the
// default of the server or the model.

const element = (id) => document.getElementById(id);

// Fields by the id of their input. `wire` is false for what is not a field of the request.
const FIELDS = [
  { id: "chat-model", name: "model" },
  { id: "system", name: "system", wire: false },
  { id: "temperature", name: "temperature" },
  { id: "top-p", name: "top_p" },
  { id: "top-k", name: "top_k" },
  { id: "min-p", name: "min_p" },
  { id: "repetition-penalty", name: "repetition_penalty" },
  { id: "max-tokens", name: "max_tokens" },
  { id: "seed", name: "seed" },
  { id: "tools", name: "tools", wire: false },
  { id: "probabilities", name: "probabilities", wire: false },
];
const ALTERNATIVES = 5; // per token

// The fields of a request that `settings` set.
export function parameters(settings) {
  const set = FIELDS.filter(({ name, wire }) => wire !== false && settings[name] !== undefined);
  return {
    ...Object.fromEntries(set.map(({ name }) => [name, settings[name]])),
    ...(settings.tools && { tools: JSON.parse(settings.tools) }),
    ...(settings.probabilities && { logprobs: true, top_logprobs: ALTERNATIVES }),
  };
}

export class Settings {
  // `onChange` is called with the settings whenever the user has changed a valid field.
  constructor(onChange) {
    this.models = []; // that the server has: name, and whether it sees images
    this.model = undefined; // of the shown conversation
    this.box = element("settings");
    this.box.addEventListener("input", () => {
      checkTools();
      this.model = read().model;
      if (this.isValid) onChange(read());
    });
    // Open the settings if one is invalid, so that the user sees it.
    this.box.addEventListener("invalid", () => (this.box.open = true), true);
  }

  get isValid() {
    return FIELDS.every(({ id }) => element(id).validity.valid);
  }

  // Whether the conversation's model takes images.
  get sees() {
    const chosen = this.model ? this.models.find(({ name }) => name === this.model) : this.models[0];
    return chosen?.sees ?? false;
  }

  // Offers the server's models.
  offer(models) {
    const names = (list) => list.map(({ name }) => name).join("\n");
    const isNew = names(models) !== names(this.models);
    this.models = models;
    if (isNew) this.showModels(); // it would close an open list
  }

  // A model that the server no longer has stays until the user chooses another.
  showModels() {
    const names = new Set(this.models.map(({ name }) => name));
    if (this.model) names.add(this.model);
    const options = [...names].map((name) => new Option(name));
    element("chat-model").replaceChildren(new Option("the server's first model", ""), ...options);
    element("chat-model").value = this.model ?? "";
    element("models").hidden = names.size < 2;
  }

  show(settings) {
    this.model = settings.model;
    this.showModels();
    for (const { id, name } of FIELDS) {
      const input = element(id);
      if (input.type === "checkbox") input.checked = settings[name] ?? false;
      else input.value = settings[name] ?? "";
    }
    checkTools();
  }
}

function read() {
  const entries = FIELDS.map(({ id, name }) => [name, valueOf(element(id))]);
  return Object.fromEntries(entries.filter(([, value]) => value !== undefined));
}

function valueOf(input) {
  if (input.type === "checkbox") return input.checked || undefined;
  if (input.type === "number") return input.value === "" ? undefined : input.valueAsNumber;
  return input.value.trim() || undefined;
}

function checkTools() {
  const { value } = element("tools");
  element("tools").setCustomValidity(!value.trim() || isArray(value) ? "" : "A JSON array of tools");
}

function isArray(text) {
  try {
    return Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}
