// Makes elements.

export function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

// A button whose `act` says what a click on it does.
export function button(act, text, label = text) {
  const node = make("button", "small", text);
  node.type = "button";
  node.dataset.act = act;
  if (label !== text) node.setAttribute("aria-label", label);
  return node;
}
