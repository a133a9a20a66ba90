// One answer on the page: thought, text, tool calls, and the form for their results. Text nodes grow as it comes; blocks are set at its end.

import { copy, make, makeButton, say } from "./page.js";

const ENDINGS = { length: "cut at max tokens", stopped: "stopped by you", abort: "aborted" };

export class Answer {
  constructor(log, model, json) {
    this.element = make("article", "turn model-turn waiting");
    this.element.setAttribute("aria-busy", "true");
    this.body = make("div", "text");
    this.text = this.body.appendChild(document.createTextNode(""));
    this.element.append(make("h3", "", model), this.body);
    this.json = json;          // the answer was asked for as JSON
    this.calls = [];           // {id, name, arguments, box, shown} in the order of the server's index
    this.started = performance.now();
    this.chunks = 0;
    log.append(this.element);
  }

  // The delta of one event.
  take({ reasoning_content: thought, content, tool_calls: calls }) {
    if (!thought && !content && !calls) return;
    if (!this.first) this.first = performance.now();
    this.last = performance.now();
    this.chunks += 1;
    this.element.classList.remove("waiting");
    if (thought) this.#think(thought);
    if (content || calls) this.#fold();
    if (content) this.text.appendData(content);
    for (const call of calls || []) this.#call(call);
  }

  #think(text) {
    if (!this.thought) {
      this.thought = make("details", "thought");
      this.thought.open = true;
      this.summary = make("summary", "", "Thinking…");
      this.thoughtBox = make("div");
      this.thinking = this.thoughtBox.appendChild(document.createTextNode(""));
      this.thought.append(this.summary, this.thoughtBox);
      this.element.insertBefore(this.thought, this.body);
    }
    this.thinking.appendData(text);
    this.thoughtBox.scrollTop = this.thoughtBox.scrollHeight;
  }

  #fold() {
    if (!this.thought || this.folded) return;
    this.folded = true;
    this.thought.open = false;
    this.summary.textContent = `Thought for ${((performance.now() - this.first) / 1000).toFixed(1)} s`;
  }

  #call({ index, id, function: { name, arguments: more } }) {
    let call = this.calls[index];
    if (!call) {
      call = this.calls[index] = { id, name, arguments: "", box: make("section", "call") };
      call.box.setAttribute("aria-label", `Call of ${name}`);
      const shown = make("pre");
      shown.tabIndex = 0;
      shown.setAttribute("aria-label", `Arguments of ${name}`);
      call.shown = shown.appendChild(document.createTextNode(""));
      call.box.append(make("h4", "", name), shown);
      if (!this.form) this.element.append(this.form = make("form", "calls"));
      this.form.append(call.box);
    }
    call.arguments += more || "";
    call.shown.data = call.arguments;
  }

  // What the next turn sends back. Reasoning goes along with calls only: it belongs to the same train of thought.
  get message() {
    const message = { role: "assistant", content: this.text.data };
    if (!this.calls.length) return message;
    if (this.thought) message.reasoning_content = this.thinking.data;
    message.tool_calls = this.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return message;
  }

  // finish: the server's reason, or "stopped", or words of its own. again: called to ask once more.
  end(finish, usage, again) {
    this.#fold();
    this.element.setAttribute("aria-busy", "false");
    this.element.classList.remove("waiting");
    const whole = finish === "stop" || finish === "tool_calls";
    this.#settleCalls(whole);
    const pretty = this.json && this.text.data ? prettyJson(this.text.data) : "";
    if (pretty) this.body.replaceChildren(block(pretty, "The answer as JSON"));
    else setBlocks(this.body, this.text.data);
    const facts = this.#facts(usage);
    if (!whole) facts.push(ENDINGS[finish] || finish);
    if (this.json && this.text.data && !pretty) facts.push("not valid JSON");
    const meta = make("div", "meta"), buttons = make("span", "buttons");
    meta.append(...facts.map((fact) => make("span", "", fact)));
    const copied = () => this.text.data || JSON.stringify(this.message.tool_calls || [], null, 2);
    buttons.append(makeButton("Copy", "", (button) => copy(copied(), button)), makeButton("Try again", "", again));
    meta.append(buttons);
    this.element.append(meta);
    const names = this.calls.map((call) => call.name).join(", ");
    if (names) say(`The model calls ${names}. Type what it gives.`);
    else say(`Answer ${finish === "stopped" ? "stopped" : "finished"}: ${facts[0]}.`);
  }

  #settleCalls(whole) {
    for (const call of this.calls) {
      const pretty = prettyJson(call.arguments);
      if (pretty) call.shown.data = pretty;
      if (!whole) call.box.append(make("p", "problem", "This call was not finished and is left out."));
      else if (!pretty) call.box.append(make("p", "problem", "The arguments are not valid JSON."));
    }
    if (!whole) this.calls = [];
  }

  #facts(usage) {
    const tokens = usage ? usage.completion_tokens : this.chunks;
    const seconds = this.first ? (this.last - this.first) / 1000 : 0;
    const facts = [`${usage ? "" : "about "}${tokens} token${tokens === 1 ? "" : "s"}`];
    const seen = this.thought || this.text.data || !this.calls.length;  // a call's first tokens are held back: no speed from it alone
    if (seen && seconds > 0 && tokens > 1) facts.push(`${((tokens - 1) / seconds).toFixed(0)} tok/s`);
    if (this.first) facts.push(`first after ${Math.round(this.first - this.started)} ms`);
    const cached = usage && usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
    if (cached) facts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
    return facts;
  }

  // A field for the result of each call, and one button for all. done: gets the tool messages.
  askResults(done) {
    this.form.setAttribute("aria-label", "Results of the calls");
    for (const [i, call] of this.calls.entries()) {
      call.label = make("label", "", `Result of ${call.name}`);
      call.field = call.label.appendChild(make("textarea"));
      call.field.rows = 1;
      call.field.placeholder = "What does it give?";
      call.field.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        const empty = this.calls.slice(i + 1).find((other) => !other.field.value);
        if (empty) empty.field.focus();
        else this.form.requestSubmit();
      });
      call.box.append(call.label);
    }
    const send = make("button", "primary", this.calls.length > 1 ? "Send the results" : "Send the result");
    send.type = "submit";
    this.form.append(send);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      send.remove();
      done(this.calls.map((call) => this.#settleResult(call)));
    });
  }

  #settleResult(call) {
    const shown = block(call.field.value, `Result of ${call.name}`);
    shown.classList.add("result");
    call.label.replaceWith(make("p", "caption", "Result"), shown);
    return { role: "tool", tool_call_id: call.id, content: call.field.value };
  }

  focusResult() {
    (this.calls.find((call) => !call.field.value) || this.calls[0]).field.focus();
  }
}

function block(text, label) {
  const pre = make("pre", "", text);
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", label);
  return pre;
}

// The JSON in `text` with line breaks, "" where it is none.
function prettyJson(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return ""; }
}

// Fenced code becomes blocks; everything else stays text.
function setBlocks(element, text) {
  const parts = text.split(/^```[^\n`]*\n([\s\S]*?)^```[ \t]*$/m);
  if (parts.length < 2) return;
  const trimmed = parts.map((part) => part.replace(/^\n+|\n+$/g, ""));
  element.replaceChildren(...trimmed.map((part, i) => (i % 2 ? block(part, "Code") : document.createTextNode(part))));
}
