// Thalweg playground: one page, no build, no library, no address but its own server's.

import { Answer } from "./playground/answer.js";
import { $, copy, make, makeButton, recall, remember, say } from "./playground/page.js";
import { ServerError, answersOf } from "./playground/stream.js";
import { ToolBox } from "./playground/tools.js";

const NARROW = matchMedia("(max-width: 900px)");
const messages = [];        // the conversation as the API wants it, without the system prompt
const starts = new Map();   // turn on the page → how many messages stood before it
let model = "default";
let running = null;         // AbortController of the answer under way
let pending = null;         // the answer whose calls wait for their results
let epoch = 0;              // counts conversations: an answer to a former one is dropped

// ---- light and dark ----

const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => $("theme").setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
$("theme").addEventListener("click", () => {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  remember("localStorage", "theme", next);
  nameTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();

// ---- controls ----

const kept = ["system", "temperature", "top_p", "max_tokens", "seed"];
for (const name of kept) {
  const value = recall("localStorage", name);
  if (value !== null) $(name).value = value;
}
$("thinking").checked = recall("localStorage", "thinking") === "true";
$("key").value = recall("sessionStorage", "key") || "";

for (const name of ["temperature", "top_p"]) {
  const slider = $(name), number = $(name + "-number");
  number.value = slider.value;
  slider.addEventListener("input", () => { number.value = slider.value; });
  number.addEventListener("input", () => { if (number.validity.valid && number.value) slider.value = number.value; });
}
$("controls").addEventListener("input", () => {
  for (const name of kept) remember("localStorage", name, $(name).value);
  remember("localStorage", "thinking", $("thinking").checked);
  remember("sessionStorage", "key", $("key").value);
  toolBox.remember();
  showCurl();
});
$("controls").addEventListener("submit", (event) => event.preventDefault());
const toolBox = new ToolBox(() => showCurl());

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
    ...toolBox.fields(),
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
$("copy-curl").addEventListener("click", () => copy($("curl").textContent, $("copy-curl")));

// ---- the conversation ----

const log = $("log");
const atBottom = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
const follow = (was) => { if (was) log.scrollTop = log.scrollHeight; };

function addUser(text) {
  $("welcome").hidden = true;
  const turn = make("article", "turn you");
  turn.append(make("h3", "sr", "You"), make("div", "text", text));
  starts.set(turn, messages.length);
  log.append(turn);
}

function addError(title, text, retryable) {
  const box = make("div", "wrong");
  box.setAttribute("role", "alert");
  box.append(make("strong", "", title), make("p", "", text));
  if (retryable) {
    box.append(makeButton("Try again", "quiet", () => { if (!running) { box.remove(); ask(); } }));
  }
  log.append(box);
  log.scrollTop = log.scrollHeight;
}

// Forgets a turn and all behind it.
function cutAt(turn) {
  messages.length = starts.get(turn);
  const turns = [...log.querySelectorAll(".turn")];
  for (const old of [...turns.slice(turns.indexOf(turn)), ...log.querySelectorAll(".wrong")]) old.remove();
  pending = null;
}

// ---- asking ----

async function ask() {
  const mine = epoch, body = requestBody(messages);
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const answer = new Answer(log, model, "response_format" in body);
  starts.set(answer.element, messages.length);
  follow(true);
  say("The model is answering.");
  let finish = "the answer broke off", usage = null, error = null;
  try {
    for await (const event of answersOf(body, headers(), running.signal)) {
      if (event.usage) usage = event.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const was = atBottom();
      answer.take(choice.delta);
      if (choice.finish_reason) finish = choice.finish_reason;
      follow(was);
    }
  } catch (caught) {
    if (caught.name === "AbortError") finish = "stopped";
    else error = caught instanceof ServerError ? caught : new ServerError(0, { message: `${caught.message}: is the server still there?` });
  }
  running = null;
  $("stop").hidden = true;
  $("send").hidden = false;
  if (mine === epoch) settle(answer, error ? "the answer broke off" : finish, usage, error);
}

function settle(answer, finish, usage, error) {
  const was = atBottom(), focused = document.activeElement;
  const free = focused === document.body || focused === $("stop") || focused === prompt && !prompt.value;
  if (error && !answer.chunks) answer.element.remove();
  else {
    answer.end(finish, usage, () => { if (!running) { cutAt(answer.element); ask(); } });
    messages.push(answer.message);
  }
  if (answer.calls.length) {
    pending = answer;
    answer.askResults((results) => { pending = null; messages.push(...results); ask(); });
  }
  if (error) {
    addError(error.title, error.message, !answer.chunks);
    if (error.status === 401) { openPanel(NARROW.matches); $("key").focus(); }
  }
  follow(was);
  if (free && pending) pending.focusResult();
  else if (free && !error) prompt.focus();
  showCurl();
  poll();
}

const stop = () => { if (running) running.abort(); };
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("tool-dialog").open) return;  // the dialog closes itself
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
  if (pending) { pending.focusResult(); say("The calls wait for their results first."); return; }
  if (!$("controls").checkValidity()) {
    if (NARROW.matches) openPanel(true);
    $("controls").reportValidity();
    return;
  }
  for (const box of log.querySelectorAll(".wrong")) box.remove();
  const last = messages.at(-1);
  if (last && last.role === "user") cutAt([...log.querySelectorAll(".turn")].pop());  // it was refused: what is sent now takes its place
  addUser(text);
  messages.push({ role: "user", content: text });
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
  if (button.dataset.thinking) { $("thinking").checked = true; remember("localStorage", "thinking", true); }
  if (button.dataset.tool) toolBox.addExample(button.dataset.tool);
  prompt.value = button.dataset.text;
  submit();
});
$("clear").addEventListener("click", () => {
  stop();
  epoch += 1;
  messages.length = 0;
  pending = null;
  starts.clear();
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
