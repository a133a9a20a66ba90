// Thalweg playground: one page, no build, no address but its own server's.

import { $, make, recall, remember, say } from "./playground/page.js";
import { Settings } from "./playground/settings.js";
import { Sidebar } from "./playground/sidebar.js";
import { watch } from "./playground/status.js";
import { Conversation, Store } from "./playground/store.js";
import { ServerError, answersOf } from "./playground/stream.js";
import { ToolBox } from "./playground/tools.js";
import { AnswerTurn, UserTurn } from "./playground/turns.js";

const NARROW = matchMedia("(max-width: 900px)");
const SAVE_EVERY = 2000;      // ms, while an answer comes
const FIRST_WORDS = "Good morrow! Who are you?";
const log = $("log"), prompt = $("prompt");
const store = new Store();
const running = new Map();    // id of a conversation → {controller, turn} of its answer under way
let conversation = new Conversation();
let settings = null;          // once the fields are filled
let turns = [];               // UserTurn and AnswerTurn on the page, in order

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

// ---- side panels: columns in a wide window, drawers in a narrow one ----

function openDrawer(name, open) {
  const drawer = $(name), button = $(name + "-button");
  if (NARROW.matches) {
    if (open) for (const other of ["sidebar", "panel"]) if (other !== name) openDrawer(other, false);
    drawer.classList.toggle("open", open);
  } else {
    document.body.classList.toggle("no-" + name, !open);
    remember("localStorage", name, open);
  }
  button.setAttribute("aria-expanded", open);
  if (open && NARROW.matches) drawer.querySelector(".drawer-close").focus();
}
const isOpen = (name) => (NARROW.matches ? $(name).classList.contains("open") : !document.body.classList.contains("no-" + name));
for (const name of ["sidebar", "panel"]) {
  document.body.classList.toggle("no-" + name, recall("localStorage", name) === "false");
  $(name + "-button").setAttribute("aria-expanded", isOpen(name));
  $(name + "-button").addEventListener("click", () => openDrawer(name, !isOpen(name)));
  NARROW.addEventListener("change", () => { $(name).classList.remove("open"); $(name + "-button").setAttribute("aria-expanded", isOpen(name)); });
}
for (const close of [$("shade"), ...document.querySelectorAll(".drawer-close")]) close.addEventListener("click", () => closeDrawers());
const closeDrawers = () => { if (NARROW.matches) for (const name of ["sidebar", "panel"]) if (isOpen(name)) openDrawer(name, false); };

// ---- scrolling: the page follows an answer only while its end is seen ----

const atBottom = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
const toBottom = () => { log.scrollTop = log.scrollHeight; };
function following(work) {
  const was = atBottom();
  work();
  if (was) toBottom();
  showJump();
}
function showJump() { $("jump").hidden = atBottom(); }
log.addEventListener("scroll", showJump, { passive: true });
$("jump").addEventListener("click", () => { toBottom(); prompt.focus(); });

// ---- the conversation on the page ----

const app = {
  versions: (node) => conversation.versions(node),
  pick(node, step) {
    const shown = conversation.pick(node, step), label = step < 0 ? "Previous version" : "Next version";
    save();
    const at = log.scrollTop;
    render();
    log.scrollTop = at;
    const turn = turns.find((each) => each.node === shown);
    const buttons = [...turn.element.querySelectorAll(".versions button:not(:disabled)")];
    (buttons.find((button) => button.title === label) || buttons[0]).focus();
  },
  // Opens the message that an answer was asked with.
  editQuestion(answer) {
    let node = answer;
    while (node.role !== "user") node = conversation.nodes[node.parent];
    turns.find((turn) => turn.node === node).edit();
  },
  edit(node, text) {
    if (!isFree()) return;
    const edited = conversation.add(node.parent, { role: "user", content: text });
    render();
    ask(edited.id);
  },
  regenerate(node) {
    if (!isFree()) return;
    cutAfter(node.parent);
    ask(node.parent);
  },
  // The same again in place of an answer that failed.
  retry(node) {
    if (!isFree()) return;
    cutAfter(node.parent);
    if (!node.content && !node.calls.length) conversation.remove(node);
    ask(node.parent);
  },
  giveResults(node, results) {
    const given = conversation.add(node.id, { role: "tool", results });
    const turn = new AnswerTurn(node, app, results);
    turns.at(-1).element.replaceWith(turn.element);
    turns[turns.length - 1] = turn;
    ask(given.id);
  },
};

// Forgets on the page what follows the node; the tree keeps it.
function cutAfter(id) {
  const at = turns.findIndex((turn) => conversation.nodes[turn.node.parent] && turn.node.parent === id);
  if (at < 0) return;
  for (const turn of turns.splice(at)) turn.element.remove();
}

function show(node, results) {
  const under = running.get(conversation.id);
  const turn = under && under.turn.node === node ? under.turn : node.role === "user" ? new UserTurn(node, app) : new AnswerTurn(node, app, results);
  turns.push(turn);
  log.append(turn.element);
  return turn;
}

