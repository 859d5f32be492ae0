// Totals since the start, the workers and their topology, and the plan with its reasons.

import { h, s, setText } from "../lib/dom.js";
import { count, percent } from "../lib/format.js";

/** Redraws only on changes, so that selections and scroll positions survive updates. */
class Panel {
  constructor(title, className) {
    this.body = h("div");
    this.element = h("section", { class: `panel ${className}`, "aria-label": title }, h("h2", {}, title), this.body);
  }

  draw(value, make) {
    const key = JSON.stringify(value);
    if (this.key !== key) this.body.replaceChildren(...make());
    this.key = key;
  }
}

// --- totals ----------------------------------------------------------------------------------------------------------

// Outcome -> [good, other or bad, label].
const OUTCOMES = {
  stop: ["good", "complete"],
  length: ["good", "stopped at the token limit"],
  cancelled: ["other", "client disconnected"],
  full: ["other", "rejected, queue full"],
  refused: ["other", "invalid request"],
  late: ["bad", "deadline exceeded"],
  unavailable: ["bad", "engine unavailable"],
  error: ["bad", "failed"],
};
const outcome = (name) => OUTCOMES[name] ?? ["other", name.replaceAll("_", " ")];

export class TotalsPanel extends Panel {
  constructor() {
    super("Since the start", "totals");
    const figure = (label) => ({ value: h("dd"), label: h("dt", {}, label) });
    this.figures = {
      requests: figure("requests"),
      prompt_tokens: figure("prompt tokens"),
      completion_tokens: figure("generated tokens"),
    };
    const list = h(
      "dl",
      { class: "big-list" },
      Object.values(this.figures).map(({ value, label }) => h("div", {}, label, value)),
    );
    this.element.insertBefore(list, this.body);
  }

  update({ totals }) {
    for (const [name, { value }] of Object.entries(this.figures)) setText(value, count(totals?.[name]));
    const outcomes = Object.entries(totals?.by_outcome ?? {})
      .filter(([, number]) => number > 0)
      .sort((a, b) => b[1] - a[1]);
    this.draw(outcomes, () => (outcomes.length ? drawOutcomes(outcomes) : []));
  }
}

function drawOutcomes(outcomes) {
  const total = outcomes.reduce((sum, [, number]) => sum + number, 0);
  const parts = outcomes.map(([name, number]) => {
    const part = h("div", { class: `outcome-part ${outcome(name)[0]}` });
    part.style.flexGrow = String(Math.max(number / total, 0.01));
    return part;
  });
  const rows = outcomes.map(([name, number]) =>
    h(
      "li",
      {},
      h("span", { class: `swatch ${outcome(name)[0]}` }),
      h("span", {}, outcome(name)[1]),
      h("span", { class: "number" }, count(number)),
      h("span", { class: "number dim" }, percent(number / total)),
    ),
  );
  return [h("div", { class: "outcome-bar", "aria-hidden": "true" }, parts), h("ul", { class: "outcomes" }, rows)];
}

// --- workers ---------------------------------------------------------------------------------------------------------

const CARD = 62;
const GAP = 12;

/** SVG curves from the server's card to every worker's card. Pure. */
export function edges(workers) {
  const height = workers * CARD + (workers - 1) * GAP;
  const ends = Array.from({ length: workers }, (_, index) => index * (CARD + GAP) + CARD / 2);
  return { height, paths: ends.map((y) => `M0 ${height / 2}C36 ${height / 2} 28 ${y} 64 ${y}`) };
}

export class WorkersPanel extends Panel {
  constructor() {
    super("Workers", "workers");
  }

  update(status) {
    const workers = status.workers?.length
      ? status.workers
      : [
          {
            name: `${status.engine ?? "The"} engine`,
            address: status.device ?? "this machine",
            state: status.state,
            share: "the whole model",
          },
        ];
    this.draw([workers, status.model], () => [drawWorkers(workers, status)]);
    this.element.classList.toggle("flowing", status.now?.running > 0);
  }
}

const isHealthy = (state) => ["ready", "running", "ok", "up", "alive", "connected"].includes(state);
const shareText = (share) => (typeof share === "number" ? percent(share) : (share ?? ""));

function card({ name, address, state, share }, className = "node") {
  const dot = h("span", { class: `dot ${isHealthy(state) ? "good" : "wait"}`, "aria-hidden": "true" });
  const second = [address, shareText(share), isHealthy(state) ? "" : state].filter(Boolean).join(" · ");
  return h("li", { class: className }, dot, h("div", {}, h("strong", {}, name), h("span", {}, second)));
}

function drawWorkers(workers, status) {
  const { height, paths } = edges(workers.length);
  const lines = s(
    "svg",
    { viewBox: `0 0 64 ${height}`, width: 64, height, class: "edges", "aria-hidden": "true" },
    paths.map((d, index) => s("path", { d, class: isHealthy(workers[index].state) ? "edge" : "edge down" })),
  );
  const server = card({ name: "This server", address: "API and page", state: status.state }, "node server");
  return h(
    "div",
    { class: "topology" },
    h("ul", { class: "column" }, server),
    lines,
    h(
      "ul",
      { class: "column" },
      workers.map((worker) => card(worker)),
    ),
  );
}

// --- plan ------------------------------------------------------------------------------------------------------------

export class PlanPanel extends Panel {
  constructor() {
    super("Plan", "plan");
  }

  update({ plan }) {
    this.element.hidden = !plan?.rows?.length;
    if (plan) this.draw(plan, () => [plan.title ? h("p", { class: "plan-title" }, plan.title) : h("p"), drawPlan(plan.rows)]);
  }
}

function drawPlan(rows) {
  const head = h(
    "tr",
    {},
    ["Setting", "Value", "Reason"].map((name) => h("th", { scope: "col" }, name)),
  );
  const body = rows.map(({ what, value, reason }) =>
    h("tr", {}, h("th", { scope: "row" }, what), h("td", {}, String(value)), h("td", {}, reason)),
  );
  return h(
    "div",
    { class: "table-box", tabindex: 0, role: "region", "aria-label": "Plan with its reasons" },
    h("table", {}, h("thead", {}, head), h("tbody", {}, body)),
  );
}
