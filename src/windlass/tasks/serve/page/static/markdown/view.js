// Renders the tree of parse.js as elements. All text becomes text nodes; the only attribute a model can set is a link's checked URL.

import { h, icon, setText } from "../lib/dom.js";
import { parse } from "./parse.js";

/** A growing text. Only the last two blocks are parsed and rendered again. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "prose" });
    this.text = "";
    this.blocks = [];
  }

  update(text) {
    if (text === this.text) return;
    const settled = text.startsWith(this.text) ? Math.max(0, this.blocks.length - 2) : 0;
    const base = settled < this.blocks.length && settled > 0 ? this.blocks[settled].start : 0;
    const fresh = parse(text.slice(base)).map((block) => ({ ...block, start: block.start + base }));
    this.#draw(settled, fresh, text);
    this.blocks = [...this.blocks.slice(0, settled), ...fresh];
    this.text = text;
  }

  #draw(settled, fresh, text) {
    const ends = fresh.map((_, index) => fresh[index + 1]?.start ?? text.length);
    fresh.forEach((block, index) => {
      block.source = text.slice(block.start, ends[index]);
      const at = settled + index;
      const old = this.blocks[at];
      const place = this.element.children[at];
      if (old?.source === block.source && place) return;
      if (place && old?.kind === "code" && block.kind === "code" && old.language === block.language) fillCode(place, block);
      else if (place) place.replaceWith(draw(block));
      else this.element.append(draw(block));
    });
    while (this.element.children.length > settled + fresh.length) this.element.lastElementChild.remove();
  }
}

function draw(block) {
  switch (block.kind) {
    case "heading":
      return h(`h${Math.min(6, block.level + 2)}`, { class: `level-${block.level}` }, spans(block.children));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, block.children.map(draw));
    case "code":
      return code(block);
    case "math":
      return h("p", { class: "math block" }, block.text);
    case "list":
      return list(block);
    case "table":
      return table(block);
    default:
      return h("p", {}, spans(block.children));
  }
}

function list({ ordered, first, loose, items }) {
  const drawn = items.map(({ done, children }) => {
    const inside = children.flatMap((block) => (block.kind === "paragraph" && !loose ? spans(block.children) : [draw(block)]));
    const box =
      done === null
        ? null
        : h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "to do" });
    return h("li", { class: done === null ? null : "task" }, box, inside);
  });
  return h(ordered ? "ol" : "ul", { start: ordered && first !== 1 ? first : null }, drawn);
}

function table({ align, head, rows }) {
  const row = (tag, cells) =>
    h(
      "tr",
      {},
      cells.map((cell, column) => h(tag, { class: align[column], scope: tag === "th" ? "col" : null }, spans(cell))),
    );
  const drawn = h(
    "table",
    {},
    h("thead", {}, row("th", head)),
    h(
      "tbody",
      {},
      rows.map((cells) => row("td", cells)),
    ),
  );
  // Wide tables scroll; being in the tab order, they scroll by keyboard too.
  return h("div", { class: "table-box", tabindex: 0, role: "region", "aria-label": "Table" }, drawn);
}

function code(block) {
  const name = block.language || "text";
  const body = h("code");
  const figure = h(
    "figure",
    { class: "code" },
    h(
      "figcaption",
      {},
      h("span", {}, name),
      copyButton(() => body.textContent, "Copy code"),
    ),
    h("pre", { tabindex: 0, "aria-label": `Code, ${name}` }, body),
  );
  fillCode(figure, block);
  return figure;
}

const fillCode = (figure, block) => setText(figure.querySelector("code"), block.text);

export function copyButton(text, label) {
  const button = h(
    "button",
    { type: "button", class: "quiet", "aria-label": label, title: label },
    icon("copy"),
    h("span", {}, "Copy"),
  );
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.replaceChildren(icon(copied ? "check" : "close"), h("span", {}, copied ? "Copied" : "Not copied"));
    setTimeout(() => button.replaceChildren(icon("copy"), h("span", {}, "Copy")), 1600);
  });
  return button;
}

/** Over plain HTTP from another machine there is no clipboard API; the old way still works. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "unseen", readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

const spans = (nodes) => nodes.map(span);

function span(node) {
  switch (node.kind) {
    case "text":
      return document.createTextNode(node.text);
    case "break":
      return h("br");
    case "code":
      return h("code", {}, node.text);
    case "math":
      return h("span", { class: "math" }, node.text);
    case "strong":
      return h("strong", {}, spans(node.children));
    case "emphasis":
      return h("em", {}, spans(node.children));
    case "deleted":
      return h("del", {}, spans(node.children));
    case "link":
      return anchor(node.address, spans(node.children));
    // Never loaded: an image URL can leak the conversation to its host.
    case "image":
      return anchor(node.address, ["Picture: ", ...spans(node.children)]);
    default:
      return h("span", {}, spans(node.children));
  }
}

const anchor = (address, children) => h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
