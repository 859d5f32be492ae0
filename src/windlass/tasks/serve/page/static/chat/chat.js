// The chat view: connects composer, conversation list, thread and settings to the session.

import { models } from "../lib/api.js";
import { find, h, icon, iconButton, setText } from "../lib/dom.js";
import { count } from "../lib/format.js";
import { loadSettings, saveSettings } from "./store.js";
import { Composer } from "./composer.js";
import { SettingsSheet } from "./settings.js";
import { ChatSession } from "./conversation.js";
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
    this.session = new ChatSession(this, this.settings);
    this.thread = new Thread({ again: () => this.session.regenerate(), edit: (text) => this.session.edit(text) });
    this.composer = new Composer({
      send: (text) => this.send(text),
      stop: () => this.session.stop(),
      editLast: () => this.#editLast(),
    });
    this.sheet = new SettingsSheet(
      this.settings,
      () => this.#settingsChanged(),
      () => this.#removeAll(),
    );
    this.context = null;
    this.#setup();
    this.list();
    this.open();
    this.loadModels();
  }

  #setup() {
    find("#new-chat").append(icon("plus"), "New chat");
    find("#new-chat").addEventListener("click", () => this.#navigate(""));
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
    this.session.model = picker.value;
    this.#welcome();
  }

  #choose(name) {
    this.session.model = name;
    this.settings.model = name;
    saveSettings(this.settings);
    this.#welcome();
  }

  /** The server state changed: a model that was loading may be ready now. */
  status({ link, status }) {
    const ready = link === "live" && status.state === "ready";
    if (ready && (!this.session.model || this.wasDown)) this.loadModels();
    this.wasDown = !ready && link !== "none";
    this.context = status?.context_tokens ?? null;
    this.sheet.defaults = status?.sampling ?? this.sheet.defaults;
    this.#welcome();
  }

  #welcome() {
    const room = this.context ? ` (${count(this.context)} tokens of context)` : "";
    setText(
      find("#welcome-model"),
      this.session.model ? `Chatting with ${this.session.model}${room}.` : "The model is not ready yet.",
    );
  }

  // --- session events -------------------------------------------------------------------------------------------

  list() {
    const items = this.session.conversations.map((one) => this.#item(one));
    find("#conversations").replaceChildren(...items);
  }

  open() {
    const { current, answer } = this.session;
    find("#welcome").hidden = current.messages.length > 0;
    this.thread.show(current, answer);
    this.composer.busy(Boolean(answer));
    for (const item of find("#conversations").children) item.classList.toggle("current", item.dataset.id === current.id);
    if (current.messages.length && this.session.conversations.includes(current)) this.page.go(`#/chat/${current.id}`, true);
    if (answer) this.page.announce("Waiting for the answer");
  }

  progress() {
    this.thread.progress(this.session.answer);
  }

  done(message) {
    this.composer.busy(false);
    this.thread.done(this.session.current);
    if (message.error?.kind === "key") this.page.askKey();
    // Announced once, when complete: word by word it would drown out everything else.
    this.page.announce(
      message.error ? "" : `${message.finish === "stopped" ? "Stopped. " : ""}${message.content.slice(0, 2000)}`,
    );
  }

  storageFull() {
    this.page.toast("Browser storage is full, so this chat will not be saved.");
  }

  // --- user actions --------------------------------------------------------------------------------------------

  send(text) {
    if (this.session.answer || !text.trim()) return false;
    this.session.send(text);
    return true;
  }

  keyGiven() {
    this.loadModels();
    if (this.session.current.messages.at(-1)?.error?.kind === "key") this.session.regenerate();
  }

  route(id) {
    this.#side(false);
    if (id) this.session.open(id);
    else if (this.session.current.messages.length) this.session.startNew();
    this.composer.focus();
  }

  #navigate(id) {
    this.#side(false);
    this.page.go(id ? `#/chat/${id}` : "#/chat");
  }

  #item(conversation) {
    const open = h(
      "button",
      { type: "button", class: "open", onclick: () => this.#navigate(conversation.id) },
      h("span", {}, conversation.title),
    );
    const remove = iconButton("trash", `Delete “${conversation.title}”`, () => this.#remove(conversation.id));
    const classes = [
      "conversation",
      conversation === this.session.current && "current",
      this.session.isAnswering(conversation.id) && "busy",
    ];
    return h("li", { class: classes.filter(Boolean).join(" "), "data-id": conversation.id }, open, remove);
  }

  #remove(id) {
    const wasCurrent = this.session.current.id === id;
    const removed = this.session.remove(id);
    if (wasCurrent) this.page.go("#/chat", true);
    this.page.toast("Chat deleted.", { label: "Undo", run: () => this.session.restore(removed) });
  }

  #removeAll() {
    const removed = [...this.session.conversations];
    for (const { id } of removed) this.session.remove(id);
    this.page.go("#/chat", true);
    this.page.toast("All chats deleted.", { label: "Undo", run: () => removed.forEach((one) => this.session.restore(one)) });
  }

  #editLast() {
    const last = this.session.current.messages.findLast(({ role }) => role === "user");
    if (last && !this.session.answer) this.thread.startEdit(last);
  }

  #escape(event) {
    if (event.key !== "Escape" || find("dialog[open]") || find("#chat").hidden) return;
    if (find("#side").classList.contains("shown")) this.#side(false);
    else if (this.session.answer) this.session.stop();
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
