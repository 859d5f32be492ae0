// The sheet of settings, and the card that asks for a key.

import { hasKey, setKey } from "../lib/api.js";
import { find, h, iconButton, say } from "../lib/dom.js";
import { problem } from "./request.js";
import { DEFAULTS } from "./store.js";

const FIELDS = [
  {
    name: "temperature",
    label: "Temperature",
    hint: "0 always takes the likeliest word; higher is more varied.",
    mode: "decimal",
  },
  { name: "top_p", label: "Top p", hint: "Only the likeliest words that together reach this share.", mode: "decimal" },
  { name: "max_tokens", label: "Longest answer", hint: "In tokens.", mode: "numeric" },
  { name: "seed", label: "Seed", hint: "The same seed and settings give the same answer.", mode: "numeric" },
];
const THINKING = [
  ["default", "Model decides"],
  ["on", "On"],
  ["off", "Off"],
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
      h("form", { method: "dialog" }, title, this.#system(), numbers, this.#thinking(), this.#bottom()),
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

  /** Only a value that holds is kept; what is wrong is said under the field. */
  #number({ name, label, hint, mode }) {
    const note = h("p", { class: "small", id: `about-${name}` }, hint);
    const field = h("input", {
      id: `set-${name}`,
      inputmode: mode,
      placeholder: "Server’s default",
      autocomplete: "off",
      "aria-describedby": `about-${name}`,
    });
    field.value = this.settings[name];
    field.addEventListener("input", () => {
      const wrong = problem(name, field.value);
      field.setAttribute("aria-invalid", String(Boolean(wrong)));
      say(note, wrong || hint);
      if (!wrong) this.#set(name, field.value);
    });
    return h("div", { class: "field" }, h("label", { for: `set-${name}` }, label), field, note);
  }

  #thinking() {
    const choice = ([value, label]) => {
      const radio = h("input", {
        type: "radio",
        name: "thinking",
        value,
        checked: this.settings.thinking === value,
        onchange: () => this.#set("thinking", value),
      });
      return h("label", {}, radio, h("span", {}, label));
    };
    return h(
      "fieldset",
      { class: "field" },
      h("legend", {}, "Thinking before the answer"),
      h("div", { class: "segments" }, THINKING.map(choice)),
    );
  }

  #bottom() {
    const quiet = (label, run) => h("button", { type: "button", class: "quiet", onclick: run }, label);
    const reset = quiet("Reset to defaults", () => {
      Object.assign(this.settings, { ...DEFAULTS, model: this.settings.model });
      this.changed();
      this.#draw();
    });
    const forget = hasKey() && quiet("Forget the key", () => (setKey(""), this.#draw()));
    const remove = quiet("Delete all chats", () => (this.element.close(), this.removeAll()));
    return h(
      "div",
      { class: "sheet-bottom" },
      h("div", {}, reset, forget, remove),
      h("button", { class: "button primary" }, "Done"),
    );
  }
}

/** Asks once, however many requests were refused meanwhile. */
export function askKey(done) {
  const card = find("#key");
  if (card.open) return;
  const field = h("input", { id: "key-field", type: "password", autocomplete: "current-password", required: true });
  const why = hasKey()
    ? "The key you gave was not accepted. Ask whoever runs this server."
    : "Whoever runs it can tell you the key. It stays in this tab only.";
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "key-title" }, "This server asks for a key"),
    h("p", {}, why),
    h("label", { for: "key-field" }, "Key"),
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
