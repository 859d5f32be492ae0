// A growing text as elements.

import { copyButton } from "../lib/copy.js";
import { h } from "../lib/dom.js";
import { clean } from "./clean.js";
import { complete, fill, stays } from "./fill.js";
import { become } from "./patch.js";
import { blocks, hasDefinitions, readable } from "./rules.js";

/** Only the last two blocks are parsed and changed while the text grows; `finish` reads the whole once more. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "prose" });
    this.text = "";
    this.isOpen = true;
    this.blocks = [];
  }

  update(text) {
    this.#show(readable(plain(text)), true);
  }

  finish(text) {
    this.#show(plain(text), false);
  }

  #show(text, isOpen) {
    if (text === this.text && isOpen === this.isOpen) return;
    const settled = isOpen && this.isOpen && text.startsWith(this.text) && !hasDefinitions(text) ? this.blocks.length - 2 : 0;
    const kept = this.blocks.slice(0, Math.max(0, settled));
    const base = kept.length ? this.blocks[settled].start : 0;
    const fresh = blocks(text.slice(base), isOpen).map(({ start, html }) => ({ start: start + base, html }));
    this.#draw(kept.length, fresh);
    this.blocks = [...kept, ...fresh];
    Object.assign(this, { text, isOpen });
    const done = isOpen ? this.blocks.length - 2 : this.blocks.length;
    for (let at = kept.length; at < done; at += 1) complete(this.element.children[at]);
  }

  #draw(kept, fresh) {
    fresh.forEach(({ html }, index) => {
      const place = this.element.children[kept + index];
      if (place && this.blocks[kept + index]?.html === html) return;
      const drawn = draw(html);
      if (!place) this.element.append(drawn);
      else if (!become(place, drawn, stays)) place.replaceWith(drawn);
      fill(this.element.children[kept + index]);
    });
    while (this.element.children.length > kept + fresh.length) this.element.lastElementChild.remove();
  }
}

const plain = (text) => text.replace(/\r\n?/g, "\n");

function draw(html) {
  const fragment = clean(html);
  for (const code of fragment.querySelectorAll("pre > code")) code.parentElement.replaceWith(figure(code));
  for (const table of fragment.querySelectorAll("table")) box(table);
  for (const item of fragment.querySelectorAll("li.task")) item.prepend(checkbox(item.classList.contains("done")));
  return fragment.firstElementChild;
}

function figure(code) {
  const name = code.className.replace(/^language-/, "");
  const copy = copyButton((button) => button.closest("figure").querySelector("code").textContent, "Copy code");
  const caption = h("figcaption", {}, h("span", {}, name), copy);
  return h("figure", { class: "code" }, caption, h("pre", { tabindex: 0, "aria-label": `Code, ${name}` }, code));
}

/** Wide tables scroll; being in the tab order, they scroll by keyboard too. */
function box(table) {
  const around = h("div", { class: "table-box", tabindex: 0, role: "region", "aria-label": "Table" });
  table.replaceWith(around);
  around.append(table);
}

const checkbox = (isDone) =>
  h("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "done" : "to do" });