function render() {
  for (const turn of turns) turn.element.remove();
  turns = [];
  const path = conversation.path();
  for (const [i, node] of path.entries()) {
    const next = path[i + 1];
    if (node.role !== "tool") show(node, next && next.role === "tool" ? next.results : null);
  }
  $("welcome").hidden = path.length > 0;
  document.title = path.length ? `${conversation.name} · Thalweg` : "Thalweg playground";
  toolBox.enter(conversation.tools);
  showRunning();
  showUsage();
  showList();
  showCurl();
}

function showList() {
  sidebar.show(store.list(), conversation.id, running);
}

function showUsage() {
  const last = contextLength && conversation.path().findLast((node) => node.usage || node.error?.size);
  const refused = last?.error?.size;
  const text = last ? `${refused || last.usage.total_tokens} of ${contextLength} tokens` : "";
  $("usage").textContent = text.replace(/\d+/g, (digits) => Number(digits).toLocaleString("en"));
  $("usage").classList.toggle("nearly-full", Boolean(refused) || last?.usage?.total_tokens > 0.9 * contextLength);
}

function showRunning() {
  const on = running.has(conversation.id);
  $("send").hidden = on;
  $("stop").hidden = !on;
}

// ---- kept in the browser ----

function save(saved = conversation) {
  try {
    store.save(saved);
    $("notice").hidden = true;
  } catch (error) {
    const full = error.name === "QuotaExceededError";
    $("notice-text").textContent = full
      ? "The storage of this browser is full. This conversation is not saved: delete old ones, and it is saved with the next message."
      : "This browser does not let the page store anything. The conversation is lost when the page closes.";
    $("notice").hidden = false;
  }
}
$("notice-close").addEventListener("click", () => { $("notice").hidden = true; });
let leaving = false;  // the requests that end now have not failed
addEventListener("pagehide", () => { leaving = true; for (const { saved } of running.values()) save(saved); });
addEventListener("pageshow", () => { leaving = false; });
addEventListener("storage", (event) => {  // another tab
  const id = (event.key || "").startsWith("thalweg.conversation.") && event.key.slice(21);
  if (!id || running.has(id)) return;
  store.forget(id);
  if (id === conversation.id && event.newValue) { conversation = store.load(id) || conversation; render(); } else showList();
});

const sidebar = new Sidebar({
  open(id) {
    const opened = store.load(id);
    if (!opened) return;
    open(opened);
  },
  rename(id, title) {
    const renamed = store.load(id);
    if (renamed && title !== null && title !== renamed.name) { renamed.title = title; save(renamed); }
    showList();
  },
  remove(id) {
    if (running.has(id)) running.get(id).controller.abort();
    running.delete(id);
    store.remove(id);
    if (id === conversation.id) open(new Conversation());
    else showList();
    $("new").focus();
    say("The conversation was deleted.");
  },
});

function open(opened) {
  conversation = opened;
  remember("localStorage", "current", opened.id);
  render();
  toBottom();
  showJump();
  closeDrawers();
  prompt.focus();
}
function startNew() {
  if (!conversation.is_empty) open(new Conversation());
  closeDrawers();
  prompt.focus();
  say("A new conversation.");
}
for (const id of ["new", "new-top"]) $(id).addEventListener("click", startNew);

// ---- the request ----

let model = recall("localStorage", "model") || "";
let contextLength = null;
const toolBox = new ToolBox(() => {
  if (!conversation.is_empty) save();
  showCurl();
});
settings = new Settings(toolBox, () => showCurl());

function requestBody(history) {
  const system = settings.system;
  return { model: $("model").value || "default", messages: [...(system ? [{ role: "system", content: system }] : []), ...history], ...settings.fields() };
}
function showCurl() {
  if (!settings) return;
  const history = conversation.messages(), text = prompt.value.trim();
  if (text || !history.length) history.push({ role: "user", content: text || FIRST_WORDS });
  settings.showCurl(requestBody(history));
}
async function showModels() {
  try {
    const response = await fetch("v1/models", { headers: settings.headers() });
    if (!response.ok) return;
    const names = (await response.json()).data.map((card) => card.id);
    if (names.join("\n") === [...$("model").options].map((option) => option.value).join("\n")) return;
    $("model").replaceChildren(...names.map((name) => { const option = make("option", "", name); option.value = name; return option; }));
    $("model").value = names.includes(model) ? model : names[0];
    showCurl();
  } catch { /* the strip says that the server is away */ }
}
$("model").addEventListener("change", () => { model = $("model").value; remember("localStorage", "model", model); showCurl(); });
const poll = watch(() => settings.headers(), (info) => {
  settings.told(info);
  const changed = contextLength !== info.context_length || !$("model").options.length;
  contextLength = info.context_length;
  if (changed) { showModels(); showUsage(); showCurl(); }
});

// ---- asking ----

const isFree = () => !running.has(conversation.id);

