// Files that are sent with a message: dropped on the chat, pasted, or chosen with a button. Texts
// have a `text`, and images, which only vision models get, have an `image`.

import { count } from "../format.js";
import { imageType, picture, readImage } from "./images.js";

const element = (id) => document.getElementById(id);
const FILE_BYTES = 256 * 1024;
const ALL_CHARACTERS = 1024 * 1024;

export class Files {
  // `onChange` is called with the files, each with `name`, and `text` or `image`.
  constructor(target, onChange) {
    this.files = [];
    this.draft = {}; // stands for the message that the files belong to
    this.reading = undefined; // resolves when the files are read, if some are being read
    this.sees = false; // whether the model takes images
    this.kinds = element("file-kinds"); // in a text that is shown at times only
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
    target.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      // Cells of a table are a text and a picture of it.
      if (!files.length || types.includes("text/plain")) return;
      event.preventDefault();
      this.take([...files]);
    });
  }

  // Offers images if the model takes them.
  offer(sees) {
    if (sees === this.sees) return;
    this.sees = sees;
    const kinds = sees ? "images or text files" : "text files";
    element("attach").textContent = `Attach ${kinds}`;
    this.kinds.textContent = kinds;
  }

  // Shows the files of another message. Those that are still being read were not for it.
  open(files) {
    this.draft = {};
    this.show(files);
  }

  show(files) {
    this.files = files;
    element("files").replaceChildren(...files.map((file) => this.chip(file)));
  }

  async take(dropped) {
    const { draft, reading: before } = this;
    const reading = Promise.resolve(before).then(() => this.takeFor(draft, dropped));
    this.reading = reading;
    await reading;
    if (this.reading === reading) this.reading = undefined;
  }

  async takeFor(draft, dropped) {
    const errors = [];
    for (const file of dropped) {
      try {
        const content = await this.read(file);
        if (draft !== this.draft) return;
        this.add({ name: file.name, ...content });
      } catch (error) {
        errors.push(`${file.name}: ${error.message}`);
      }
    }
    if (draft === this.draft) element("file-error").textContent = errors.join("; ");
  }

  async read(file) {
    const type = await imageType(file);
    if (!type && !file.type.startsWith("image/")) return { text: await readText(file) };
    if (!this.sees) throw new Error("the model takes no images");
    return { image: await readImage(file, type) };
  }

  add(file) {
    const files = [...this.files, file];
    const characters = files.reduce((sum, { text = "" }) => sum + text.length, 0);
    if (characters > ALL_CHARACTERS) throw new Error("is too long together with the others");
    this.change(files);
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
    if (file.image) item.append(picture(file), `${file.name} `, remove);
    else item.append(`${file.name}, ${count(file.text.length)} characters `, remove);
    return item;
  }
}

async function readText(file) {
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
