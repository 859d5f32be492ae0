// Alerts, and the charts of the last day, as the server keeps them. Read once a minute while the view is open.

import { h, s, setText } from "../lib/dom.js";
import { duration, latency, number, percent, watts } from "../lib/format.js";
import { history } from "../lib/api.js";

const EVERY_MS = 60_000;
const SHOW = { ratio: percent, seconds: latency, watts, celsius: (value) => `${number(Math.round(value))} °C` };
const show = (unit, value) => (SHOW[unit] ?? ((plain) => `${number(plain)} ${unit}`))(value);

/** Points as an SVG path in a 100 x 100 box, and the largest value. Pure. */
export function path(points, now, span) {
  const top = Math.max(1e-9, ...points.map(([, value]) => value));
  const gap = Math.max(40, (2.5 * span) / 240);
  let before = -Infinity;
  const steps = points.map(([at, value]) => {
    const letter = at - before > gap ? "M" : "L";
    before = at;
    return `${letter}${(100 - ((now - at) / span) * 100).toFixed(2)} ${(98 - (value / top) * 96).toFixed(2)}`;
  });
  return { d: steps.join(""), top };
}

function alertRow(alert, now) {
  return h(
    "li",
    { class: `alert ${alert.state}` },
    h("strong", {}, alert.summary),
    h("span", { class: "dim" }, `${alert.state} for ${duration(now - alert.since)}, ${alert.severity}, ${alert.name}`),
    h("span", {}, alert.action),
  );
}

function chartRow({ title, unit, label, points }, now, span) {
  const { d, top } = path(points, now, span);
  const last = points.at(-1)[1];
  const name = label ? `${title} ${label}` : title;
  const words = `${name}: now ${show(unit, last)}, at most ${show(unit, top)} in ${duration(span)}`;
  const svg = s(
    "svg",
    { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": words },
    s("path", { class: "line line-0", d }),
  );
  return h("div", { class: "day-chart" }, h("div", { class: "bar-top" }, h("span", {}, name), h("span", { class: "dim" }, show(unit, last))), h("div", { class: "chart" }, svg));
}

export class HistoryPanel {
  constructor() {
    this.state = h("p", { class: "under" });
    this.alerts = h("ul", { class: "alerts", role: "status" });
    this.charts = h("div", { class: "day-charts" });
    this.element = h("section", { class: "panel day", "aria-label": "Alerts and the last day", hidden: true }, h("h2", {}, "Alerts and the last day"), this.state, this.alerts, this.charts);
    this.readAt = -Infinity;
  }

  update(status) {
    const now = Date.now();
    if (!status.has_history || now - this.readAt < EVERY_MS) return;
    this.readAt = now;
    history().then(
      (watched) => this.#draw(watched),
      () => (this.element.hidden = true),
    );
  }

  #draw({ now, alerts, charts }) {
    this.element.hidden = false;
    const firing = alerts.filter(({ state }) => state === "firing");
    setText(this.state, firing.length ? `${firing.length} firing` : "No alert is firing.");
    this.alerts.replaceChildren(...alerts.map((alert) => alertRow(alert, now)));
    const shown = charts.filter(({ points }) => points.length > 1);
    const first = Math.min(now - 600, ...shown.map(({ points }) => points[0][0]));
    this.charts.replaceChildren(...shown.map((chart) => chartRow(chart, now, now - first)));
  }
}
