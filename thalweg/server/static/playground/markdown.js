// Markdown to elements: markdown-it parses (HTML in the text stays text), DOMPurify checks, Temml sets formulas as MathML,
// highlight.js colours code. A text that grows is rendered block by block; only the last blocks are made anew.

import { copy, iconButton, make } from "./page.js";

const { markdownit, DOMPurify, temml, hljs } = window;
const MAX_HIGHLIGHTED = 20_000;      // characters of one code block; a longer one has no colours
const MAX_OPEN_HIGHLIGHTED = 6_000;  // of one that still grows
const MAX_MATH = 4_000;              // characters of one formula

const md = markdownit({ html: false, linkify: true, breaks: true });
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s", "span",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

// ---- rules ----

md.validateLink = (url) => ALLOWED.ALLOWED_URI_REGEXP.test(url.trim());

// An image would be fetched from where the model says: its address is shown as a link instead.
md.renderer.rules.image = (tokens, i) => {
  const source = md.utils.escapeHtml(tokens[i].attrGet("src"));
  return `<a href="${source}">${md.utils.escapeHtml(tokens[i].content || "image")}</a>`;
};

for (const cell of ["th_open", "td_open"]) {  // the policy allows no style attribute
  md.renderer.rules[cell] = (tokens, i) => {
    const side = /right|center/.exec(tokens[i].attrGet("style") || "");
    return `<${tokens[i].tag}${side ? ` class="${side[0]}"` : ""}>`;
  };
}

// $…$ and \(…\) in a line. As in pandoc a dollar sign next to a space or before a digit is money.
md.inline.ruler.before("escape", "math", (state, silent) => {
  if (state.src[state.pos] !== "$" && state.src[state.pos] !== "\\") return false;
  const text = state.src.slice(state.pos, Math.min(state.posMax, state.pos + MAX_MATH));
  const found = /^\$\$([^$]+)\$\$/.exec(text) || /^\$(?!\s)((?:\\[^]|[^\\$])+?)(?<!\s)\$(?!\d)/.exec(text)
    || /^\\\(([^]+?)\\\)/.exec(text) || /^\\\[([^]+?)\\\]/.exec(text);
  if (!found) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = found[1];
    token.meta = { display: /^(\$\$|\\\[)/.test(found[0]), source: found[0] };
  }
  state.pos += found[0].length;
  return true;
});

// $$ … $$ and \[ … \] in lines of their own; unclosed they reach to the end, as a fence does.
md.block.ruler.before("fence", "math_block", (state, start, end, silent) => {
  const from = state.bMarks[start] + state.tShift[start];
  const opening = state.src.slice(from, from + 2);
  if ((opening !== "$$" && opening !== "\\[") || state.sCount[start] - state.blkIndent >= 4) return false;
  const closing = opening === "$$" ? "$$" : "\\]";
  let line = start, last = "";
  for (; line < end; line++) {
    last = state.src.slice(state.bMarks[line] + (line === start ? state.tShift[start] + 2 : 0), state.eMarks[line]).trimEnd();
    if (last.includes(closing)) break;
  }
  if (line < end && !last.endsWith(closing)) return false;  // text follows: a formula in a line
  if (silent) return true;
  const to = line < end ? state.eMarks[line] : state.eMarks[end - 1];
  const source = state.src.slice(from, to).trimEnd();
  const token = state.push("math", "", 0);
  token.content = source.slice(2, line < end ? -2 : undefined);
  token.meta = { display: true, block: true, source };
  token.map = [start, Math.min(line + 1, end)];
  state.line = token.map[1];
  return true;
}, { alt: ["paragraph", "blockquote", "list"] });

let formulas = [];  // of the block that is rendered: the text of the page cannot name one
md.renderer.rules.math = (tokens, i) => {
  formulas.push(tokens[i]);
  const tag = tokens[i].meta.block ? "div" : "span";
  return `<${tag} class="math${tokens[i].meta.display ? " display" : ""}">${md.utils.escapeHtml(tokens[i].meta.source)}</${tag}>`;
};

// ---- elements ----

// The element of one top-level block.
function renderBlock(tokens, env) {
  formulas = [];
  const html = md.renderer.render(tokens, md.options, env);
  const element = DOMPurify.sanitize(html, ALLOWED).firstElementChild || make("p");
  for (const [i, place] of [...withSelf(element, ".math")].entries()) setFormula(place, formulas[i]);
  for (const link of element.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const item of element.querySelectorAll("li")) setTask(item);
  for (const table of withSelf(element, "table")) if (table !== element) table.replaceWith(scrolling(table));
  for (const pre of withSelf(element, "pre")) {
    if (pre !== element) pre.replaceWith(new CodeBlock(pre.textContent, languageOf(pre.firstElementChild)).element);
  }
  return element.tagName === "TABLE" ? scrolling(element) : element;
}

const withSelf = (element, selector) => [...(element.matches(selector) ? [element] : []), ...element.querySelectorAll(selector)];
const languageOf = (code) => (/language-(\S+)/.exec(code.className) || ["", ""])[1];

