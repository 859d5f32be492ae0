// Text to blocks of HTML, by markdown-it and what chat models need beside CommonMark. Pure; clean.js sanitises the HTML before anything is
// made of it.
//
// HTML is text, but for a few tags without attributes. A line break in a paragraph is kept, as chat models intend. Neither indented code
// nor underlined headings: while an answer grows, every list below a paragraph would be a heading for a moment.

import MarkdownIt from "../vendor/markdown-it/markdown-it.esm.min.mjs";
import { formulas } from "./formula.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const TAG = /<(\/?)(br|sub|sup|kbd|mark|u|ins|s|b|i|em|strong|small)\s*\/?>/iy;
const TASK = /^\[([ xX])\] +/;

const markdown = new MarkdownIt({ html: false, breaks: true, linkify: true });
const { escapeHtml: escape } = markdown.utils;
const { rules } = markdown.renderer;

/** Whether a link may point there. The browser's own parser determines the scheme. */
export const isSafe = (address) => URL.canParse(address) && SCHEMES.has(new URL(address).protocol);

markdown.validateLink = isSafe;
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
markdown.disable(["code", "lheading"]);
markdown.use(formulas);

// --- tags that are let through -----------------------------------------------------------------------------------------

markdown.inline.ruler.push("tag", (state, silent) => {
  TAG.lastIndex = state.pos;
  const found = TAG.exec(state.src);
  if (!found) return false;
  if (!silent) {
    const token = state.push("tag", "", 0);
    token.content = found[0];
    token.meta = { name: found[2].toLowerCase(), closes: found[1] === "/", isWhole: found[2].toLowerCase() === "br" };
  }
  state.pos += found[0].length;
  return true;
});

/** Tags that are not closed, or close nothing, are text. */
function pairTags(tokens) {
  const open = [];
  const counts = {};
  for (const { meta } of tokens.filter(({ type }) => type === "tag")) {
    if (meta.isWhole) continue;
    if (!meta.closes) {
      open.push(meta);
      counts[meta.name] = (counts[meta.name] ?? 0) + 1;
    } else if (counts[meta.name] > 0) {
      let last = null;
      do counts[(last = open.pop()).name] -= 1;
      while (last.name !== meta.name);
      last.isWhole = meta.isWhole = true;
    }
  }
}

rules.tag = (tokens, index) => {
  const { content, meta } = tokens[index];
  return meta.isWhole ? `<${meta.closes && meta.name !== "br" ? "/" : ""}${meta.name}>` : escape(content);
};

// --- what the page's elements look like ----------------------------------------------------------------------------------

/** Headings two levels below the page's own; a column's alignment and a task's state as classes. */
function shape({ tokens }) {
  tokens.forEach((token, index) => {
    if (token.type.startsWith("heading")) {
      const level = Number(token.tag[1]);
      if (token.nesting > 0) token.attrSet("class", `level-${level}`);
      token.tag = `h${Math.min(6, level + 2)}`;
    } else if (token.type === "th_open" || token.type === "td_open") {
      const side = /center|right/.exec(token.attrGet("style") ?? "");
      token.attrs = [...(side ? [["class", side[0]]] : []), ...(token.tag === "th" ? [["scope", "col"]] : [])];
    } else if (token.type === "inline") {
      pairTags(token.children);
      unlinkPictures(token.children);
      task(tokens[index - 2], token.children[0]);
    }
  });
}

function task(item, text) {
  const found = item?.type === "list_item_open" && text?.type === "text" ? TASK.exec(text.content) : null;
  if (!found) return;
  text.content = text.content.slice(found[0].length);
  item.attrSet("class", found[1] === " " ? "task" : "task done");
}

/** A picture becomes a link; within a link only its name is left. */
function unlinkPictures(tokens) {
  let links = 0;
  for (const token of tokens) {
    if (token.type === "link_open") links += 1;
    else if (token.type === "link_close") links -= 1;
    else if (token.type === "image") token.meta = { isLink: links === 0 };
  }
}

markdown.core.ruler.push("shape", shape);

// Never loaded: an image URL can leak the conversation to its host.
rules.image = (tokens, index) => {
  const { content, meta } = tokens[index];
  const label = escape(`Picture: ${content}`);
  return meta.isLink ? `<a href="${escape(tokens[index].attrGet("src"))}">${label}</a>` : label;
};

rules.fence = (tokens, index) => {
  const { info, content } = tokens[index];
  const language = info.trim().split(/\s/)[0] || "text";
  return `<pre><code class="language-${escape(language)}">${escape(content.replace(/\n$/, ""))}</code></pre>`;
};

// --- blocks ------------------------------------------------------------------------------------------------------------

/** Blocks as {start, html}: the offset of a block's first line, and one element. `isOpen`: the text is still being written. */
export function blocks(text, isOpen = false) {
  const env = { isOpen };
  const tokens = markdown.parse(text, env);
  const found = [];
  const offset = offsets(text);
  for (let from = 0, to = 0; from < tokens.length; from = to) {
    let depth = 0;
    do depth += tokens[to++].nesting;
    while (depth > 0);
    const html = markdown.renderer.render(tokens.slice(from, to), markdown.options, env);
    found.push({ start: offset(tokens[from].map[0]), html });
  }
  return found;
}

/** The offset of a line; lines are asked for in their order. */
function offsets(text) {
  let [line, at] = [0, 0];
  return (wanted) => {
    for (; line < wanted; line += 1) at = text.indexOf("\n", at) + 1;
    return at;
  };
}

// A line that may become a fence or a formula with the next character.
const HALF = /(?:^|\n)[ \t>]*(?:`{1,2}|~{1,2}|\$)$|\\$/;

/** A growing text without what means nothing yet. */
export function readable(text) {
  const half = HALF.exec(text);
  return half ? text.slice(0, half[0].startsWith("\n") ? half.index + 1 : half.index) : text;
}

const DEFINITION = /^[ \t>]{0,9}\[[^\]\n]+\]:/m;

/** `[name]: address` anywhere makes links elsewhere, above it too. */
export const hasDefinitions = (text) => DEFINITION.test(text);
