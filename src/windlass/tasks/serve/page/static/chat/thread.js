// The messages of the current conversation, scrolled to the newest.

import { find, h, icon } from "../lib/dom.js";
import { AnswerView, editMessage, userMessage } from "./message.js";
import { errorNotice } from "./error_notice.js";

const NEAR_PX = 60;

export class Thread {
  /** actions: {again(), edit(text)} */
  constructor(actions) {
    this.actions = actions;
    this.element = find("#thread");
    this.scroll = find("#scroll");
    this.latest = find("#latest");
    this.latest.append(icon("down"), h("span", {}, "Newest"));
    this.latest.addEventListener("click", () => this.toEnd());
    this.scroll.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.writing = null;
    this.follows = true;
    this.drawing = 0;
  }

  show(conversation, answer) {
    const last = conversation.messages.findLastIndex(({ role }) => role === "user");
    const elements = conversation.messages.map((message, index) =>
      this.#element(message, index, last, conversation.messages.length, answer),
    );
    this.writing = answer ? new AnswerView(answer.message.model) : null;
    this.element.replaceChildren(...elements, ...(this.writing ? [this.writing.element] : []));
    if (this.writing) this.writing.update(answer, performance.now());
    this.toEnd();
  }

  #element(message, index, last, length, answer) {
    if (message.role === "user") return userMessage(message, index === last && !answer ? () => this.startEdit(message) : null);
    const view = new AnswerView(message.model);
    view.finish(message, this.#answerActions(message, index === length - 1 && !answer));
    return view.element;
  }

  #answerActions(message, isLast) {
    const again = isLast ? () => this.actions.again() : null;
    if (!message.error) return { again };
    return { again: null, error: [errorNotice(message.error, again)] };
  }

  /** Redraws at most once per frame. */
  progress(answer) {
    if (this.drawing || !this.writing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      if (!this.writing) return;
      this.writing.update(answer, performance.now());
      if (this.follows) this.toEnd();
    });
  }

  /** The answer is complete: its element stays, so that nothing jumps. */
  done(conversation) {
    const view = this.writing;
    this.writing = null;
    if (!view) return;
    view.finish(conversation.messages.at(-1), this.#answerActions(conversation.messages.at(-1), true));
    const userMessages = this.element.querySelectorAll(".message.user");
    const last = conversation.messages.findLast(({ role }) => role === "user");
    if (userMessages.length) userMessages[userMessages.length - 1].replaceWith(userMessage(last, () => this.startEdit(last)));
    if (this.follows) this.toEnd();
  }

  startEdit(message) {
    const places = this.element.querySelectorAll(".message.user");
    const place = places[places.length - 1];
    const field = editMessage(message, (text) => {
      if (text !== null) return this.actions.edit(text);
      const restored = userMessage(message, () => this.startEdit(message));
      field.element.replaceWith(restored);
      restored.querySelector("button")?.focus();
      return undefined;
    });
    place.replaceWith(field.element);
    field.focus();
  }

  toEnd() {
    this.follows = true;
    this.latest.hidden = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  #scrolled() {
    const left = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight;
    this.follows = left < NEAR_PX;
    this.latest.hidden = this.follows;
  }
}
