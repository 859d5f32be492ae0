// The chat: wires the composer, the list of conversations, the thread and the settings to the talk.

import { models } from "../lib/api.js";
import { find, h, icon, iconButton, say } from "../lib/dom.js";
import { count } from "../lib/format.js";
import { loadSettings, saveSettings } from "./store.js";
import { Composer } from "./composer.js";
import { SettingsSheet } from "./settings.js";
import { Talk } from "./conversation.js";
import { Thread } from "./thread.js";

const STARTERS = [
  "Explain how a windlass works",
  "Write a haiku about a quiet server room",
  "Compare TCP and UDP in a small table",
];

export class Chat {
  /** page: {toast(text, action), announce(text), askKey(), go(route)} */
  constructor(page) {
    this.page = page;
    this.settings = loadSettings();
    this.talk = new Talk(this, this.settings);
    this.thread = new Thread({ again: () => this.talk.regenerate(), edit: (text) => this.talk.edit(text) });
    this.composer = new Composer({
      send: (text) => this.send(text),
      stop: () => this.talk.stop(),
      editLast: () => this.#editLast(),
    });
    this.sheet = new SettingsSheet(
      this.settings,
      () => this.#settingsChanged(),
      () => this.#removeAll(),
    );
    this.context = null;
    this.#furnish();
    this.list();
    this.open();
    this.loadModels();
  }

  #furnish() {
    find("#new-chat").append(icon("plus"), "New chat");
    find("#new-chat").addEventListener("click", () => this.#leave(""));
    find("#open-side").append(icon("menu"));
    find("#open-side").setAttribute("aria-label", "Conversations");
    find("#open-side").addEventListener("click", () => this.#side(true));
    find("#veil").addEventListener("click", () => this.#side(false));
    find("#open-settings").append(icon("sliders"));
    find("#open-settings").addEventListener("click", () => this.sheet.open());
    find("#model").addEventListener("change", ({ target }) => this.#choose(target.value));
    find("#starters").append(...STARTERS.map((text) => h("button", { type: "button", onclick: () => this.send(text) }, text)));
    document.addEventListener("keydown", (event) => this.#escape(event));
    this.#settingsChanged();
  }

  // --- models --------------------------------------------------------------------------------------------------------

  async loadModels() {
    try {
      this.#offer(await models());
    } catch (error) {
      if (error.kind === "key") this.page.askKey();
      else this.#offer([]);
    }
  }

  #offer(names) {
    const picker = find("#model");
    picker.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    picker.disabled = names.length < 2;
    if (!names.length) picker.append(h("option", { value: "" }, "No model yet"));
    picker.value = names.includes(this.settings.model) ? this.settings.model : (names[0] ?? "");
    this.talk.model = picker.value;
    this.#welcome();
  }

  #choose(name) {
    this.talk.model = name;
    this.settings.model = name;
    saveSettings(this.settings);
    this.#welcome();
  }

  /** The server's state changed: a model that was loading may be there now. */
  status({ link, status }) {
    const ready = link === "live" && status.state === "ready";
    if (ready && (!this.talk.model || this.wasDown)) this.loadModels();
    this.wasDown = !ready && link !== "none";
    this.context = status?.context_tokens ?? null;
    this.#welcome();
  }

  #welcome() {
    const room = this.context ? `, with room for ${count(this.context)} tokens` : "";
    say(
      find("#welcome-model"),
      this.talk.model ? `You are talking to ${this.talk.model}${room}.` : "The model is not ready yet.",
    );
  }

  // --- what the talk tells -------------------------------------------------------------------------------------------

  list() {
    const items = this.talk.conversations.map((one) => this.#item(one));
    find("#conversations").replaceChildren(...items);
  }

  open() {
    const { current, answer } = this.talk;
    find("#welcome").hidden = current.messages.length > 0;
    this.thread.show(current, answer);
    this.composer.busy(Boolean(answer));
    for (const item of find("#conversations").children) item.classList.toggle("current", item.dataset.id === current.id);
    if (current.messages.length && this.talk.conversations.includes(current)) this.page.go(`#/chat/${current.id}`, true);
    if (answer) this.page.announce("Waiting for the answer");
  }

  progress() {
    this.thread.progress(this.talk.answer);
  }

  done(message) {
    this.composer.busy(false);
    this.thread.done(this.talk.current);
    if (message.error?.kind === "key") this.page.askKey();
    // Once, when it is complete: read out word by word it would drown everything else.
    this.page.announce(
      message.error ? "" : `${message.finish === "stopped" ? "Stopped. " : ""}${message.content.slice(0, 2000)}`,
    );
  }

  full() {
    this.page.toast("This browser has no room left, so this chat will not be kept.");
  }

  // --- what the user does --------------------------------------------------------------------------------------------

  send(text) {
    if (this.talk.answer || !text.trim()) return false;
    this.talk.send(text);
    return true;
  }

  keyGiven() {
    this.loadModels();
    if (this.talk.current.messages.at(-1)?.error?.kind === "key") this.talk.regenerate();
  }

  route(id) {
    this.#side(false);
    if (id) this.talk.open(id);
    else if (this.talk.current.messages.length) this.talk.fresh();
    this.composer.focus();
  }

  #leave(id) {
    this.#side(false);
    this.page.go(id ? `#/chat/${id}` : "#/chat");
  }

  #item(conversation) {
    const open = h(
      "button",
      { type: "button", class: "open", onclick: () => this.#leave(conversation.id) },
      h("span", {}, conversation.title),
    );
    const remove = iconButton("trash", `Delete “${conversation.title}”`, () => this.#remove(conversation.id));
    const classes = [
      "conversation",
      conversation === this.talk.current && "current",
      this.talk.isAnswering(conversation.id) && "busy",
    ];
    return h("li", { class: classes.filter(Boolean).join(" "), "data-id": conversation.id }, open, remove);
  }

  #remove(id) {
    const wasCurrent = this.talk.current.id === id;
    const removed = this.talk.remove(id);
    if (wasCurrent) this.page.go("#/chat", true);
    this.page.toast("Chat deleted.", { label: "Undo", run: () => this.talk.restore(removed) });
  }

  #removeAll() {
    const removed = [...this.talk.conversations];
    for (const { id } of removed) this.talk.remove(id);
    this.page.go("#/chat", true);
    this.page.toast("All chats deleted.", { label: "Undo", run: () => removed.forEach((one) => this.talk.restore(one)) });
  }

  #editLast() {
    const last = this.talk.current.messages.findLast(({ role }) => role === "user");
    if (last && !this.talk.answer) this.thread.startEdit(last);
  }

  #escape(event) {
    if (event.key !== "Escape" || find("dialog[open]") || find("#chat").hidden) return;
    if (find("#side").classList.contains("shown")) this.#side(false);
    else if (this.talk.answer) this.talk.stop();
  }

  #side(shown) {
    find("#side").classList.toggle("shown", shown);
    find("#veil").classList.toggle("shown", shown);
    if (shown) find("#new-chat").focus();
  }

  #settingsChanged() {
    saveSettings(this.settings);
    const changed = this.sheet.isChanged();
    find("#open-settings").classList.toggle("marked", changed);
    const label = changed ? "Settings (changed from their defaults)" : "Settings";
    find("#open-settings").setAttribute("aria-label", label);
    find("#open-settings").title = label;
  }
}
