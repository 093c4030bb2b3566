// Copies texts, offers them as files, and tells screen readers what has happened.

const element = (id) => document.getElementById(id);

export function announce(text) {
  element("announce").textContent = "";
  // A text that is equal to the one before is read out only if it is a change.
  requestAnimationFrame(() => (element("announce").textContent = text));
}

// Copies `text`; `button` says so for a moment.
export async function copy(text, button) {
  const done = await write(text);
  const label = button.textContent;
  if (button.dataset.said) return;
  button.dataset.said = "yes";
  button.textContent = done ? "Copied" : "Not copied";
  announce(button.textContent);
  setTimeout(() => {
    button.textContent = label;
    delete button.dataset.said;
  }, 1500);
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return writeBySelection(text); // not on https or localhost, or not allowed
  }
}

function writeBySelection(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "hidden";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
