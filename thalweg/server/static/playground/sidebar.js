// The list of conversations: open, rename, delete.

import { $, iconButton, make, makeButton } from "./page.js";

export class Sidebar {
  // app: open(id), rename(id, title), remove(id).
  constructor(app) { this.app = app; }

  // conversations: {id, name}, the newest first. busy: ids of those with an answer under way.
  show(conversations, current, busy) {
    $("no-conversations").hidden = conversations.length > 0;
    $("conversations").replaceChildren(...conversations.map(({ id, name }) => {
      const item = make("li", id === current ? "current" : "");
      item.dataset.id = id;
      const open = makeButton(name, "open", () => this.app.open(id));
      open.title = name;
      if (id === current) open.setAttribute("aria-current", "true");
      if (busy.has(id)) open.prepend(make("span", "busy"));
      item.append(open, iconButton("edit", `Rename ${name}`, () => this.#rename(item, id, name)), iconButton("delete", `Delete ${name}`, () => this.#askRemove(item, id, name)));
      return item;
    }));
  }

  #rename(item, id, name) {
    const form = make("form"), field = make("input");
    field.value = name;
    field.maxLength = 200;
    field.setAttribute("aria-label", "Name of the conversation");
    let done = false;
    const end = (title) => { if (!done) { done = true; this.app.rename(id, title); this.#focus(id); } };
    field.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); end(null); } });
    field.addEventListener("blur", () => end(field.value.trim()));
    form.addEventListener("submit", (event) => { event.preventDefault(); end(field.value.trim()); });
    form.append(field);
    item.replaceChildren(form);
    field.select();
  }

  #askRemove(item, id, name) {
    const remove = makeButton("Delete", "danger", () => this.app.remove(id));
    const keep = makeButton("Keep", "quiet", () => { this.app.rename(id, null); this.#focus(id); });
    const box = make("div", "confirm", make("span", "", "Delete?"), remove, keep);
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `Delete ${name}?`);
    box.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); keep.click(); } });
    item.replaceChildren(box);
    remove.focus();
  }

  #focus(id) {
    const item = $("conversations").querySelector(`[data-id="${id}"] .open`);
    if (item) item.focus();
  }
}
