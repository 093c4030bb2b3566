// Text files that are sent with a message: dropped on the chat, or chosen with a button.

import { count } from "../format.js";

const element = (id) => document.getElementById(id);
const FILE_BYTES = 256 * 1024;
const ALL_CHARACTERS = 1024 * 1024;

export class Files {
  // `onChange` is called with the files, each with `name` and `text`.
  constructor(target, onChange) {
    this.files = [];
    this.onChange = onChange;
    element("attach").addEventListener("click", () => element("file").click());
    element("file").addEventListener("change", () => {
      this.take([...element("file").files]);
      element("file").value = "";
    });
    const drags = (event) => event.dataTransfer?.types.includes("Files");
    target.addEventListener("dragover", (event) => {
      if (!drags(event)) return;
      event.preventDefault();
      target.classList.add("dropping");
    });
    target.addEventListener("dragleave", () => target.classList.remove("dropping"));
    target.addEventListener("drop", (event) => {
      target.classList.remove("dropping");
      if (!drags(event)) return;
      event.preventDefault();
      this.take([...event.dataTransfer.files]);
    });
  }

  show(files) {
    this.files = files;
    element("files").replaceChildren(...files.map((file) => this.chip(file)));
  }

  async take(dropped) {
    const errors = [];
    for (const file of dropped) {
      try {
        this.add(file.name, await read(file));
      } catch (error) {
        errors.push(`${file.name}: ${error.message}`);
      }
    }
    element("file-error").textContent = errors.join("; ");
  }

  add(name, text) {
    const all = this.files.reduce((sum, other) => sum + other.text.length, text.length);
    if (all > ALL_CHARACTERS) throw new Error("is too long together with the others");
    this.change([...this.files, { name, text }]);
  }

  change(files) {
    this.show(files);
    this.onChange(files);
  }

  chip(file) {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "small";
    remove.textContent = "Remove";
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.addEventListener("click", () => {
      this.change(this.files.filter((other) => other !== file));
      element("prompt").focus();
    });
    item.append(`${file.name}, ${count(file.text.length)} characters `, remove);
    return item;
  }
}

async function read(file) {
  if (file.size > FILE_BYTES) throw new Error(`is larger than ${FILE_BYTES / 1024} KiB`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error("cannot be read as text in UTF-8");
  }
  if (text.includes("\0")) throw new Error("is no text");
  return text;
}
