// Turns markdown into nodes. The text is a model's and may be hostile: HTML in it is text, and
// DOMPurify lets only the elements and attributes below through, none of which loads anything.

import MarkdownIt from "../vendor/markdown-it.esm.min.mjs";
import DOMPurify from "../vendor/purify.es.mjs";
import { maths } from "./maths.js";

const ELEMENTS = [
  ..."p h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong s a br hr".split(" "),
  ..."table thead tbody tr th td".split(" "),
  ..."span math semantics annotation mrow mi mn mo ms mtext mspace msup msub msubsup mfrac".split(" "),
  ..."msqrt mroot mover munder munderover mtable mtr mtd mstyle mpadded mphantom menclose".split(" "),
  ..."mmultiscripts mprescripts merror mlabeledtr".split(" "),
];
const ATTRIBUTES = [
  ..."class href rel target start title".split(" "),
  ..."xmlns display encoding mathvariant stretchy fence separator accent accentunder".split(" "),
  ..."lspace rspace width height depth voffset linethickness notation columnalign".split(" "),
  ..."rowspacing columnspacing columnlines rowlines scriptlevel displaystyle".split(" "),
  ..."minsize maxsize mathcolor mathbackground movablelimits symmetric".split(" "),
];
const PURIFY = {
  ALLOWED_TAGS: ELEMENTS,
  ALLOWED_ATTR: ATTRIBUTES,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  // Links lead to other sites only: one of this server would be opened with its rights.
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ATTRIBUTES.filter((name) => name !== "href"),
  RETURN_DOM_FRAGMENT: true,
};

export const parser = new MarkdownIt({ html: false, linkify: true }).use(maths);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
const { rules } = parser.renderer;
const plain = (tokens, index, options, env, self) => self.renderToken(tokens, index, options);

// Links open in a tab of their own, and the page that they lead to learns nothing of this one.
rules.link_open = (tokens, index, ...rest) => {
  tokens[index].attrSet("rel", "noopener noreferrer nofollow");
  tokens[index].attrSet("target", "_blank");
  return plain(tokens, index, ...rest);
};

// An image becomes its text: loading it would tell its host who reads this, and what.
rules.image = (tokens, index) => {
  const { content } = tokens[index];
  const source = tokens[index].attrGet("src");
  return `<span class="image">${parser.utils.escapeHtml(`[image: ${content || source}]`)}</span>`;
};

// The policy forbids style attributes; classes align the cells.
rules.th_open = rules.td_open = (tokens, index, ...rest) => {
  const [, side] = /text-align:(\w+)/.exec(tokens[index].attrGet("style") ?? "") ?? [];
  tokens[index].attrs = side ? [["class", side]] : null;
  return plain(tokens, index, ...rest);
};

// Returns a fragment with the blocks of the markdown `text`. `env` has the link definitions.
export function render(text, env = {}) {
  const fragment = DOMPurify.sanitize(parser.render(text, env), PURIFY);
  for (const table of fragment.querySelectorAll("table")) scrollable(table);
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.firstElementChild;
    const language = /^language-(.*)/.exec(code?.className ?? "")?.[1] ?? "";
    const box = codeBox(language);
    pre.replaceWith(box);
    box.querySelector("pre").replaceChildren(...pre.childNodes);
  }
  return fragment;
}

// A table that is wider than the page scrolls by itself, also by keyboard.
function scrollable(table) {
  const box = document.createElement("div");
  box.className = "wide-table";
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Table");
  table.replaceWith(box);
  box.append(table);
}

// The frame of a code block: its language, a button that copies, and an empty <pre>.
export function codeBox(language) {
  const box = document.createElement("div");
  box.className = "code";
  const head = document.createElement("div");
  const name = document.createElement("span");
  name.textContent = language.slice(0, 40) || "code";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "small";
  copy.dataset.act = "copy-code";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy the code");
  head.append(name, copy);
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", `Code: ${name.textContent}`);
  box.append(head, pre);
  return box;
}