async function ask(parent) {
  const asked = conversation, body = requestBody(asked.messages(parent)), controller = new AbortController();
  const node = asked.add(parent, { role: "assistant", model: body.model, content: "", reasoning: "", calls: [], chunks: 0, json: "response_format" in body });
  if (body.logprobs) node.logprobs = [];
  $("welcome").hidden = true;
  const turn = show(node);
  running.set(asked.id, { controller, turn, saved: asked });
  showRunning();
  save(asked);
  remember("localStorage", "current", asked.id);
  showList();
  toBottom();
  say("The model is answering.");
  const timer = setInterval(() => save(asked), SAVE_EVERY), began = performance.now();
  let error = null;
  node.finish = "broken";
  try {
    for await (const event of answersOf(body, settings.headers(), controller.signal)) {
      if (event.usage) node.usage = event.usage;
      if (!event.choices[0]) continue;
      take(node, event.choices[0], began);
      turn.schedule((work) => (asked === conversation ? following(work) : work()));
    }
  } catch (caught) {
    if (caught.name === "AbortError") node.finish = "stopped";
    else error = caught instanceof ServerError ? caught : new ServerError(0, { message: `${caught.message}: is the server still there?` });
  }
  clearInterval(timer);
  if (leaving || running.get(asked.id)?.turn !== turn) return;  // or the conversation was deleted
  running.delete(asked.id);
  settle(asked, turn, error);
}

// Adds one choice of a stream to the answer.
function take(node, { delta, logprobs, finish_reason: finish }, began) {
  const { reasoning_content: thought, content, tool_calls: calls } = delta;
  if (finish) node.finish = finish;
  if (logprobs && node.logprobs) node.logprobs.push(...logprobs.content);
  if (!thought && !content && !calls) return;
  const now = performance.now();
  if (!node.chunks) node.ttft = now - began;
  node.chunks += 1;
  node.seconds = (now - began - node.ttft) / 1000;
  if (thought) node.thoughtSeconds = node.seconds;
  node.reasoning += thought || "";
  node.content += content || "";
  for (const { index, id, function: { name, arguments: more } } of calls || []) {
    node.calls[index] ??= { id, name, arguments: "" };
    node.calls[index].arguments += more || "";
  }
}

function settle(asked, turn, error) {
  const { node } = turn, shown = asked === conversation, focused = document.activeElement;
  const free = focused === document.body || focused === $("stop") || focused === prompt && !prompt.value;
  node.done = true;
  if (node.finish !== "stop" && node.finish !== "tool_calls" && node.calls.length) {
    node.unfinished = node.calls.map((call) => call.name);
    node.calls = [];
  }
  if (error) node.error = { title: error.title, message: error.message, is_long: error.is_long, size: error.size };
  following(() => turn.finish());
  save(asked);
  showList();
  if (!shown) return;
  showRunning();
  showUsage();
  showCurl();
  poll();
  const names = node.calls.map((call) => call.name).join(", ");
  if (error?.status === 401) {
    openDrawer("panel", true);
    $("key").focus();
  } else if (free && turn.is_asking) turn.focusResult();
  else if (free && !error) prompt.focus();
  if (names) say(`The model calls ${names}. Type what it returns.`);
  else if (!error) say(`Answer ${node.finish === "stopped" ? "stopped" : "finished"}.`);
}

const stop = () => running.get(conversation.id)?.controller.abort();
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("tool-dialog").open) return;  // the dialog closes itself
  const open = NARROW.matches && ["sidebar", "panel"].find(isOpen);
  if (open) { openDrawer(open, false); $(open + "-button").focus(); } else stop();
});

// ---- the message box ----

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = prompt.scrollHeight + "px";
  $("send").disabled = !prompt.value.trim();
}
// example: name of a tool that comes with the message.
function submit(example = "") {
  const text = prompt.value.trim(), last = turns.at(-1);
  if (!text || !isFree()) return;
  if (last instanceof AnswerTurn && last.is_asking) { last.focusResult(); say("The calls wait for their results first."); return; }
  const wrong = $("controls").querySelector(":invalid:not(fieldset)");
  if (wrong) {
    openDrawer("panel", true);
    for (let box = wrong.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    wrong.reportValidity();
    return;
  }
  const before = conversation.last;
  const failed = before && before.role === "assistant" && before.error && !before.content && !before.calls.length;
  const parent = failed ? withdraw(before) : before ? before.id : "root";
  if (example) toolBox.addExample(example);
  addUser(parent, text);
}
// Takes an answer that failed, and the message that was refused with it, out of the conversation: gives what is then the last.
function withdraw(answer) {
  const refused = conversation.nodes[answer.parent], node = refused.role === "user" ? refused : answer;
  cutAfter(node.parent);
  conversation.remove(node);
  return node.parent;
}
function addUser(parent, text) {
  const node = conversation.add(parent, { role: "user", content: text });
  prompt.value = "";
  grow();
  show(node);
  ask(node.id);
}
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("examples").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.thinking) { $("thinking").checked = true; remember("localStorage", "thinking", true); }
  prompt.value = button.dataset.text;
  submit(button.dataset.tool);
});

// ---- the start: the conversation of the last visit ----

conversation = store.load(recall("localStorage", "current")) || conversation;
render();
toBottom();
showJump();
grow();
