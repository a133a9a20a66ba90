// What every part of the page uses. Text from the model, the server or the user only ever becomes text nodes and values, never markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function makeButton(text, className, action) {
  const button = make("button", className, text);
  button.type = "button";
  button.addEventListener("click", () => action(button));
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
    const area = make("textarea", "sr", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1200);
}

// ---- JSON that a person writes ----

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
