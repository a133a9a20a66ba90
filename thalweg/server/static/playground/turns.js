// The turns of a conversation on the page: what the user wrote, and an answer with its thought, text, calls and facts.

import { CodeBlock, MarkdownView } from "./markdown.js";
import { copy, iconButton, make, makeButton, prettyJson } from "./page.js";
import { TokensView } from "./tokens.js";

const ENDINGS = { length: "cut at max tokens", stopped: "stopped by you", abort: "aborted", broken: "the answer broke off" };
const SHARE = 4;  // of the time one rendering takes, until the next

// ‹ 2/3 › between the versions of a message.
function versionSwitch(node, app) {
  const all = app.versions(node), at = all.indexOf(node.id);
  const box = make("span", "versions");
  box.hidden = all.length < 2;
  const previous = iconButton("previous", "Previous version", () => app.pick(node, -1));
  const next = iconButton("next", "Next version", () => app.pick(node, 1));
  previous.disabled = at === 0;
  next.disabled = at === all.length - 1;
  box.append(previous, make("span", "", `${at + 1}/${all.length}`), next);
  return box;
}

function newTurn(node, className, heading) {
  const element = make("article", "turn " + className, make("h3", className === "you" ? "sr" : "", heading));
  element.dataset.id = node.id;
  return element;
}

export class UserTurn {
  // app: what the buttons do, see playground.js.
  constructor(node, app) {
    this.node = node;
    this.app = app;
    this.element = newTurn(node, "you", "You");
    this.text = make("div", "text", node.content);
    const copying = iconButton("copy", "Copy", () => copy(node.content, copying));
    this.bar = make("div", "bar-of-turn", versionSwitch(node, app), copying, iconButton("edit", "Edit", () => this.edit()));
    this.element.append(this.text, this.bar);
  }

  edit() {
    if (!this.text.isConnected) { this.element.querySelector("textarea").focus(); return; }  // it is being edited
    const form = make("form", "edit"), field = make("textarea");
    field.value = this.node.content;
    field.setAttribute("aria-label", "Edit the message");
    const grow = () => { field.style.height = "auto"; field.style.height = field.scrollHeight + 2 + "px"; };
    const close = () => { form.replaceWith(this.text); this.bar.hidden = false; this.bar.querySelector("[aria-label=Edit]").focus(); };
    const send = make("button", "primary", "Send");
    send.type = "submit";
    form.append(field, make("div", "actions", makeButton("Cancel", "quiet", close), send));
    field.addEventListener("input", grow);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.app.edit(this.node, field.value.trim());
    });
    this.text.replaceWith(form);
    this.bar.hidden = true;
    grow();
    field.focus();
  }
}

export class AnswerTurn {
  #frame = 0;
  #rested = 0;  // time of the next rendering
  #calls = [];  // {box, shown, label, field} beside node.calls

  // results: messages with the results of its calls, if they were given.
  constructor(node, app, results = null) {
    this.node = node;
    this.app = app;
    this.results = results;
    this.element = newTurn(node, "model-turn", node.model);
    this.body = make("div", "text");
    this.markdown = new MarkdownView(this.body);
    this.element.append(this.body);
    if (node.done) this.finish();
    else {
      this.element.setAttribute("aria-busy", "true");
      this.update();
    }
  }

  // Renders what came, at most once a frame and never more than a share of the time.
  schedule(rendered) {
    if (this.#frame) return;
    this.#frame = requestAnimationFrame((now) => {
      this.#frame = 0;
      if (this.node.done) return;
      if (now < this.#rested) { this.schedule(rendered); return; }
      const began = performance.now();
      rendered(() => this.update());
      const ended = performance.now();
      this.#rested = ended + SHARE * (ended - began) - 16;
    });
  }

  update() {
    const { node } = this, done = Boolean(node.done);
    this.element.classList.toggle("waiting", !done && !node.content && !node.reasoning && !node.calls.length);
    if (node.reasoning) this.#think(done);
    const pretty = done && node.json ? prettyJson(node.content) : "";
    if (pretty) this.body.replaceChildren(new CodeBlock(pretty, "json").element);
    else this.markdown.update(node.content, done);
    for (const [i, call] of node.calls.entries()) this.#call(call, i);
    if (node.logprobs && node.logprobs.length) this.#showTokens();
  }

