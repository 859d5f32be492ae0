// Inline markdown: code, links, emphasis; math is kept as is. Pure; linear time for any input.

const SPECIAL = /[\\`*_~[\]!<$&\n]|https?:\/\//g;
const BARE_URL = /https?:\/\/[^\s<>"`]+/y;
const ANGLED = /<(https?:\/\/[^\s<>]+|[\w.+-]+@[\w-]+(?:\.[\w-]+)+)>/y;
const BREAK = /<br ?\/?>/iy;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,6}));/y;
const MATH = /\$\$[^$\n]+\$\$|\$(?=\S)[^$\n]*(?<=\S)\$(?!\d)/y;
const DESTINATION = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const NAMED = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  copy: "©",
  mdash: "—",
  ndash: "–",
  hellip: "…",
  times: "×",
};
const MAX_OPEN = 48; // emphasis in emphasis; what is deeper is text
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

const text = (value) => ({ kind: "text", text: value });

/** The URL if a link may point to it, else null. The browser's own parser determines the scheme. */
export function safeAddress(address) {
  if (!URL.canParse(address)) return null;
  const url = new URL(address);
  return SCHEMES.has(url.protocol) ? url.href : null;
}

export function inline(source) {
  return new Scanner(source).run();
}

class Scanner {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.nodes = [];
    this.brackets = [];
    this.missing = new Set(); // closers that do not come any more, so that none is looked for twice
  }

  run() {
    while (this.at < this.source.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(this.source);
      const stop = found ? found.index : this.source.length;
      if (stop > this.at) this.nodes.push(text(this.source.slice(this.at, stop)));
      this.at = stop;
      if (found && !this.special(found[0])) this.take(found[0].startsWith("http") ? 4 : 1);
    }
    return emphasise(this.nodes);
  }

  take(length) {
    this.nodes.push(text(this.source.slice(this.at, this.at + length)));
    this.at += length;
  }

  push(node, length) {
    this.nodes.push(node);
    this.at += length;
    return true;
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.source);
  }

  special(mark) {
    switch (mark) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "*":
      case "_":
      case "~":
        return this.delimiter(mark);
      case "[":
        return this.open(false, 1);
      case "!":
        return this.source[this.at + 1] === "[" && this.open(true, 2);
      case "]":
        return this.close();
      case "<":
        return this.angled();
      case "$":
        return this.whole(MATH, "math");
      case "&":
        return this.entity();
      case "\n":
        return this.push({ kind: "break" }, 1);
      default:
        return this.bare();
    }
  }

  escape() {
    const next = this.source[this.at + 1];
    if (next === "(" || next === "[") return this.mathUntil(next === "(" ? "\\)" : "\\]");
    if (next === "\n") return this.push({ kind: "break" }, 2);
    return next !== undefined && PUNCTUATION.test(next) && this.push(text(next), 2);
  }

  mathUntil(close) {
    const end = this.missing.has(close) ? -1 : this.source.indexOf(close, this.at + 2);
    if (end < 0) {
      this.missing.add(close);
      return this.push(text(this.source[this.at + 1]), 2);
    }
    return this.push({ kind: "math", text: this.source.slice(this.at, end + 2) }, end + 2 - this.at);
  }

  code() {
    const run = /`+/y;
    run.lastIndex = this.at;
    const ticks = run.exec(this.source)[0];
    const start = this.at + ticks.length;
    const end = this.missing.has(ticks) ? -1 : this.closing(ticks, start);
    if (end < 0) {
      this.missing.add(ticks);
      return this.push(text(ticks), ticks.length);
    }
    const inside = this.source.slice(start, end).replaceAll("\n", " ");
    const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    return this.push({ kind: "code", text: padded ? inside.slice(1, -1) : inside }, end + ticks.length - this.at);
  }

  closing(ticks, from) {
    const run = /`+/g;
    run.lastIndex = from;
    for (let found = run.exec(this.source); found; found = run.exec(this.source)) {
      if (found[0].length === ticks.length) return found.index;
    }
    return -1;
  }

  whole(pattern, kind) {
    const found = this.match(pattern);
    return found !== null && this.push({ kind, text: found[0] }, found[0].length);
  }

  entity() {
    const found = this.match(ENTITY);
    if (!found) return false;
    const point = found[1] ? Number(found[1]) : found[2] ? Number.parseInt(found[2], 16) : null;
    const known = point === null ? (Object.hasOwn(NAMED, found[3]) ? NAMED[found[3]] : null) : character(point);
    return known !== null && this.push(text(known), found[0].length);
  }

  angled() {
    const line = this.match(BREAK);
    if (line) return this.push({ kind: "break" }, line[0].length);
    const found = this.match(ANGLED);
    if (!found) return false;
    const address = safeAddress(found[1].includes("://") ? found[1] : `mailto:${found[1]}`);
    return address !== null && this.push({ kind: "link", address, children: [text(found[1])] }, found[0].length);
  }

  bare() {
    const found = this.match(BARE_URL);
    if (!found) return false;
    const shown = trimUrl(found[0]);
    const address = safeAddress(shown);
    return address !== null && this.push({ kind: "link", address, children: [text(shown)] }, shown.length);
  }

  // --- links ---------------------------------------------------------------------------------------------------------

  open(image, length) {
    this.brackets.push({ at: this.nodes.length, image });
    return this.push(text(image ? "![" : "["), length);
  }

  close() {
    const bracket = this.brackets.pop();
    if (!bracket || this.source[this.at + 1] !== "(") return false;
    this.at += 1;
    const found = this.match(DESTINATION);
    this.at -= 1;
    if (!found) return false;
    const inside = emphasise(this.nodes.splice(bracket.at).slice(1));
    const address = safeAddress((found[1] ?? found[2]).replace(/\\(.)/g, "$1"));
    if (!bracket.image) this.brackets = []; // no link in a link
    return this.push(link(address, inside, bracket.image), 1 + found[0].length);
  }

  // --- emphasis ------------------------------------------------------------------------------------------------------

  delimiter(mark) {
    let end = this.at;
    while (this.source[end] === mark) end += 1;
    const length = end - this.at;
    if (mark === "~" && length !== 2) return this.push(text(mark.repeat(length)), length);
    const before = this.source[this.at - 1] ?? " ";
    const after = this.source[end] ?? " ";
    const [space, word] = [/\s/, (c) => !/\s/.test(c) && !PUNCTUATION.test(c)];
    const left = !space.test(after) && (word(after) || !word(before));
    const right = !space.test(before) && (word(before) || !word(after));
    const inWord = mark === "_" && word(before) && word(after);
    return this.push(
      { kind: "delimiter", mark, length, whole: length, opens: left && !inWord, closes: right && !inWord },
      length,
    );
  }
}

