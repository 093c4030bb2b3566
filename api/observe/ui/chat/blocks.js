// Renders a text that grows, so that the work for each piece does not grow with the text.
//
// CommonMark's blocks follow one another, and one that another has followed is finished: it is
// rendered once. Only the last block is rendered again when text arrives. Three kinds of last block
// can grow without end: lines are added to a code block as they are, long lists are cut at an item,
// long tables after a row. Whatever there is to do is done in slices of a few milliseconds.

import { codeBox, parser, render } from "./markdown.js";
import { load } from "./maths.js";

const SLICE_MS = 8; // work in one frame, for all texts together
const PIECE = 1000; // characters taken up at a time
const LONG = 2500; // characters of an open list or table that is cut
const HUGE = 40000; // characters of any other open block that is cut
const CODE_LINES = 60; // lines of a code block in one element
const REST = 4; // an open block that took t ms to render is left alone for REST * t ms

const now = () => performance.now();

// All that wait for the next frame share its slice. The last comes first: it is what is looked at.
const waiting = new Set();

function work() {
  const until = now() + SLICE_MS;
  for (const blocks of [...waiting].reverse()) {
    if (now() >= until) break;
    waiting.delete(blocks);
    blocks.work(until);
  }
  if (waiting.size) requestAnimationFrame(work);
}

export class Blocks {
  constructor(container) {
    this.container = container;
    this.incoming = ""; // not looked at yet
    this.open = ""; // the text of blocks that are not finished
    this.view = undefined; // the element that shows `open`
    this.drawn = ""; // the text that `view` shows
    this.code = undefined; // the Code that is being written
    this.env = { references: {} };
    this.complete = false;
    this.nextDraw = 0;
  }

  append(text) {
    this.incoming += text.replaceAll("\r\n", "\n").replaceAll("\0", "\ufffd");
    this.schedule();
  }

  // No text follows. Resolves when all of it is shown.
  finish() {
    this.complete = true;
    return new Promise((resolve) => {
      this.resolve = resolve;
      this.schedule();
    });
  }

  get isIdle() {
    return !this.incoming && this.open === this.drawn;
  }

  schedule() {
    if (!waiting.size) requestAnimationFrame(work);
    waiting.add(this);
  }

  work(until) {
    while (this.incoming && now() < until) {
      if (this.code) this.incoming = this.code.take(this.incoming, this.complete);
      else this.takeText();
      if (this.code?.closed) this.code = undefined;
      else if (this.code) break; // the code has taken all that it can
    }
    if (this.open !== this.drawn && !this.incoming) this.draw();
    const waits = this.code && this.incoming && !this.complete; // for the rest of the line
    if (!this.isIdle && !waits) this.schedule();
    else if (this.complete) this.resolve?.();
  }

  // Takes a piece up, and finishes the blocks that end in it.
  takeText() {
    this.open += this.incoming.slice(0, PIECE);
    this.incoming = this.incoming.slice(PIECE);
    const lines = this.open.slice(0, this.open.lastIndexOf("\n") + 1);
    if (this.open.length > HUGE) return this.freeze(lines.length || this.open.lastIndexOf(" ") + 1 || HUGE);
    if (!lines) return;
    const tokens = [];
    parser.block.parse(lines, parser, { references: {} }, tokens);
    const last = tokens.findLast((token) => token.level === 0 && token.nesting >= 0 && token.map);
    if (!last) return;
    if (last.type === "fence" && !isClosed(last, lines)) this.beginCode(last);
    else if (last.map[0] > 0) this.freeze(offsetOf(lines, last.map[0]));
    else if (lines.length > LONG) this.cut(last, tokens, lines);
  }

  beginCode(fence) {
    const start = offsetOf(this.open, fence.map[0]);
    if (start) this.freeze(start);
    const firstLine = this.open.indexOf("\n") + 1;
    this.incoming = this.open.slice(firstLine) + this.incoming;
    this.code = new Code(fence, /^ */.exec(this.open)[0].length);
    this.addBlock(this.code.box);
    this.clearOpen("");
  }

