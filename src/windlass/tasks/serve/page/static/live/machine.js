// Memory of each device against the plan, utilization, and energy.

import { h, setText } from "../lib/dom.js";
import { bytes, energy, number, percent, watts } from "../lib/format.js";

const within = (part, whole) => (whole > 0 && Number.isFinite(part) ? Math.min(100, Math.max(0, (part / whole) * 100)) : 0);

/** A bar with a mark at the planned value. */
class Bar {
  constructor(name) {
    this.name = h("span", { class: "bar-name" }, name);
    this.text = h("span", { class: "bar-text" });
    this.note = h("p", { class: "small" });
    this.fill = h("div", { class: "fill" });
    this.part = h("div", { class: "fill part" });
    this.mark = h("div", { class: "mark", hidden: true, title: "Planned" });
    this.track = h("div", { class: "track", role: "img" }, this.fill, this.part, this.mark);
    this.element = h("div", { class: "bar" }, h("div", { class: "bar-top" }, this.name, this.text), this.track, this.note);
  }

  update({ used, total, planned = null, part = null, text, note = "" }) {
    this.fill.style.width = `${within(used, total)}%`;
    this.part.style.width = `${within(part, total)}%`;
    this.mark.hidden = !(planned > 0 && total > 0);
    this.mark.style.left = `${within(planned, total)}%`;
    this.fill.classList.toggle("behind", part !== null);
    this.track.classList.toggle("over", planned > 0 && (part ?? used) > planned * 1.02);
    this.track.setAttribute("aria-label", `${text}${note ? `; ${note}` : ""}`);
    setText(this.text, text);
    setText(this.note, note);
  }
}

export class MachinePanel {
  constructor() {
    this.memory = h("div", { class: "bars" });
    this.use = h("div", { class: "bars" });
    this.facts = h("dl", { class: "figures-list" });
    this.bars = new Map();
    this.element = h(
      "section",
      { class: "panel machine", "aria-label": "Machine" },
      h("div", {}, h("h2", {}, "Memory"), this.memory),
      h("div", {}, h("h2", {}, "Utilization"), this.use, this.facts),
    );
  }

  #bar(where, key, name) {
    if (!this.bars.has(key)) this.bars.set(key, new Bar(name));
    const bar = this.bars.get(key);
    if (bar.element.parentNode !== where) where.append(bar.element);
    return bar;
  }

  update(status) {
    const { machine } = status;
    this.element.hidden = !machine;
    if (!machine) return;
    // Without a GPU the planned device is the host itself: one bar, not two.
    const devices = machine.devices ?? [];
    const host = devices.find((device) => device.memory_total_bytes === machine.memory_total_bytes);
    devices.filter((device) => device !== host).forEach((device, index) => this.#device(device, index));
    this.#host(machine, host?.planned_bytes);
    this.#energy(machine, status.totals);
  }

  #device(device, index) {
    const { memory_bytes: used, memory_total_bytes: total, planned_bytes: planned } = device;
    const text = total > 0 ? `${bytes(used)} of ${bytes(total)}` : bytes(used);
    const note = planned > 0 ? `Planned ${bytes(planned)}, ${compare(used, planned)}` : "";
    this.#bar(this.memory, `memory-${index}`, device.name).update({ used, total, planned, text, note });
    if (!Number.isFinite(device.use_percent)) return;
    const power = Number.isFinite(device.power_watts) ? `${watts(device.power_watts)}` : "";
    this.#bar(this.use, `use-${index}`, device.name).update({
      used: device.use_percent,
      total: 100,
      text: percent(device.use_percent / 100),
      note: power,
    });
  }

  #host({ memory_bytes: used, memory_total_bytes: total, process_bytes: part, cpu_percent: cpu }, planned) {
    const own = `${bytes(part)} used by this server and its engine`;
    const note = planned > 0 ? `${own}; planned ${bytes(planned)}` : own;
    this.#bar(this.memory, "host", "Host memory").update({
      used,
      total,
      part,
      planned,
      text: `${bytes(used)} of ${bytes(total)}`,
      note,
    });
    if (Number.isFinite(cpu)) this.#bar(this.use, "cpu", "CPU").update({ used: cpu, total: 100, text: percent(cpu / 100) });
  }

  #energy({ energy_joules: joules, energy_source: source }, totals) {
    const known = Number.isFinite(joules);
    const each = known && totals?.completion_tokens > 0 ? `${number(joules / totals.completion_tokens)} J` : null;
    const rows = known
      ? [
          ["Energy since start", energy(joules)],
          ["Per generated token", each],
          ["Measured by", source],
        ]
      : [["Energy", "not available"]];
    const key = JSON.stringify(rows);
    if (this.shown !== key)
      this.facts.replaceChildren(
        ...rows.filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
      );
    this.shown = key;
  }
}

function compare(used, planned) {
  const difference = used - planned;
  if (Math.abs(difference) < planned * 0.005) return "as planned";
  return `${bytes(Math.abs(difference))} ${difference < 0 ? "less" : "more"} so far`;
}
