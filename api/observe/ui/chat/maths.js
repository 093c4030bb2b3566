// A markdown-it plugin for TeX between $…$, $$…$$, \(…\) and \[…\], set by KaTeX as MathML.
// KaTeX is loaded when the first formula appears.

const OPENERS = [
  { open: "$$", close: "$$", display: true },
  { open: "\\[", close: "\\]", display: true },
  { open: "\\(", close: "\\)", display: false },
  { open: "$", close: "$", display: false },
];
const LONGEST = 3000; // characters of one formula; a longer one is shown as text
const WORK = { maxExpand: 200, maxSize: 20 }; // limits of macro expansions, and of sizes in em

let katex; // undefined until loaded
let loading;

// Loads KaTeX; resolves when formulas can be set.
export function load() {
  // The file is a script, not a module: it sets a global variable.
  loading ??= import("../vendor/katex.min.js").then(() => (katex = globalThis.katex));
  return loading;
}

function typeset(markdown, { content, markup, meta }) {
  const source = `${meta.open}${content}${meta.close}`;
  const raw = `<code class="tex">${markdown.utils.escapeHtml(source)}</code>`;
  if (markup === "unclosed" || content.length > LONGEST) return raw;
  // The caller renders again once KaTeX is loaded.
  if (!katex) return raw.replace("tex", "tex waiting");
  try {
    return katex.renderToString(content, {
      ...WORK,
      output: "mathml",
      displayMode: meta.display,
      strict: "ignore",
      trust: false,
    });
  } catch {
    return raw; // it is no TeX that KaTeX knows
  }
}

function opener(text, at) {
  return OPENERS.find(({ open }) => text.startsWith(open, at));
}

// Pandoc's rule, which leaves sums of money alone: no space after the first dollar or before the
// last, and no digit after the last.
function isMoney(text, start, end) {
  return /\s/.test(text[start]) || /\s/.test(text[end - 1]) || /\d/.test(text[end + 1] ?? "");
}

function inline(state, silent) {
  const kind = opener(state.src, state.pos);
  if (!kind) return false;
  const start = state.pos + kind.open.length;
  let end = state.src.indexOf(kind.close, start);
  while (end > 0 && kind.close.startsWith("$") && state.src[end - 1] === "\\") {
    end = state.src.indexOf(kind.close, end + 1);
  }
  if (end <= start || end > state.posMax) return false;
  if (kind.open === "$" && isMoney(state.src, start, end)) return false;
  if (!silent) {
    const token = state.push("maths", "", 0);
    token.content = state.src.slice(start, end);
    token.meta = kind;
  }
  state.pos = end + kind.close.length;
  return true;
}

// A formula on lines of its own. Its lines may look like lists, so the rule precedes all others.
// One that is not closed yet extends to the end, because the rest of it may still arrive.
function block(state, startLine, endLine, silent) {
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const kind = opener(line(startLine), 0);
  if (!kind?.display || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const found = [];
  for (let at = startLine; at < endLine; at++) {
    const text = at === startLine ? line(at).slice(kind.open.length) : line(at);
    const end = text.indexOf(kind.close);
    if (end >= 0 && text.slice(end + kind.close.length).trim()) return false;
    if (end < 0 && !text.trim() && at > startLine) return false;
    found.push(end < 0 ? text : text.slice(0, end));
    if (end < 0 && at < endLine - 1) continue;
    if (silent) return true;
    const token = state.push("maths_block", "", 0);
    token.content = found.join("\n");
    token.markup = end < 0 ? "unclosed" : "";
    token.meta = end < 0 ? { ...kind, close: "" } : kind;
    token.map = [startLine, at + 1];
    state.line = at + 1;
    return true;
  }
  return false;
}

export function maths(markdown) {
  markdown.inline.ruler.before("escape", "maths", inline);
  const alt = ["paragraph", "reference", "blockquote", "list"];
  markdown.block.ruler.before("table", "maths_block", block, { alt });
  const { rules } = markdown.renderer;
  rules.maths = (tokens, index) => typeset(markdown, tokens[index]);
  rules.maths_block = (tokens, index) => `<p>${typeset(markdown, tokens[index])}</p>\n`;
}
