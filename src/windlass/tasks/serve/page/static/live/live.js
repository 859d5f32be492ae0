// The live view: current server metrics and their recent history.

import { Chart } from "./chart.js";
import { h, setText } from "../lib/dom.js";
import { bytes, count, latency, number, percent } from "../lib/format.js";
import { HistoryPanel } from "./history.js";
import { MachinePanel } from "./machine.js";
import { stateOf } from "./engine_state.js";
import { PlanPanel, TotalsPanel, WorkersPanel } from "./panels.js";

const pair =
  (unit, first, second) =>
  ({ now }) => [unit(now[first]), `p95 ${unit(now[second])}`];

// read: the value and the text under it.
const TILES = [
  {
    label: "Prompt tokens",
    series: [{ key: "prompt_tokens_per_second" }],
    show: number,
    read: ({ now }) => [number(now.prompt_tokens_per_second), "per second"],
  },
  {
    label: "Requests",
    series: [
      { key: "running", name: "running" },
      { key: "waiting", name: "waiting" },
    ],
    show: number,
    read: ({ now }) => [count(now.running), `running, ${count(now.waiting)} waiting`],
  },
  {
    label: "KV cache",
    series: [{ key: "kv_used" }],
    show: percent,
    top: 1,
    read: ({ now }) => [percent(now.kv_used), now.kv_total > 0 ? `of ${bytes(now.kv_total)}` : "in use"],
  },
  {
    label: "Prefix cache hits",
    series: [{ key: "prefix_hit_rate" }],
    show: percent,
    top: 1,
    read: ({ now }) => [percent(now.prefix_hit_rate), "of prompt tokens"],
  },
  {
    label: "Time to first token",
    series: [
      { key: "ttft_p50", name: "p50" },
      { key: "ttft_p95", name: "p95" },
    ],
    show: latency,
    read: pair(latency, "ttft_p50", "ttft_p95"),
  },
  {
    label: "Inter-token latency",
    series: [
      { key: "itl_p50", name: "p50" },
      { key: "itl_p95", name: "p95" },
    ],
    show: latency,
    read: pair(latency, "itl_p50", "itl_p95"),
  },
];

class Tile {
  constructor({ label, series, show, top, read }, className = "tile") {
    this.read = read;
    this.value = h("p", { class: "value" });
    this.under = h("p", { class: "under" });
    this.chart = new Chart({ label, series, show, top });
    this.element = h(
      "section",
      { class: className, "aria-label": label },
      h("div", {}, h("h3", {}, label), this.value, this.under),
      this.chart.element,
    );
  }

  update(status, history, now) {
    const [value, under] = this.read(status);
    // The unit is set smaller than the number.
    const [figure, unit = ""] = value.split(" ");
    if (this.shown !== value) this.value.replaceChildren(figure, ...(unit ? [h("small", {}, ` ${unit}`)] : []));
    this.shown = value;
    setText(this.under, under);
    this.chart.update(history, now);
  }
}

export class LiveView {
  constructor(element, askKey) {
    this.element = element;
    this.hero = new Tile(
      {
        label: "Generated tokens",
        series: [{ key: "tokens_per_second" }],
        show: number,
        read: ({ now }) => [`${number(now.tokens_per_second)} tokens/s`, "over all requests"],
      },
      "tile hero",
    );
    this.tiles = TILES.map((tile) => new Tile(tile));
    this.panels = [new MachinePanel(), new HistoryPanel(), new TotalsPanel(), new WorkersPanel(), new PlanPanel()];
    this.banner = this.#banner(askKey);
    this.body = h(
      "div",
      { class: "live-body", hidden: true },
      h(
        "div",
        { class: "tiles" },
        this.hero.element,
        this.tiles.map((tile) => tile.element),
      ),
      h(
        "div",
        { class: "panels" },
        this.panels.map((panel) => panel.element),
      ),
    );
    element.setAttribute("tabindex", "-1");
    element.append(h("div", { class: "live-inner" }, this.banner.element, this.body));
  }

  #banner(askKey) {
    const [title, text, facts] = [h("h1"), h("p", { class: "banner-text" }), h("p", { class: "facts" })];
    const bar = h("progress", { max: 1, hidden: true, "aria-label": "Loaded" });
    const key = h("button", { type: "button", class: "button primary", hidden: true, onclick: askKey }, "Enter API key");
    const words = h(
      "div",
      { class: "banner-words", role: "status" },
      h("div", { class: "banner-title" }, h("span", { class: "dot", "aria-hidden": "true" }), title),
      text,
    );
    return { title, text, facts, bar, key, element: h("header", { class: "banner" }, words, facts, key, bar) };
  }

  show(feed) {
    this.update(feed);
  }

  update({ link, status, history }) {
    if (this.element.hidden) return;
    this.#state(stateOf(link, status), link, status);
    this.body.hidden = !status;
    if (!status) return;
    const now = history.at(-1)?.at ?? Date.now();
    for (const tile of [this.hero, ...this.tiles]) tile.update(status, history, now);
    for (const panel of this.panels) panel.update(status);
    this.body.classList.toggle("stale", link !== "live");
  }

  #state({ tone, title, text, progress }, link, status) {
    const { banner } = this;
    banner.element.dataset.tone = tone;
    setText(banner.title, title);
    // Changes every second: not read out each time.
    banner.text.setAttribute("aria-live", "off");
    setText(banner.text, text);
    banner.bar.hidden = progress === undefined;
    if (progress === null) banner.bar.removeAttribute("value");
    else if (progress !== undefined) banner.bar.value = progress;
    banner.key.hidden = link !== "key";
    this.#facts(status);
  }

  #facts(status) {
    const context = status?.context_tokens ? `${count(status.context_tokens)} tokens of context` : null;
    const facts = [
      status?.model,
      status?.scheme,
      status?.kv && `KV ${status.kv}`,
      context,
      status?.device,
      status?.engine && `${status.engine} engine`,
    ].filter(Boolean);
    const key = facts.join("\n");
    if (this.shownFacts !== key) this.banner.facts.replaceChildren(...facts.map((fact) => h("span", {}, fact)));
    this.shownFacts = key;
  }
}
