// Thalweg playground: one page, no build, no library, no address but its own server's.
"use strict";

// ---- remembered between visits; a browser that forbids storage just forgets ----

function recall(store, name) {
  try { return store.getItem("thalweg." + name); } catch { return null; }
}
function remember(store, name, value) {
  try { store.setItem("thalweg." + name, value); } catch { /* private window: nothing is kept */ }
}

const chosen = recall(localStorage, "theme");
if (chosen) document.documentElement.dataset.theme = chosen;  // before the first paint: this script is in the head

document.addEventListener("DOMContentLoaded", () => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const messages = [];      // the conversation as the API wants it, without the system prompt
  let model = "default";
  let running = null;       // AbortController of the answer under way
  let epoch = 0;            // counts conversations: an answer to a former one is dropped

  // ---- light and dark ----

  const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const nameTheme = () => $("theme").setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
  $("theme").addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    remember(localStorage, "theme", next);
    nameTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  nameTheme();

  // ---- controls ----

  const kept = ["system", "temperature", "top_p", "max_tokens", "seed"];
  for (const name of kept) {
    const value = recall(localStorage, name);
    if (value !== null) $(name).value = value;
  }
  $("thinking").checked = recall(localStorage, "thinking") === "true";
  $("key").value = recall(sessionStorage, "key") || "";

  for (const name of ["temperature", "top_p"]) {
    const slider = $(name), number = $(name + "-number");
    number.value = slider.value;
    slider.addEventListener("input", () => { number.value = slider.value; });
    number.addEventListener("input", () => { if (number.validity.valid && number.value) slider.value = number.value; });
  }
  $("controls").addEventListener("input", () => {
    for (const name of kept) remember(localStorage, name, $(name).value);
    remember(localStorage, "thinking", $("thinking").checked);
    remember(sessionStorage, "key", $("key").value);
    showCurl();
  });
  $("controls").addEventListener("submit", (event) => event.preventDefault());

  const settings = $("settings"), panel = $("panel");
  const openPanel = (open) => {
    panel.classList.toggle("open", open);
    settings.setAttribute("aria-expanded", open);
    if (open) $("system").focus();
  };
  settings.addEventListener("click", () => openPanel(!panel.classList.contains("open")));

  // ---- the request ----

  const wholeNumber = (id) => ($(id).value.trim() === "" ? undefined : Number($(id).value));
  function requestBody(history) {
    const system = $("system").value.trim();
    return {
      model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number($("temperature").value),
      top_p: Number($("top_p").value),
      max_tokens: wholeNumber("max_tokens"),
      seed: wholeNumber("seed"),
      chat_template_kwargs: { thinking: $("thinking").checked },
    };
  }
  function headers() {
    const key = $("key").value.trim();
    return key ? { Authorization: "Bearer " + key } : {};
  }
  function showCurl() {
    const text = $("prompt").value.trim();
    const history = text || !messages.length ? [...messages, { role: "user", content: text || "Good morrow! Who are you?" }] : messages;
    const body = JSON.stringify(requestBody(history), null, 2).replaceAll("'", "'\\''");
    const key = headers().Authorization ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
    $("curl").textContent = `curl -N ${location.origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${body}'`;
  }
  async function copy(text, button) {
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
  $("copy-curl").addEventListener("click", () => copy($("curl").textContent, $("copy-curl")));

  // ---- the conversation ----

  const log = $("log");
  const atBottom = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const follow = (was) => { if (was) log.scrollTop = log.scrollHeight; };
  const say = (text) => { $("status").textContent = text; };

  function addUser(text) {
    $("welcome").hidden = true;
    const turn = make("article", "turn you");
    turn.append(make("h3", "sr", "You"), make("div", "text", text));
    log.append(turn);
  }

  // One answer on the page. Text nodes grow as it comes; code blocks are set when it has ended.
  class Answer {
    constructor() {
      this.element = make("article", "turn model-turn waiting");
      this.element.setAttribute("aria-busy", "true");
      this.body = make("div", "text");
      this.text = this.body.appendChild(document.createTextNode(""));
      this.element.append(make("h3", "", model), this.body);
      this.started = performance.now();
      this.chunks = 0;
      log.append(this.element);
    }
    arrived() {
      if (!this.first) this.first = performance.now();
      this.last = performance.now();
      this.chunks += 1;
      this.element.classList.remove("waiting");
    }
    think(text) {
      if (!this.thought) {
        this.thought = make("details", "thought");
        this.thought.open = true;
        this.summary = make("summary", "", "Thinking…");
        this.thinking = document.createTextNode("");
        const box = make("div");
        box.append(this.thinking);
        this.thought.append(this.summary, box);
        this.element.insertBefore(this.thought, this.body);
        this.thoughtBox = box;
      }
      this.thinking.appendData(text);
      this.thoughtBox.scrollTop = this.thoughtBox.scrollHeight;
    }
    write(text) {
      if (this.thought && !this.text.data) this.fold();
      this.text.appendData(text);
    }
    fold() {
      if (!this.thought || this.folded) return;
      this.folded = true;
      this.thought.open = false;
      this.summary.textContent = `Thought for ${((performance.now() - this.first) / 1000).toFixed(1)} s`;
    }
    end(finish, usage) {
      this.fold();
      this.element.setAttribute("aria-busy", "false");
      this.element.classList.remove("waiting");
      setBlocks(this.body, this.text.data);
      const tokens = usage ? usage.completion_tokens : this.chunks;
      const seconds = this.first ? (this.last - this.first) / 1000 : 0;
      const facts = [`${usage ? "" : "about "}${tokens} token${tokens === 1 ? "" : "s"}`];
      if (seconds > 0 && tokens > 1) facts.push(`${((tokens - 1) / seconds).toFixed(0)} tok/s`);
      if (this.first) facts.push(`first after ${Math.round(this.first - this.started)} ms`);
      const cached = usage && usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
      if (cached) facts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
      if (finish !== "stop") facts.push({ length: "cut at max tokens", stopped: "stopped by you", abort: "aborted" }[finish] || finish);
      const meta = make("div", "meta");
      meta.append(...facts.map((fact) => make("span", "", fact)));
      const copyButton = make("button", "", "Copy"), again = make("button", "", "Try again");
      copyButton.type = again.type = "button";
      copyButton.addEventListener("click", () => copy(this.text.data, copyButton));
      again.addEventListener("click", () => { if (!running) retry(this.element); });
      const buttons = make("span", "buttons");
      buttons.append(copyButton, again);
      meta.append(buttons);
      this.element.append(meta);
      say(`Answer ${finish === "stopped" ? "stopped" : "finished"}: ${facts[0]}.`);
    }
  }

  // Fenced code becomes blocks; everything else stays text.
  function setBlocks(element, text) {
    const parts = text.split(/^```[^\n`]*\n([\s\S]*?)^```[ \t]*$/m);
    if (parts.length < 2) return;
    const trimmed = parts.map((part) => part.replace(/^\n+|\n+$/g, ""));
    element.replaceChildren(...trimmed.map((part, i) => (i % 2 ? make("pre", "", part) : document.createTextNode(part))));
    for (const block of element.querySelectorAll("pre")) block.tabIndex = 0;
  }

  function addError(title, text, retryable) {
    const box = make("div", "wrong");
    box.setAttribute("role", "alert");
    box.append(make("strong", "", title), make("p", "", text));
    if (retryable) {
      const again = make("button", "quiet", "Try again");
      again.type = "button";
      again.addEventListener("click", () => { if (!running) { box.remove(); ask(); } });
      box.append(again);
    }
    log.append(box);
    log.scrollTop = log.scrollHeight;
  }

  function retry(element) {
    const turns = [...log.querySelectorAll(".turn")];
    const at = turns.indexOf(element);
    for (const turn of turns.slice(at)) turn.remove();
    for (const box of log.querySelectorAll(".wrong")) box.remove();
    messages.length = at;
    ask();
  }

  // ---- streaming ----

  class ServerError extends Error {
    constructor(status, error) {
      super(error && error.message ? error.message.replace("the engine is not serving: ", "") : `the server answered with status ${status}`);
      this.title = { 401: "An API key is needed", 429: "The server is busy", 503: "The engine is not serving" }[status]
        || (status >= 500 ? "The server failed" : error && error.param ? `The server refused ${error.param}` : "The request was refused");
      this.status = status;
    }
  }

  async function* eventsOf(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  }

  async function ask() {
    const mine = epoch;
    running = new AbortController();
    $("send").hidden = true;
    $("stop").hidden = false;
    const answer = new Answer();
    follow(true);
    say("The model is answering.");
    let finish = "the answer broke off", usage = null, error = null;
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...headers() },
        body: JSON.stringify(requestBody(messages)),
        signal: running.signal,
      });
      if (!response.ok) throw new ServerError(response.status, (await response.json().catch(() => ({}))).error);
      for await (const event of eventsOf(response)) {
        if (event.error) throw new ServerError(event.error.code === "engine_dead" ? 503 : 500, event.error);
        if (event.usage) usage = event.usage;
        const choice = event.choices[0];
        if (!choice) continue;
        const was = atBottom();
        const { reasoning_content: thought, content } = choice.delta;
        if (thought || content) answer.arrived();
        if (thought) answer.think(thought);
        if (content) answer.write(content);
        if (choice.finish_reason) finish = choice.finish_reason;
        follow(was);
      }
    } catch (caught) {
      if (caught.name === "AbortError") finish = "stopped";
      else error = caught instanceof ServerError ? caught : new ServerError(0, { message: `${caught.message}: is the server still there?` });
    }
    const was = atBottom();
    const focused = document.activeElement;
    running = null;
    $("stop").hidden = true;
    $("send").hidden = false;
    const text = answer.text.data;
    if (mine !== epoch) return;
    if (error && !answer.chunks) answer.element.remove();
    else {
      answer.end(error ? "the answer broke off" : finish, usage);
      messages.push({ role: "assistant", content: text });
    }
    if (error) {
      addError(error.title, error.message, !answer.chunks);
      if (error.status === 401) { openPanel(matchMedia("(max-width: 900px)").matches); $("key").focus(); }
    }
    follow(was);
    if (focused === document.body || focused === $("stop")) $("prompt").focus();
    showCurl();
    poll();
  }

  const stop = () => { if (running) running.abort(); };
  $("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (panel.classList.contains("open")) { openPanel(false); settings.focus(); } else stop();
  });

  // ---- the message box ----

  const prompt = $("prompt");
  const grow = () => {
    prompt.style.height = "auto";
    prompt.style.height = prompt.scrollHeight + 2 + "px";
    $("send").disabled = !prompt.value.trim();
  };
  function submit() {
    const text = prompt.value.trim();
    if (!text || running) return;
    if (!$("controls").reportValidity()) { openPanel(matchMedia("(max-width: 900px)").matches); return; }
    for (const box of log.querySelectorAll(".wrong")) box.remove();
    const last = messages[messages.length - 1];
    if (last && last.role === "user") {  // it was refused: what is sent now takes its place
      messages.pop();
      [...log.querySelectorAll(".turn")].pop().remove();
    }
    messages.push({ role: "user", content: text });
    addUser(text);
    prompt.value = "";
    grow();
    ask();
  }
  prompt.addEventListener("input", () => { grow(); showCurl(); });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  $("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("examples").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.thinking) { $("thinking").checked = true; remember(localStorage, "thinking", true); }
    prompt.value = button.dataset.text;
    submit();
  });
  $("clear").addEventListener("click", () => {
    stop();
    epoch += 1;
    messages.length = 0;
    for (const old of log.querySelectorAll(".turn, .wrong")) old.remove();
    $("welcome").hidden = false;
    openPanel(false);
    prompt.focus();
    showCurl();
    say("A new conversation.");
  });

  // ---- the live strip ----

  const speeds = new Array(60).fill(0);
  const rate = (value) => (value >= 9950 ? (value / 1000).toFixed(0) + "k" : value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1));
  const percent = (value) => (100 * value).toFixed(value && value < 0.1 ? 1 : 0) + " %";
  function drawFlow() {
    const top = Math.max(...speeds, 1);
    const points = speeds.map((speed, i) => `${(i * 120 / 59).toFixed(1)},${(26 - 24 * speed / top).toFixed(1)}`).join("L");
    $("flow-line").setAttribute("d", "M" + points);
    $("flow-area").setAttribute("d", `M0,28L${points}L120,28Z`);
    $("flow").setAttribute("aria-label", `decode speed over the last minute, at most ${rate(Math.max(...speeds))} tokens a second`);
  }
  function showState(state, text) {
    $("state").dataset.state = state;
    $("state-text").textContent = text;
    $("state").title = text;
  }
  function show(info) {
    const now = info.internal_states[0];
    model = info.served_model_name;
    $("model").textContent = $("model").title = model + (info.context_length ? `, ${info.context_length} tokens` : "");
    showState(info.status, info.status);
    if (info.reason) $("state").title = info.reason;
    $("running").textContent = now.running;
    $("waiting").textContent = now.waiting;
    $("cache").textContent = percent(now.token_usage);
    $("cache-used").style.width = 100 * now.token_usage + "%";
    $("cache-held").style.width = 100 * now.cache_held + "%";
    $("cache-bar").setAttribute("aria-label", `${percent(now.token_usage)} of the cache in use, ${percent(now.cache_held)} kept for later`);
    $("prefill").textContent = rate(now.prefill_throughput);
    $("decode").textContent = rate(now.decode_throughput);
    speeds.push(now.decode_throughput);
    speeds.shift();
    drawFlow();
  }
  async function poll() {
    try {
      const response = await fetch("/server_info", { headers: headers() });
      if (response.ok) show(await response.json());
      else showState("locked", response.status === 401 ? "needs a key" : `status ${response.status}`);
    } catch {
      showState("offline", "not reachable");
    }
  }
  setInterval(() => { if (!document.hidden) poll(); }, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  poll().then(showCurl);
  grow();
  showCurl();
});