function character(point) {
  const isCharacter = point > 0 && point <= 0x10ffff && !(point >= 0xd800 && point <= 0xdfff);
  return String.fromCodePoint(isCharacter ? point : 0xfffd);
}

/** Trailing punctuation is not part of a bare URL, nor is a bracket opened before it. */
function trimUrl(url) {
  let end = url.length;
  let open = 0;
  for (const c of url) open += c === "(" ? 1 : c === ")" ? -1 : 0;
  for (; end > 0; end -= 1) {
    const last = url[end - 1];
    if (last === ")" && open < 0) open += 1;
    else if (!".,;:!?'\"*_~]|".includes(last)) break;
  }
  return url.slice(0, end);
}

const unlinked = (nodes) => nodes.flatMap((node) => (node.kind === "link" ? node.children : [node]));

function link(address, inside, image) {
  const label = inside.length ? unlinked(inside) : [text(address ?? "")];
  if (address === null) return { kind: "group", children: label };
  return { kind: image ? "image" : "link", address, children: label };
}

/** CommonMark's rule of delimiters that open and close, with the openers on a stack. */
function emphasise(nodes) {
  const out = [];
  const openers = [];
  for (const node of nodes) {
    if (node.kind !== "delimiter") {
      out.push(node);
      continue;
    }
    if (node.closes) pair(node, out, openers);
    if (node.length === 0) continue;
    if (node.opens && openers.length < MAX_OPEN) openers.push({ node, at: out.length });
    out.push(node);
  }
  return joined(out);
}

function pair(closer, out, openers) {
  while (closer.length > 0) {
    const which = openers.findLastIndex(({ node }) => fits(node, closer));
    if (which < 0) return;
    const { node: opener, at } = openers[which];
    const used = opener.length >= 2 && closer.length >= 2 ? 2 : 1;
    const children = joined(out.splice(at + 1));
    openers.length = which + 1;
    opener.length -= used;
    closer.length -= used;
    if (opener.length === 0) {
      out.pop();
      openers.pop();
    }
    out.push({ kind: closer.mark === "~" ? "deleted" : used === 2 ? "strong" : "emphasis", children });
  }
}

function fits(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  if (opener.mark === "~") return true;
  const either = opener.closes || closer.opens;
  return !either || (opener.whole + closer.whole) % 3 !== 0 || (opener.whole % 3 === 0 && closer.whole % 3 === 0);
}

/** Unmatched delimiters become text; adjacent texts are joined. */
function joined(nodes) {
  const out = [];
  for (const node of nodes) {
    const one = node.kind === "delimiter" ? text(node.mark.repeat(node.length)) : node;
    if (one.kind === "text" && out.at(-1)?.kind === "text") out[out.length - 1] = text(out.at(-1).text + one.text);
    else if (one.kind !== "text" || one.text !== "") out.push(one);
  }
  return out;
}
