// The strip at the top: the state of the engine, asked every second while the page is seen.

import { $ } from "./page.js";

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

// headers: a function that gives those of a request. told: gets each /server_info.
export function watch(headers, told) {
  async function poll() {
    try {
      const response = await fetch("/server_info", { headers: headers() });
      if (!response.ok) {
        showState("locked", response.status === 401 ? "needs a key" : `status ${response.status}`);
        return;
      }
      const info = await response.json();
      show(info);
      told(info);
    } catch {
      showState("offline", "not reachable");
    }
  }
  setInterval(() => { if (!document.hidden) poll(); }, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  poll();
  return poll;
}