  #think(done) {
    const { node } = this;
    if (!this.thought) {
      this.thought = make("details", "thought");
      this.summary = make("summary");
      this.thoughtBox = make("div", "thought-text");
      this.thought.append(this.summary, this.thoughtBox);
      this.thinking = new MarkdownView(this.thoughtBox);
      this.thought.open = !done;
      this.element.insertBefore(this.thought, this.body);
    }
    if (this.folded) return;
    const { scrollHeight, scrollTop, clientHeight } = this.thoughtBox;
    this.folded = done || Boolean(node.content || node.calls.length);
    this.thinking.update(node.reasoning, this.folded);
    if (scrollHeight - scrollTop - clientHeight < 30) this.thoughtBox.scrollTop = this.thoughtBox.scrollHeight;
    if (this.folded) this.thought.open = false;
    this.summary.textContent = this.folded ? `Thought for ${(node.thoughtSeconds || 0).toFixed(1)} s` : "Thinking…";
  }

  #call(call, i) {
    if (!this.#calls[i]) {
      const box = make("section", "call"), shown = make("pre", "", make("code"));
      box.setAttribute("aria-label", `Call of ${call.name}`);
      shown.tabIndex = 0;
      shown.setAttribute("aria-label", `Arguments of ${call.name}`);
      box.append(make("h4", "", call.name), shown);
      if (!this.form) {
        this.form = make("form", "calls");
        this.body.after(this.form);
      }
      this.form.append(box);
      this.#calls[i] = { box, shown: shown.firstChild };
    }
    this.#calls[i].shown.textContent = (this.node.done && prettyJson(call.arguments)) || call.arguments;
  }

  #showTokens() {
    if (!this.tokens) {
      this.tokens = new TokensView(this.node.logprobs);
      this.body.after(this.tokens.element);
      this.showTokens(true);
    }
    this.tokens.update();
  }

  showTokens(on) {
    this.tokens.element.hidden = !on;
    this.body.hidden = on;
    if (this.switch) this.switch.setAttribute("aria-pressed", on);
  }

  // The answer has ended: its last state, its facts, and what one can do with it.
  finish() {
    const { node, app } = this;
    cancelAnimationFrame(this.#frame);
    this.update();
    this.element.setAttribute("aria-busy", "false");
    for (const [i, call] of node.calls.entries()) if (!prettyJson(call.arguments)) this.#calls[i].box.append(make("p", "problem", "The arguments are not valid JSON."));
    for (const name of node.unfinished || []) this.element.append(make("p", "problem", `The call of ${name} was not finished and is left out.`));
    if (node.error) this.#showError();
    if (!node.error || node.content || node.reasoning || node.calls.length) this.#showBar();
    else if (app.versions(node).length > 1) this.element.append(make("div", "bar-of-turn", versionSwitch(node, app)));
    if (this.results) for (const [i, result] of this.results.entries()) this.#showResult(i, result.content);
    else if (node.calls.length && !node.children.length) this.#askResults();
  }

  #showBar() {
    const { node, app } = this;
    const copying = iconButton("copy", "Copy answer", () => copy(node.content || JSON.stringify(node.calls, null, 2), copying));
    this.bar = make("div", "bar-of-turn", versionSwitch(node, app), copying, iconButton("again", "Regenerate", () => app.regenerate(node)));
    if (this.tokens) {
      this.switch = iconButton("tokens", "Tokens", () => this.showTokens(this.tokens.element.hidden), "act switchable");
      this.switch.setAttribute("aria-pressed", !this.tokens.element.hidden);
      this.bar.append(this.switch);
    }
    this.bar.append(make("p", "meta", ...this.#facts().map((fact) => make("span", "", fact))));
    this.element.append(this.bar);
  }

  #facts() {
    const { usage, chunks, seconds, ttft, finish, json, content, error } = this.node;
    const tokens = usage ? usage.completion_tokens : chunks;
    const facts = [`${usage ? "" : "about "}${tokens} token${tokens === 1 ? "" : "s"}`];
    if (seconds > 0 && tokens > 1) facts.push(`${((tokens - 1) / seconds).toFixed(0)} tok/s`);
    if (ttft) facts.push(`TTFT ${ttft < 10_000 ? Math.round(ttft) + " ms" : (ttft / 1000).toFixed(1) + " s"}`);
    const cached = usage && usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
    if (usage) facts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
    if (ENDINGS[finish] && !error) facts.push(ENDINGS[finish]);
    if (json && content && !prettyJson(content)) facts.push("not valid JSON");
    return facts;
  }

  #showError() {
    const { title, message, is_long } = this.node.error, { app, node } = this;
    const box = make("div", "wrong", make("strong", "", title), make("p", "", message));
    box.setAttribute("role", "alert");
    // the same again would be as long
    const button = is_long ? ["Edit", () => app.editQuestion(node)] : ["Try again", () => app.retry(node)];
    box.append(makeButton(button[0], "quiet", button[1]));
    this.element.append(box);
  }

  // A field for the result of each call, and one button for all.
  #askResults() {
    this.form.setAttribute("aria-label", "Results of the calls");
    for (const [i, call] of this.node.calls.entries()) {
      const shown = this.#calls[i];
      shown.field = make("textarea");
      shown.field.rows = 1;
      shown.field.placeholder = "What does it return?";
      shown.field.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        const empty = this.#calls.slice(i + 1).find((other) => !other.field.value);
        if (empty) empty.field.focus();
        else this.form.requestSubmit();
      });
      shown.label = make("label", "", `Result of ${call.name}`, shown.field);
      shown.box.append(shown.label);
    }
    const send = make("button", "primary", this.node.calls.length > 1 ? "Send the results" : "Send the result");
    send.type = "submit";
    this.form.append(send);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      send.remove();
      const results = this.node.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: this.#calls[i].field.value }));
      this.app.giveResults(this.node, results);
    });
  }

  #showResult(i, text) {
    const { box } = this.#calls[i], pre = make("pre", "result", make("code", "", text));
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", `Result of ${this.node.calls[i].name}`);
    box.append(make("p", "caption", "Result"), pre);
  }

  // The calls wait for their results.
  get is_asking() { return this.#calls.some((call) => call.field) && this.form.isConnected; }

  focusResult() {
    const fields = this.#calls.map((call) => call.field);
    (fields.find((field) => !field.value) || fields[0]).focus();
  }
}
