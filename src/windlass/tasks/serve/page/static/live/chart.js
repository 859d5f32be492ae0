// A line chart of the last minutes, in a stretched 100 x 100 view box, so that no layout measuring is needed.

import { h, s, setText } from "../lib/dom.js";
import { ceiling } from "../lib/format.js";
import { WINDOW_SECONDS } from "./status_feed.js";

const LEAST_SECONDS = 60; // so that the chart of a page just opened does not look empty
const GAP_MS = 5000; // a longer pause between values is a gap in the line

/** Points of one series as runs without gaps: [[x, y], ...], x and y in 0..100. Pure. */
export function runs(history, key, now, span, top) {
  const found = [];
  let before = -Infinity;
  for (const point of history) {
    const value = point[key];
    if (typeof value !== "number" || !Number.isFinite(value)) continue;
    if (point.at - before > GAP_MS) found.push([]);
    before = point.at;
    found.at(-1).push([100 - ((now - point.at) / span) * 100, 98 - Math.min(1, Math.max(0, value / top)) * 96]);
  }
  return found;
}

const join = (run) => run.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");
const linePath = (all) => all.map((run) => `M${join(run)}`).join("");
const areaPath = (all) => all.map((run) => `M${run[0][0].toFixed(2)} 100L${join(run)}L${run.at(-1)[0].toFixed(2)} 100Z`).join("");

export class Chart {
  /** series: [{key, name}], the first is drawn with the accent; `top` fixes the scale; `show` writes a value. */
  constructor({ label, series, show, top = null }) {
    Object.assign(this, { label, series, show, top });
    this.area = s("path", { class: "area" });
    this.lines = series.map((_, index) => s("path", { class: `line line-${index}` })).reverse();
    this.svg = s(
      "svg",
      { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label },
      this.area,
      this.lines,
    );
    this.cursor = h("div", { class: "cursor", hidden: true });
    this.bubble = h("div", { class: "bubble-value", hidden: true });
    this.scale = h("span", { class: "scale" });
    this.since = h("span", { class: "scale since" });
    this.element = h("div", { class: "chart" }, this.svg, this.scale, this.since, this.cursor, this.bubble);
    this.element.addEventListener("pointermove", (event) => this.#point(event));
    this.element.addEventListener("pointerleave", () => this.#leave());
    this.history = [];
  }

  update(history, now) {
    this.history = history;
    this.now = now;
    this.span = Math.min(WINDOW_SECONDS, Math.max(LEAST_SECONDS, (now - (history[0]?.at ?? now)) / 1000)) * 1000;
    const values = history.flatMap((point) => this.series.map(({ key }) => point[key])).filter(Number.isFinite);
    const top = this.top ?? ceiling(Math.max(0, ...values));
    this.series.forEach(({ key }, index) => {
      const drawn = runs(history, key, now, this.span, top);
      this.lines[this.lines.length - 1 - index].setAttribute("d", linePath(drawn));
      if (index === 0) this.area.setAttribute("d", areaPath(drawn));
    });
    setText(this.scale, this.show(top));
    setText(this.since, `${Math.round(this.span / 1000)} s ago`);
    const last = history.at(-1);
    this.svg.setAttribute("aria-label", `${this.label}, now ${last ? this.#describe(last) : "unknown"}`);
  }

  #describe(point) {
    return this.series.map(({ key, name }) => `${name ? `${name} ` : ""}${this.show(point[key])}`).join(", ");
  }

  #point(event) {
    if (!this.history.length) return;
    const box = this.element.getBoundingClientRect();
    const at = this.now - (1 - (event.clientX - box.left) / box.width) * this.span;
    const near = this.history.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best));
    const x = 100 - ((this.now - near.at) / this.span) * 100;
    this.cursor.style.left = `${x}%`;
    this.bubble.style.left = `${Math.min(92, Math.max(8, x))}%`;
    const ago = Math.round((this.now - near.at) / 1000);
    setText(this.bubble, `${this.#describe(near)}${ago > 0 ? `, ${ago} s ago` : ""}`);
    this.cursor.hidden = this.bubble.hidden = false;
  }

  #leave() {
    this.cursor.hidden = this.bubble.hidden = true;
  }
}