function scrolling(table) {
  const frame = make("div", "table", table.cloneNode(true));
  frame.tabIndex = 0;
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", "Table");
  return frame;
}

function setFormula(place, token) {
  if (!token || token.content.length > MAX_MATH) return;
  const shown = make("span");
  try {
    temml.render(token.content, shown, { displayMode: token.meta.display, throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 100] });
    place.replaceChildren(...shown.childNodes);
  } catch {  // unfinished or wrong: its source stays
    place.classList.add("source");
  }
}

function setTask(item) {  // - [ ] and - [x]
  const first = item.firstElementChild && item.firstElementChild.tagName === "P" ? item.firstElementChild.firstChild : item.firstChild;
  const mark = first && first.nodeType === Node.TEXT_NODE && /^\[([ xX])\] /.exec(first.data);
  if (!mark) return;
  const box = make("span", mark[1] === " " ? "task" : "task done");
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", mark[1] === " " ? "to do" : "done");
  first.data = first.data.slice(4);
  first.before(box);
  item.classList.add("task-item");
}

// Code with the name of its language, colours, and a copy button.
export class CodeBlock {
  constructor(text, language = "", open = false) {
    this.language = language;
    this.code = make("code");
    const pre = make("pre", "", this.code);
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
    const button = iconButton("copy", "Copy code", () => copy(this.text, button));
    this.element = make("figure", "code", make("figcaption", "", make("span", "", language || "text"), button), pre);
    this.update(text, open);
  }

  // open: the text still grows.
  update(text, open) {
    const is_coloured = hljs.getLanguage(this.language) && text.length <= (open ? MAX_OPEN_HIGHLIGHTED : MAX_HIGHLIGHTED);
    if (is_coloured) {
      const html = hljs.highlight(text, { language: this.language, ignoreIllegals: true }).value;
      this.code.replaceChildren(DOMPurify.sanitize(html, COLOURS));
    } else if (this.plain && text.startsWith(this.text)) {
      this.code.firstChild.appendData(text.slice(this.text.length));
    } else this.code.replaceChildren(document.createTextNode(text));
    this.plain = !is_coloured;
    this.text = text;
  }
}

// ---- a text that grows ----

// Blocks that may still change: a list can go on behind a line that looks like a paragraph.
const OPEN_BLOCKS = 2;

export class MarkdownView {
  #settled = 0;    // characters whose blocks are final
  #open = [];      // {source, element, code} of the blocks behind them
  #env = {};       // link definitions

  constructor(element) { this.element = element; }

  // text: all of it so far. done: there will be no more.
  update(text, done) {
    if (text.includes("\r")) text = text.replace(/\r\n?/g, "\n");
    if (done && /^ {0,3}\[[^\]]+\]:/m.test(text)) {  // a definition was read before it was whole, and is for links before it too
      this.#settled = 0;
      this.#open = [];
      this.#env = {};
      md.parse(text, this.#env);
      this.element.replaceChildren();
    }
    const blocks = this.#parse(text.slice(this.#settled));
    const shown = blocks.map((block, i) => this.#show(block, this.#open[i], !done && i === blocks.length - 1));
    for (const old of this.#open.slice(blocks.length)) old.element.remove();
    const settled = done ? 0 : Math.max(blocks.length - OPEN_BLOCKS, 0);
    if (settled) this.#settled += blocks[settled].start;
    this.#open = shown.slice(settled);
  }

  // The top-level blocks of a text: {source, start, tokens}, start in characters.
  #parse(text) {
    const tokens = md.parse(text, this.#env), blocks = [];
    for (let i = 0; i < tokens.length; i++) {
      const first = i;
      if (tokens[i].nesting === 1) while (tokens[i].nesting !== -1 || tokens[i].level) i++;
      blocks.push({ tokens: tokens.slice(first, i + 1), line: tokens[first].map[0] });
    }
    let line = 0, at = 0;
    for (const block of blocks) {
      for (; line < block.line; line++) at = text.indexOf("\n", at) + 1;
      block.start = at;
    }
    for (const [i, block] of blocks.entries()) block.source = text.slice(block.start, i + 1 < blocks.length ? blocks[i + 1].start : undefined);
    return blocks;
  }

  #show(block, old, open) {
    if (old && old.source === block.source && (!old.code || old.is_open === open)) return old;
    const [token] = block.tokens, is_code = token.type === "fence" || token.type === "code_block";
    const language = (token.info || "").trim().split(/\s+/)[0].toLowerCase();
    const text = is_code ? token.content.replace(/\n$/, "") : "";
    if (is_code && old && old.code && old.code.language === language) {
      old.code.update(text, open);
      return Object.assign(old, { source: block.source, is_open: open });
    }
    const code = is_code ? new CodeBlock(text, language, open) : null;
    const element = code ? code.element : renderBlock(block.tokens, this.#env);
    if (old) old.element.replaceWith(element);
    else this.element.append(element);
    return { source: block.source, element, code, is_open: open };
  }
}

