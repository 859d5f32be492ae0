// Markdown to a tree of plain values. Pure; view.js renders the tree.
//
// A useful part of CommonMark and GitHub's tables, chosen so that text may arrive in pieces: no construct reaches back further
// than the block before it. HTML is text. A line break in a paragraph is kept, as chat models intend.

import { inline } from "./inline.js";

const MAX_DEPTH = 10; // of quotes and lists in one another; deeper ones are shown as text
const MAX_COLUMNS = 64;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*))?$/;
const TASK = /^\[([ xX])\] +/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH_OPEN = /^ {0,3}(\$\$|\\\[)/;
const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

/** Blocks, each with `start`, the offset of its first line. */
export function parse(text) {
  const lines = text.split("\n");
  const offsets = [0];
  for (const line of lines) offsets.push(offsets.at(-1) + line.length + 1);
  return blocks(lines.map(plain), 0).map(({ line, ...block }) => ({ ...block, start: offsets[line] }));
}

/** Without the carriage return, and with tabs at its start as spaces. */
function plain(line) {
  const bare = line.endsWith("\r") ? line.slice(0, -1) : line;
  const tabs = /^[ ]*\t[ \t]*/.exec(bare);
  return tabs ? tabs[0].replaceAll("\t", "    ") + bare.slice(tabs[0].length) : bare;
}

const READERS = [fence, heading, rule, quote, list, math, table];

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = read(lines, at, depth) ?? paragraph(lines, at, depth);
    found.push({ ...block, line: at });
    at = next;
  }
  return found;
}

function read(lines, at, depth) {
  if (depth > MAX_DEPTH) return null;
  for (const reader of READERS) {
    const result = reader(lines, at, depth);
    if (result) return result;
  }
  return null;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const indent = indentOf(lines[at]);
  const close = new RegExp(`^ {0,3}\\${open[1][0]}{${open[1].length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const body = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return [{ kind: "code", language: open[2].trim().split(/\s/)[0], text: body.join("\n") }, end + 1];
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  return [{ kind: "heading", level: found[1].length, children: inline((found[2] ?? "").replace(/[ \t]+#+[ \t]*$/, "")) }, at + 1];
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? [{ kind: "rule" }, at + 1] : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", children: blocks(inside, depth + 1) }, end];
}

function math(lines, at) {
  const open = MATH_OPEN.exec(lines[at]);
  if (!open) return null;
  const close = open[1] === "$$" ? "$$" : "\\]";
  let end = at;
  const closes = (line, from) => line.indexOf(close, from) >= 0;
  if (!closes(lines[at], lines[at].indexOf(open[1]) + 2)) {
    end = at + 1;
    while (end < lines.length && !closes(lines[end], 0) && !isBlank(lines[end])) end += 1;
  }
  return [
    {
      kind: "math",
      text: lines
        .slice(at, end + 1)
        .join("\n")
        .trim(),
    },
    end + 1,
  ];
}

// --- lists -----------------------------------------------------------------------------------------------------------

function marker(line) {
  const found = ITEM.exec(line);
  if (!found || RULE.test(line)) return null;
  const [, indent, mark, gap = " ", rest = ""] = found;
  const width = gap.length > 4 ? 1 : gap.length;
  const ordered = mark.length > 1;
  return {
    indent: indent.length,
    ordered,
    style: mark.at(-1),
    number: ordered ? Number.parseInt(mark, 10) : null,
    inset: indent.length + mark.length + width,
    rest,
  };
}

function list(lines, at, depth) {
  const first = marker(lines[at]);
  if (!first) return null;
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const next = marker(lines[end]);
    if (!next || next.style !== first.style || next.indent > first.indent + 3) break;
    const [inside, after] = itemLines(lines, end, next);
    const ahead = skipBlank(lines, after);
    loose ||=
      inside.some((line, index) => isBlank(line) && index < inside.length - 1) ||
      (ahead > after && marker(lines[ahead] ?? "")?.style === first.style);
    items.push(item(inside, depth));
    end = ahead;
  }
  return [{ kind: "list", ordered: first.ordered, first: first.number, loose, items }, end];
}

function item(inside, depth) {
  const task = TASK.exec(inside[0] ?? "");
  const body = task ? [inside[0].slice(task[0].length), ...inside.slice(1)] : inside;
  return { done: task ? task[1] !== " " : null, children: blocks(body, depth + 1) };
}

/** The lines of one item without their indent, and where the next thing starts. Two columns of indent suffice: models are inexact. */
function itemLines(lines, at, { indent, inset, rest }) {
  const inside = [rest];
  let end = at + 1;
  while (end < lines.length) {
    const ahead = skipBlank(lines, end);
    if (ahead === lines.length) break;
    const line = lines[ahead];
    const deep = indentOf(line) >= Math.min(inset, indent + 2);
    const lazy = ahead === end && !isBlank(inside.at(-1)) && !marker(line) && !starts(lines, ahead);
    if (!deep && !lazy) break;
    for (; end < ahead; end += 1) inside.push("");
    inside.push(line.slice(Math.min(inset, indentOf(line))));
    end += 1;
  }
  return [inside, end];
}

function skipBlank(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at;
}

// --- tables and paragraphs -------------------------------------------------------------------------------------------

function cells(line) {
  const inside = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

const alignment = (mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left");

function isTable(lines, at) {
  const below = lines[at + 1];
  if (below === undefined || !lines[at].includes("|") || !DELIMITERS.test(below)) return false;
  const columns = cells(lines[at]).length;
  return columns <= MAX_COLUMNS && columns === cells(below).length;
}

function table(lines, at) {
  if (!isTable(lines, at)) return null;
  const align = cells(lines[at + 1]).map(alignment);
  const row = (line) => {
    const found = cells(line);
    return align.map((_, column) => inline(found[column] ?? ""));
  };
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && lines[end].includes("|")) end += 1;
  return [{ kind: "table", align, head: row(lines[at]), rows: lines.slice(at + 2, end).map(row) }, end];
}

/** Whether something other than a paragraph starts here; a year at the start of a line is not a list. */
function starts(lines, at) {
  const line = lines[at];
  const listed = marker(line);
  if (listed) return listed.rest !== "" && (listed.number ?? 1) <= 1;
  return (
    HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || FENCE.test(line) || MATH_OPEN.test(line) || isTable(lines, at)
  );
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && (depth > MAX_DEPTH || !starts(lines, end))) end += 1;
  const text = lines
    .slice(at, end)
    .map((line) => line.trimStart())
    .join("\n");
  return [{ kind: "paragraph", children: inline(text.trimEnd()) }, end];
}
