// Conversations, kept in this browser. Each is a tree of messages: editing a message or asking again adds a version beside the first.

import { recall } from "./page.js";

const PREFIX = "thalweg.conversation.";
const TITLE = 60;  // characters
const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);  // randomUUID needs TLS

export class Conversation {
  // nodes: id → {id, parent, children, picked, role, …}. The root has no role. picked: id of the child that is shown.
  // tools: those that an example brought; the user's own are settings.
  constructor({ id = newId(), title = "", updated = Date.now(), nodes = { root: { id: "root", children: [] } }, tools = [] } = {}) {
    Object.assign(this, { id, title, updated, nodes, tools });
  }

  add(parent, fields) {
    const node = { id: newId(), parent, children: [], ...fields };
    this.nodes[node.id] = node;
    this.nodes[parent].children.push(node.id);
    this.nodes[parent].picked = node.id;
    this.updated = Date.now();
    return node;
  }

  // Takes a message and all behind it out of the tree.
  remove(node) {
    const siblings = this.nodes[node.parent].children;
    siblings.splice(siblings.indexOf(node.id), 1);
    if (this.nodes[node.parent].picked === node.id) this.nodes[node.parent].picked = siblings.at(-1);
    const forget = (id) => { for (const child of this.nodes[id].children) forget(child); delete this.nodes[id]; };
    forget(node.id);
  }

  // The messages that are shown, from the first to the last.
  path(upTo = "") {
    const nodes = [];
    for (let node = this.nodes.root; node.picked && node.id !== upTo; nodes.push(node)) node = this.nodes[node.picked];
    return nodes;
  }

  get last() { return this.path().at(-1); }
  get is_empty() { return !this.nodes.root.children.length; }

  versions(node) { return this.nodes[node.parent].children; }

  // Shows the version `step` places further.
  pick(node, step) {
    const versions = this.versions(node), id = versions[versions.indexOf(node.id) + step];
    this.nodes[node.parent].picked = id;
    return this.nodes[id];
  }

  get name() {
    const first = this.nodes[this.nodes.root.picked];
    const text = this.title || (first ? first.content.trim().replace(/\s+/g, " ") : "");
    return text.length > TITLE ? text.slice(0, TITLE) + "…" : text || "New conversation";
  }

  // The messages as the API wants them, up to and with the node `upTo`. Thoughts go along with calls only.
  messages(upTo) {
    return this.path(upTo).flatMap((node) => {
      if (node.role === "user") return [{ role: "user", content: node.content }];
      if (node.role === "tool") return node.results;
      if (!node.content && !node.calls.length && node.error) return [];  // nothing came
      const message = { role: "assistant", content: node.content };
      if (node.calls.length) {
        if (node.reasoning) message.reasoning_content = node.reasoning;
        message.tool_calls = node.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      }
      return [message];
    });
  }
}

export class Store {
  #loaded = new Map();  // id → Conversation: one object for each, however often it is opened

  // {id, name, updated} of each kept conversation, the newest first.
  list() {
    const entries = [];
    try {
      for (const key of Object.keys(localStorage)) {
        if (!key.startsWith(PREFIX)) continue;
        const conversation = this.load(key.slice(PREFIX.length));
        if (conversation) entries.push(conversation);
      }
    } catch { /* storage is forbidden: there are none */ }
    return entries.sort((a, b) => b.updated - a.updated);
  }

  // Null where there is none, or it cannot be read.
  load(id) {
    if (this.#loaded.has(id)) return this.#loaded.get(id);
    try {
      const data = JSON.parse(recall("localStorage", "conversation." + id));
      if (!data || !data.nodes.root) return null;
      for (const node of Object.values(data.nodes)) if (node.role === "assistant") node.done = true;  // an answer that was under way has ended
      this.#loaded.set(id, new Conversation(data));
      return this.#loaded.get(id);
    } catch {
      return null;
    }
  }

  // Throws where the browser keeps nothing more. Log-probabilities are too large to be kept.
  save(conversation) {
    this.#loaded.set(conversation.id, conversation);
    const text = JSON.stringify(conversation, (key, value) => (key === "logprobs" ? undefined : value));
    localStorage.setItem(PREFIX + conversation.id, text);
  }

  remove(id) {
    this.#loaded.delete(id);
    try { localStorage.removeItem(PREFIX + id); } catch { /* nothing was kept */ }
  }

  // Another tab changed a conversation: it is read again when it is opened.
  forget(id) { this.#loaded.delete(id); }
}
