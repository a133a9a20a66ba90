// What every part of the page uses. Text from the model, the server or the user becomes text nodes and values;
// only markdown.js makes elements of it, through DOMPurify.

export const $ = (id) => document.getElementById(id);

export function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

export function icon(name) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg"), use = document.createElementNS(namespace, "use");
  svg.setAttribute("class", "i");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", "#i-" + name);
  svg.append(use);
  return svg;
}

export function makeButton(text, className, action) {
  const button = make("button", className, text);
  button.type = "button";
  button.addEventListener("click", () => action(button));
  return button;
}

// A button with an icon; its label is its name and its tooltip.
export function iconButton(name, label, action, className = "act") {
  const button = makeButton("", className, action);
  button.append(icon(name));
  button.setAttribute("aria-label", label);
  button.title = label;
  return button;
}

// ---- remembered between visits; a browser that forbids storage just forgets ----

export function recall(store, name) {
  try { return window[store].getItem("thalweg." + name); } catch { return null; }
}
export function remember(store, name, value) {
  try { window[store].setItem("thalweg." + name, value); } catch { /* private window: nothing is kept */ }
}

// ---- said to screen readers, and copied ----

export const say = (text) => { $("status").textContent = text; };

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that is not served from localhost or over TLS has no clipboard
    const area = make("textarea", "sr");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.classList.add("copied");
  button.querySelector("use").setAttribute("href", "#i-check");
  say("Copied.");
  clearTimeout(button.copied);
  button.copied = setTimeout(() => {
    button.classList.remove("copied");
    button.querySelector("use").setAttribute("href", "#i-copy");
  }, 1500);
}

// ---- JSON ----

// The JSON in `text` with line breaks, "" where it is none.
export function prettyJson(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return ""; }
}

// The object in `text`, or what is wrong with it: {value} or {problem}.
export function readObject(text, what) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return { problem: `${what} is not JSON: ${error.message}` };
  }
  const object = value !== null && typeof value === "object" && !Array.isArray(value);
  return object ? { value } : { problem: `${what} must be a JSON object, { … }` };
}

// Makes a field invalid with a reason that everybody can read, or valid again with "".
export function complain(field, problem) {
  field.setCustomValidity(problem);
  field.setAttribute("aria-invalid", Boolean(problem));
  $(field.id + "-problem").textContent = problem;
}
