// Formulas set by KaTeX, code coloured by highlight.js. Both are loaded when an answer first needs them; until then it shows their source.

import { h, setText } from "../lib/dom.js";
import { becomeInside } from "./patch.js";

const FORMULA = ".math:not(.pending)";
const CODE = "pre > code";
const MAX_FORMULA = 5000; // characters; longer ones stay source
const MAX_CODE = 100_000;
const SMALL_CODE = 4000; // coloured again with every change
const GROWTH = 1.1; // larger code is coloured again when it has grown by a tenth: in all a few times its length
// No links, pictures or attributes from formulas (`trust`), and no formula that grows without bound.
const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 40, maxExpand: 500 };

class Library {
  constructor(load) {
    this.load = load;
    this.loaded = null;
    this.loading = false;
    this.waiting = [];
  }

  /** What was loaded, or null; then `later` is called when it is. */
  get(later) {
    if (!this.loaded) this.waiting.push(later);
    if (!this.loaded && !this.loading) this.#start();
    return this.loaded;
  }

  async #start() {
    this.loading = true;
    try {
      this.loaded = await this.load();
    } catch {
      this.loading = false; // the source is shown, and the next one tries again
    }
    const waiting = this.waiting.splice(0);
    if (!this.loaded) return;
    for (const later of waiting) later();
    document.dispatchEvent(new Event("filled"));
  }
}

const formulas = new Library(() => import("../vendor/katex/katex.min.js").then(() => globalThis.katex));
const colours = new Library(() => import("../vendor/highlight/highlight.min.js").then((module) => module.default));

const shown = new WeakMap(); // element -> {source, ...}
const languageOf = (code) => code.className.replace(/^language-/, "");

const isFilled = (element) => element.matches(`.math, ${CODE}`);

/** Whether an element that was filled here can stay for a newer one; null: neither is for us. */
export function stays(old, fresh) {
  if (!isFilled(old) && !isFilled(fresh)) return null;
  const state = shown.get(old);
  if (!state || !isFilled(fresh) || state.kind !== fresh.className) return false;
  if (old.localName !== "code") return state.source === fresh.textContent;
  write(old, fresh.textContent);
  return true;
}

/** Fills what is new in `element`. */
export function fill(element) {
  for (const math of element.querySelectorAll(FORMULA)) typeset(math);
  if (element.matches(FORMULA)) typeset(element);
  for (const code of element.querySelectorAll(CODE)) if (!shown.has(code)) write(code, code.textContent);
}

/** Colours all of the code in `element`, which changes no more. */
export function complete(element) {
  for (const code of element.querySelectorAll(CODE)) {
    const state = shown.get(code);
    if (state && state.coloured < state.source.length) colour(code, state);
  }
}

// --- formulas ----------------------------------------------------------------------------------------------------------

function typeset(element) {
  if (shown.has(element)) return;
  shown.set(element, { kind: element.className, source: element.textContent });
  setFormula(element);
}

function setFormula(element) {
  const { source } = shown.get(element);
  const katex = formulas.get(() => setFormula(element));
  if (!katex) return;
  const mark = source.startsWith("$") && !source.startsWith("$$") ? 1 : 2;
  try {
    if (source.length > MAX_FORMULA) throw new RangeError("The formula is too long.");
    katex.render(source.slice(mark, -mark), element, { ...OPTIONS, displayMode: element.classList.contains("block") });
  } catch (error) {
    setText(element, source);
    element.classList.add("failed");
    element.title = error.message;
  }
}

// --- code --------------------------------------------------------------------------------------------------------------

function write(code, text) {
  const state = shown.get(code) ?? { kind: code.className, source: null, coloured: 0 };
  shown.set(code, state);
  if (text === state.source) return;
  const grew = text.startsWith(state.source ?? "");
  state.source = text;
  if (!grew || text.length < SMALL_CODE || text.length >= state.coloured * GROWTH) colour(code, state);
  else append(code, text, state.coloured);
}

function colour(code, state) {
  const language = languageOf(code);
  const known = state.source.length <= MAX_CODE && language !== "text";
  const highlighter = known ? colours.get(() => colour(code, state)) : null;
  state.coloured = state.source.length;
  if (!highlighter?.getLanguage(language)) return void setText(code, state.source);
  const { _emitter: tree } = highlighter.highlight(state.source, { language, ignoreIllegals: true });
  const fresh = h("code", {}, spans(tree.rootNode));
  fresh.normalize();
  becomeInside(code, fresh);
}

/** highlight.js's tree as elements. Its HTML would be the same, but sanitising that takes ten times as long as all else. */
const spans = ({ children }) =>
  children.flatMap((child) => {
    if (typeof child === "string") return child;
    return child.scope ? h("span", { class: classOf(child.scope) }, spans(child)) : spans(child);
  });

/** "title.function" is `hljs-title function_`. */
function classOf(scope) {
  const [first, ...others] = scope.split(".");
  const name = first.startsWith("language:") ? first.replace(":", "-") : `hljs-${first}`;
  return [name, ...others.map((other, index) => other + "_".repeat(index + 1))].join(" ");
}

/** The newest characters, not coloured yet: a text node behind what is. */
function append(code, text, coloured) {
  const before = code.textContent.length;
  const last = code.lastChild;
  if (last?.nodeType === Node.TEXT_NODE && before > coloured) last.data += text.slice(before);
  else code.append(text.slice(before));
}
