// The settings dialog and the API key dialog.

import { hasKey, setKey } from "../lib/api.js";
import { find, h, iconButton, setText } from "../lib/dom.js";
import { problem } from "./request.js";
import { DEFAULTS } from "./store.js";

const FIELDS = [
  {
    name: "temperature",
    label: "Temperature",
    hint: "0 is greedy; higher is more varied.",
    mode: "decimal",
  },
  { name: "top_p", label: "Top p", hint: "Samples from the most likely tokens up to this total probability.", mode: "decimal" },
  { name: "max_tokens", label: "Max tokens", hint: "Maximum length of the answer.", mode: "numeric" },
  { name: "seed", label: "Seed", hint: "The same seed and settings give the same answer.", mode: "numeric" },
];
const THINKING = [
  ["default", "Model default"],
  ["on", "On"],
  ["off", "Off"],
];

const LOOPS = [
  ["off", "Stop"],
  ["on", "Let run"],
];

export class SettingsSheet {
  constructor(settings, changed, removeAll) {
    this.settings = settings;
    this.changed = changed;
    this.removeAll = removeAll;
    this.element = find("#settings");
    // A click beside the sheet closes it.
    this.element.addEventListener("click", ({ target }) => target === this.element && this.element.close());
  }

  isChanged() {
    return Object.keys(DEFAULTS).some((name) => name !== "model" && this.settings[name].trim() !== DEFAULTS[name]);
  }

  open() {
    this.#draw();
    this.element.showModal();
  }

  #draw() {
    const close = iconButton("close", "Close settings", () => this.element.close());
    const title = h("div", { class: "sheet-top" }, h("h2", { id: "settings-title" }, "Settings"), close);
    const numbers = h(
      "div",
      { class: "pair" },
      FIELDS.map((field) => this.#number(field)),
    );
    this.element.replaceChildren(
      h("form", { method: "dialog" }, title, this.#system(), numbers, this.#choice("thinking", "Reasoning", THINKING), this.#choice("loops", "Answers that repeat themselves", LOOPS), this.#bottom()),
    );
  }

  #set(name, value) {
    this.settings[name] = value;
    this.changed();
  }

  #system() {
    const field = h("textarea", {
      id: "set-system",
      rows: 4,
      placeholder: "None",
      oninput: ({ target }) => this.#set("system", target.value),
    });
    field.value = this.settings.system;
    return h("div", { class: "field" }, h("label", { for: "set-system" }, "System prompt"), field);
  }

  /** The server's number, as it applies to this model. */
  #default(name) {
    const value = this.defaults?.[name];
    return value === undefined ? { max_tokens: "No limit", seed: "Random" }[name] ?? "Default" : String(value);
  }

  /** Only valid values are stored; errors are shown under the field. */
  #number({ name, label, hint, mode }) {
    const note = h("p", { class: "small", id: `about-${name}` }, hint);
    const field = h("input", {
      id: `set-${name}`,
      inputmode: mode,
      placeholder: this.#default(name),
      autocomplete: "off",
      "aria-describedby": `about-${name}`,
    });
    field.value = this.settings[name];
    field.addEventListener("input", () => {
      const wrong = problem(name, field.value);
      field.setAttribute("aria-invalid", String(Boolean(wrong)));
      setText(note, wrong || hint);
      if (!wrong) this.#set(name, field.value);
    });
    return h("div", { class: "field" }, h("label", { for: `set-${name}` }, label), field, note);
  }

  #choice(name, legend, values) {
    const choice = ([value, label]) => {
      const radio = h("input", {
        type: "radio",
        name,
        value,
        checked: this.settings[name] === value,
        onchange: () => this.#set(name, value),
      });
      return h("label", {}, radio, h("span", {}, label));
    };
    return h("fieldset", { class: "field" }, h("legend", {}, legend), h("div", { class: "segments" }, values.map(choice)));
  }

  #bottom() {
    const quiet = (label, run) => h("button", { type: "button", class: "quiet", onclick: run }, label);
    const reset = quiet("Reset to defaults", () => {
      Object.assign(this.settings, { ...DEFAULTS, model: this.settings.model });
      this.changed();
      this.#draw();
    });
    const forget = hasKey() && quiet("Forget API key", () => (setKey(""), this.#draw()));
    const remove = quiet("Delete all chats", () => (this.element.close(), this.removeAll()));
    return h(
      "div",
      { class: "sheet-bottom" },
      h("div", {}, reset, forget, remove),
      h("button", { class: "button primary" }, "Done"),
    );
  }
}

/** One dialog, however many requests were rejected. */
export function askKey(done) {
  const card = find("#key");
  if (card.open) return;
  const field = h("input", { id: "key-field", type: "password", autocomplete: "current-password", required: true });
  const why = hasKey()
    ? "The key was not accepted. Ask the operator of this server."
    : "Ask the operator of this server for one. It is kept in this tab only.";
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "key-title" }, "API key required"),
    h("p", {}, why),
    h("label", { for: "key-field" }, "API key"),
    field,
    h(
      "div",
      { class: "actions shown" },
      h("button", { type: "button", class: "button", onclick: () => card.close() }, "Not now"),
      h("button", { class: "button primary" }, "Continue"),
    ),
  );
  form.addEventListener("submit", () => (setKey(field.value.trim()), done()));
  card.replaceChildren(form);
  card.showModal();
  field.focus();
}
