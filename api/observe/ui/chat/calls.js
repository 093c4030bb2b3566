// Calls of functions in a reply, and the form for their results.

import { make } from "./dom.js";

// A box with a call. Its `add` appends to the name and the arguments.
export function callBox(parent) {
  const box = make("div", "call");
  const name = make("code", "");
  const title = make("p", "");
  title.append("Calls ", name);
  const text = make("pre", "");
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "Arguments");
  text.append("");
  box.append(title, text);
  parent.append(box);
  return {
    add(more, pieces) {
      name.append(more);
      text.firstChild.appendData(pieces);
    },
  };
}

// A field for the result of each call. The chat reads the fields when the form is submitted.
export function resultForm(calls) {
  const form = make("form", "results");
  form.setAttribute("aria-label", "Results of the calls");
  for (const { name } of calls) {
    const field = document.createElement("textarea");
    field.rows = 2;
    field.required = true;
    field.placeholder = `Result of ${name}`;
    field.setAttribute("aria-label", field.placeholder);
    form.append(field);
  }
  form.append(make("button", "small", calls.length === 1 ? "Send the result" : "Send the results"));
  return form;
}