  // Cuts an open list before its last item, and an open table before its last row.
  cut(last, tokens, lines) {
    const isTable = last.type === "table_open";
    if (!isTable && !last.type.endsWith("list_open")) return;
    const level = isTable ? 2 : 1;
    const kind = isTable ? "tr_open" : "list_item_open";
    const item = tokens.findLast((token) => token.type === kind && token.level === level);
    if (!item?.map || item.map[0] <= (isTable ? 2 : 0)) return;
    // The rest of a table needs the header to be one.
    const header = isTable ? lines.slice(0, offsetOf(lines, 2)) : "";
    this.freeze(offsetOf(lines, item.map[0]), header);
  }

  // Renders the first `length` characters of the open text for good; `header` precedes the rest.
  freeze(length, header = "") {
    const text = this.open.slice(0, length);
    this.clearOpen(header + this.open.slice(length));
    this.addBlock(block(text, this.env));
  }

  clearOpen(rest) {
    this.view?.remove();
    this.view = undefined;
    this.drawn = "";
    this.open = rest;
  }

  addBlock(node) {
    this.container.insertBefore(node, this.view ?? null);
  }

  // Shows the open text. Its link definitions do not count before it is finished.
  draw() {
    const start = now();
    if (start < this.nextDraw && !this.complete) return;
    const env = this.complete ? this.env : { references: { ...this.env.references } };
    const view = block(this.open, env);
    if (this.view) this.view.replaceWith(view);
    else this.container.append(view);
    this.view = view;
    this.drawn = this.open;
    this.nextDraw = now() + REST * (now() - start);
  }
}

// A block of code that is being written, line by line.
class Code {
  // `indent` is the fence's indentation, which its lines may have, too.
  constructor(fence, indent) {
    this.fence = fence;
    this.box = codeBox(fence.info.trim().split(/\s/)[0]);
    this.box.classList.add("block");
    this.code = document.createElement("code");
    this.box.querySelector("pre").append(this.code);
    this.partial = document.createTextNode(""); // the line that has not ended
    this.code.append(this.partial);
    this.lines = 0;
    this.indent = new RegExp(`^ {0,${indent}}`);
    this.closed = false;
  }

  // Takes lines up to the closing fence. Returns the rest of the text.
  take(text, complete) {
    const end = text.lastIndexOf("\n") + 1;
    const lines = text.slice(0, end).split("\n").slice(0, -1);
    for (let at = 0; at < lines.length; at++) {
      if (isFence(lines[at], this.fence.markup)) {
        this.flush(lines.slice(0, at));
        this.partial.data = "";
        this.closed = true;
        return lines.slice(at + 1).map((line) => `${line}\n`).join("") + text.slice(end);
      }
    }
    this.flush(lines);
    const rest = text.slice(end);
    const ends = complete && isFence(rest, this.fence.markup);
    const mayEnd = !complete && /^ {0,3}[`~]*$/.test(rest);
    this.partial.data = ends || mayEnd ? "" : rest.replace(this.indent, "");
    if (complete) this.closed = true;
    return complete ? "" : rest;
  }

  // Adds lines. Elements of bounded size keep the layout of those before as it is.
  flush(lines) {
    for (let at = 0; at < lines.length; ) {
      if (this.lines % CODE_LINES === 0) {
        this.chunk = document.createElement("span");
        this.chunk.append("");
        this.partial.before(this.chunk);
      }
      const room = CODE_LINES - (this.lines % CODE_LINES);
      const some = lines.slice(at, at + room);
      this.chunk.firstChild.appendData(some.map((line) => `${line.replace(this.indent, "")}\n`).join(""));
      this.lines += some.length;
      at += some.length;
    }
  }
}

function block(text, env) {
  const box = document.createElement("div");
  box.className = "block";
  const show = () => box.replaceChildren(render(text, env));
  show();
  if (box.querySelector("code.waiting")) load().then(show, () => {});
  return box;
}

// The position of line `line` in `text`.
function offsetOf(text, line) {
  let at = 0;
  for (; line > 0; line--) at = text.indexOf("\n", at) + 1;
  return at;
}

function isFence(line, markup) {
  const end = line.trim();
  return /^ {0,3}\S/.test(line) && end.length >= markup.length && !end.replaceAll(markup[0], "");
}

function isClosed({ map, markup }, lines) {
  const [first, end] = map;
  const last = lines.slice(offsetOf(lines, end - 1)).split("\n", 1)[0];
  return end - first > 1 && isFence(last, markup);
}
