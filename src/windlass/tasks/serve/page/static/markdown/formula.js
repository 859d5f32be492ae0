// Formulas for markdown-it: \( \), \[ \], $$ $$ and, with care, $ $. They become tokens that hold their source; fill.js sets them. Pure.

const BACKSLASH = 92;
const DOLLAR = 36;
const CLOSERS = { $$: "$$", "\\[": "\\]", "\\(": "\\)" };
const SINGLE = /\$(?=[^\s$])(?:[^$\\`\n]|\\[^\n])*\$/y;
const WORD = /[\p{L}\p{N}_]/u;
const ORDINAL = /(?:th|st|nd|rd|s)(?![\p{L}\p{N}_])/uy; // the $n$th

/** Between two amounts of money, or two names of a shell's variables, stands prose. */
function isProse(inside) {
  if (/[\\^_=<>+{}]/.test(inside)) return false;
  return (/^\d/.test(inside) && /\s[a-z]{2,}/i.test(inside)) || (inside.match(/[a-z]{3,}/gi)?.length ?? 0) > 1;
}

/** The end of `$...$`, or -1: as in Pandoc no space inside either dollar, no letter before the first, no letter or digit after the last. */
function singleEnd(source, at) {
  if (at > 0 && (WORD.test(source[at - 1]) || source[at - 1] === "$")) return -1;
  SINGLE.lastIndex = at;
  const found = SINGLE.exec(source)?.[0];
  if (!found || /\s/.test(found.at(-2)) || isProse(found.slice(1, -1))) return -1;
  const end = at + found.length;
  ORDINAL.lastIndex = end;
  const next = source[end] ?? " ";
  return next === "$" || (WORD.test(next) && !ORDINAL.test(source)) ? -1 : end;
}

/** The end of a formula that opens with two characters; -1 without one. A closer that does not come any more is looked for once. */
function pairEnd(state, open) {
  const close = CLOSERS[open];
  state.missing ??= new Set();
  if (state.missing.has(close)) return -1;
  const found = state.src.indexOf(close, state.pos + 2);
  if (found < 0) state.missing.add(close);
  const isInside = found >= 0 && found + 2 <= state.posMax && state.src.slice(state.pos + 2, found).trim() !== "";
  return isInside ? found + 2 : -1;
}

function inlineFormula(state, silent) {
  const mark = state.src.charCodeAt(state.pos);
  if (mark !== DOLLAR && mark !== BACKSLASH) return false;
  const open = state.src.slice(state.pos, state.pos + 2);
  const isPair = Object.hasOwn(CLOSERS, open);
  if (!isPair && mark === BACKSLASH) return false;
  const end = isPair ? pairEnd(state, open) : singleEnd(state.src, state.pos);
  const isPending = isPair && end < 0 && state.env.last === state.tokens && state.missing.has(CLOSERS[open]);
  const stop = isPending ? state.posMax : end;
  if (stop < 0 || stop > state.posMax) return false;
  if (!silent) push(state, state.src.slice(state.pos, stop), isPair && open !== "\\(", isPending);
  state.pos = stop;
  return true;
}

function push(state, source, isBlock, isPending) {
  const token = state.push("formula", "", 0);
  token.content = source;
  token.meta = { isBlock, isPending };
  return token;
}

/** $$ or \[ at the start of a line, closed at the end of one, without an empty line between. */
function blockFormula(state, first, endLine, silent) {
  const line = (index) => state.src.slice(state.bMarks[index] + state.tShift[index], state.eMarks[index]);
  const opening = line(first);
  const close = CLOSERS[opening.slice(0, 2)];
  if (!close || close === "\\)") return false;
  let last = first;
  let closed = opening.indexOf(close, 2);
  const missing = state.env.missing?.[close];
  if (closed < 0 && missing && first > missing.from && first < missing.to && !missing.isEnd) return false;
  while (closed < 0) {
    last += 1;
    if (last >= endLine || state.isEmpty(last) || state.sCount[last] < state.blkIndent) break;
    closed = line(last).indexOf(close);
  }
  const isEnd = last >= endLine && Boolean(state.env.isOpen);
  if (closed < 0) state.env.missing = { ...state.env.missing, [close]: { from: first, to: last, isEnd } };
  if (closed < 0 ? !isEnd : line(last).slice(closed + 2).trim() !== "") return false;
  if (silent) return true;
  state.line = closed < 0 ? last : last + 1;
  const source = state.getLines(first, state.line, state.blkIndent, false).trim();
  const token = push(state, source, true, closed < 0);
  token.type = "formula_block";
  token.map = [first, state.line];
  return true;
}

/** The line of text that is still being written: only there may a formula be half there. */
function findLast(state) {
  if (!state.env.isOpen) return;
  const at = state.tokens.findLastIndex((token) => token.nesting >= 0);
  if (state.tokens[at]?.type === "inline") state.env.last = state.tokens[at].children;
}

function draw(tag) {
  return (tokens, index, options, env, renderer) => {
    const { content, meta } = tokens[index];
    const names = `math${meta.isBlock ? " block" : ""}${meta.isPending ? " pending" : ""}`;
    return `<${tag} class="${names}">${renderer.escape(content)}</${tag}>`;
  };
}

export function formulas(markdown) {
  markdown.renderer.escape = markdown.utils.escapeHtml;
  markdown.core.ruler.before("inline", "find_last", findLast);
  markdown.inline.ruler.before("escape", "formula", inlineFormula);
  markdown.block.ruler.before("fence", "formula", blockFormula, { alt: ["paragraph", "reference", "blockquote", "list"] });
  markdown.renderer.rules.formula = draw("span");
  markdown.renderer.rules.formula_block = draw("p");
}
