// What a request has beside its messages. An empty field is left out: the server's default, which stands in it in grey, counts.

import { $, copy, recall, remember } from "./page.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "seed"];
const SLIDERS = ["temperature", "top_p"];
const TEXTS = ["system", "stop-strings", ...NUMBERS];
const SWITCHES = ["thinking", "logprobs"];
const TOP_LOGPROBS = 5;
const OFF = { top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0 };

export class Settings {
  #defaults = {};

  // toolBox: gives the fields of tools. changed: called after each change.
  constructor(toolBox, changed) {
    this.toolBox = toolBox;
    this.changed = changed;
    for (const name of TEXTS) $(name).value = recall("localStorage", name) || "";
    for (const name of SWITCHES) $(name).checked = recall("localStorage", name) === "true";
    $("key").value = recall("sessionStorage", "key") || "";
    for (const name of SLIDERS) {
      $(name + "-slider").addEventListener("input", () => { $(name).value = $(name + "-slider").value; });
    }
    for (const form of [$("controls"), $("form")]) form.addEventListener("input", () => this.#keep());
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("reset").addEventListener("click", () => {
      for (const name of [...NUMBERS, "stop-strings"]) $(name).value = "";
      this.#keep();
      $("temperature").focus();
    });
    $("copy-curl").addEventListener("click", () => copy($("curl").textContent, $("copy-curl")));
    this.#keep();
  }

  #keep() {
    for (const name of TEXTS) remember("localStorage", name, $(name).value);
    for (const name of SWITCHES) remember("localStorage", name, $(name).checked);
    remember("sessionStorage", "key", $("key").value);
    this.toolBox.remember();
    this.#show();
    this.changed();
  }

  #show() {
    for (const name of SLIDERS) {
      const value = $(name).value || this.#defaults[name] || 1;
      if ($(name).validity.valid) $(name + "-slider").value = value;
      $(name + "-slider").classList.toggle("default", !$(name).value);
    }
    $("reset").hidden = ![...NUMBERS, "stop-strings"].some((name) => $(name).value);
  }

  // info: of /server_info.
  told(info) {
    const defaults = info.default_sampling_params || {};
    const has_thinking = info.reasoning_parser !== null;
    $("thinking-field").hidden = !has_thinking;
    if (JSON.stringify(defaults) === JSON.stringify(this.#defaults)) return;
    this.#defaults = defaults;
    for (const name of NUMBERS) {
      const value = defaults[name];
      if (name === "seed") continue;
      if (name === "max_tokens") $(name).placeholder = value ?? "up to the context";
      else $(name).placeholder = value === undefined ? "" : value === OFF[name] ? `${value}, off` : value;
    }
    this.#show();
  }

  // The fields of a request; messages and model are not among them.
  fields() {
    const body = { stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) if ($(name).value.trim()) body[name] = Number($(name).value);
    const stop = $("stop-strings").value.split("\n").filter(Boolean);
    if (stop.length) body.stop = stop.map((text) => text.replaceAll("\\n", "\n"));
    if (!$("thinking-field").hidden) body.chat_template_kwargs = { thinking: $("thinking").checked };
    if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    return { ...body, ...this.toolBox.fields() };
  }

  get system() { return $("system").value.trim(); }

  headers() {
    const key = $("key").value.trim();
    return key ? { Authorization: "Bearer " + key } : {};
  }

  showCurl(body) {
    const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
    const key = this.headers().Authorization ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
    $("curl").textContent = `curl -N ${new URL("v1/chat/completions", document.baseURI)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${text}'`;
  }
}
