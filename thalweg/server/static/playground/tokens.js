// The tokens of an answer, coloured by probability. Pointing at one, or the arrow keys, show what else could have come.

import { $, make } from "./page.js";

const LEVELS = [0.9, 0.7, 0.4, 0.15];  // least probability of each colour, the last has none
const FLOOR = -9000;                   // the API's stand-in for minus infinity is below

const probability = ({ logprob }) => Math.exp(logprob);
const percent = (value) => (value >= 0.9995 ? "100 %" : value >= 0.1 ? (100 * value).toFixed(1) + " %" : value >= 0.0005 ? (100 * value).toFixed(2) + " %" : "< 0.05 %");
const level = (value) => { const at = LEVELS.findIndex((least) => value >= least); return at < 0 ? LEVELS.length : at; };

// A token as one can read it: part of a character as bytes, white space as signs.
const readable = ({ token }) => token.replace(/^bytes:/, "").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
const shown = ({ token }) => (token.startsWith("bytes:\\x") ? token.slice(6) : token.replaceAll("\n", "⏎\n"));

const tokenClass = (entry) => `tok p${level(probability(entry))}${entry.token.startsWith("bytes:") ? " part" : ""}`;

export class TokensView {
  #shown = 0;
  #active = -1;

  // entries: [{token, logprob, top_logprobs}], which grow.
  constructor(entries) {
    this.entries = entries;
    this.text = make("div", "token-text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Tokens of the answer; the arrow keys go through them");
    const legend = make("p", "legend", ...["≥ 90 %", "70 %", "40 %", "15 %", "less"].map((text, i) => make("span", "tok p" + i, text)));
    this.element = make("div", "tokens", legend, this.text);
    this.text.addEventListener("pointerover", (event) => this.#point(event.target));
    this.text.addEventListener("pointerdown", (event) => this.#point(event.target));
    this.text.addEventListener("pointerleave", () => this.#hide());
    this.text.addEventListener("blur", () => this.#hide());
    this.text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape" && this.#active >= 0) { event.stopPropagation(); this.#hide(); }
      if (!step) return;
      event.preventDefault();
      this.#show(Math.min(Math.max(this.#active + step, 0), this.#shown - 1));
    });
  }

  update() {
    const added = this.entries.slice(this.#shown).map((entry) => make("span", tokenClass(entry), shown(entry)));
    this.#shown = this.entries.length;
    this.text.append(...added);
  }

  #point(target) {
    if (target.parentElement === this.text) this.#show([...this.text.children].indexOf(target));
  }

  #show(i) {
    if (i < 0) return;
    this.#hide();
    this.#active = i;
    const token = this.text.children[i], entry = this.entries[i], tip = $("token-tip");
    token.classList.add("active");
    const others = entry.top_logprobs.some((other) => other.token === entry.token) ? entry.top_logprobs : [entry, ...entry.top_logprobs];
    tip.replaceChildren(make("table", "", ...others.map((other) => {
      const bar = make("i");
      bar.style.width = 100 * probability(other) + "%";
      const row = make("tr", other.token === entry.token ? "chosen" : "", make("th", "", readable(other)), make("td", "", percent(probability(other))),
        make("td", "", other.logprob < FLOOR ? "−∞" : other.logprob.toFixed(3).replace("-", "−")), make("td", "bar", bar));
      row.firstChild.scope = "row";
      return row;
    })));
    tip.hidden = false;
    const at = token.getClientRects()[0], box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(at.left, innerWidth - box.width - 8)) + "px";
    tip.style.top = (at.bottom + box.height + 14 < innerHeight ? at.bottom + 6 : Math.max(8, at.top - box.height - 6)) + "px";
  }

  #hide() {
    if (this.#active >= 0) this.text.children[this.#active].classList.remove("active");
    this.#active = -1;
    $("token-tip").hidden = true;
  }
}
