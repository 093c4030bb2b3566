// The tokens of a reply with their probabilities. The arrow keys, the pointer and clicks choose a
// token, whose alternatives are shown below.

import { make } from "./dom.js";

const SOME = 300; // tokens added in one frame
const LEVELS = [0.9, 0.6, 0.3, 0.1]; // lower bounds of the classes p0 to p3; below is p4

const probability = (logprob) => Math.exp(logprob);
const percent = (logprob) => `${(100 * probability(logprob)).toFixed(1)} %`;
// Blanks and line breaks are made visible.
const visible = (token) => JSON.stringify(token).slice(1, -1).replaceAll(" ", "␣") || "∅";

export function tokenView(tokens) {
  const box = make("div", "tokens");
  const text = make("div", "token-text");
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "Tokens; the arrow keys choose one");
  const details = make("div", "alternatives");
  details.setAttribute("role", "status");
  box.append(text, details);
  let chosen = -1;

  function choose(at) {
    if (at < 0 || at >= text.children.length || at === chosen) return;
    text.children[chosen]?.classList.remove("chosen");
    chosen = at;
    text.children[at].classList.add("chosen");
    details.replaceChildren(...alternatives(tokens[at]));
  }

  const at = (event) => [...text.children].indexOf(event.target.closest("span"));
  text.addEventListener("pointerover", (event) => choose(at(event)));
  text.addEventListener("click", (event) => choose(at(event)));
  text.addEventListener("focus", () => chosen < 0 && choose(0));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen + step);
    text.children[chosen]?.scrollIntoView({ block: "nearest" });
  });

  function fill(from) {
    text.append(...tokens.slice(from, from + SOME).map(tokenSpan));
    if (from + SOME < tokens.length) requestAnimationFrame(() => fill(from + SOME));
  }
  fill(0);
  return box;
}

function tokenSpan({ token, logprob }) {
  const level = LEVELS.findIndex((bound) => probability(logprob) >= bound);
  return make("span", `p${level < 0 ? LEVELS.length : level}`, token);
}

function alternatives({ token, logprob, top }) {
  const list = make("ul");
  const pairs = top.flatMap((each, at) => (at % 2 ? [] : [[each, top[at + 1]]]));
  const isListed = pairs.some(([other]) => other === token);
  for (const [other, value] of isListed ? pairs : [[token, logprob], ...pairs]) {
    const item = make("li", other === token ? "taken" : "");
    const bar = document.createElement("meter");
    bar.value = probability(value);
    bar.setAttribute("aria-hidden", "true");
    item.append(make("code", "", visible(other)), bar, percent(value));
    list.append(item);
  }
  return [list];
}
