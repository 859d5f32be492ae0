// The message input.

import { find, icon } from "../lib/dom.js";

const MAX_HEIGHT_PX = 260;

export class Composer {
  /** actions: {send(text) -> whether it was sent, stop(), editLast()} */
  constructor(actions) {
    this.actions = actions;
    this.field = find("#question");
    this.button = find("#send");
    this.field.addEventListener("input", () => this.#fit());
    this.field.addEventListener("keydown", (event) => this.#key(event));
    find("#composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) this.actions.stop();
      else this.#send();
    });
    this.busy(false);
    // Style sheets may come later than this script; the height before them is too small.
    window.addEventListener("load", () => this.#fit());
  }

  busy(isBusy) {
    this.isBusy = isBusy;
    const label = isBusy ? "Stop" : "Send";
    this.button.replaceChildren(icon(isBusy ? "stop" : "send"));
    this.button.setAttribute("aria-label", label);
    this.button.title = label;
    this.#fit();
  }

  // On a touch screen focus would open the keyboard.
  focus() {
    if (matchMedia("(hover: hover)").matches) this.field.focus();
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!this.isBusy) this.#send();
    } else if (event.key === "ArrowUp" && this.field.value === "") {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  #send() {
    if (!this.actions.send(this.field.value)) return;
    this.field.value = "";
    this.#fit();
  }

  #fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(MAX_HEIGHT_PX, this.field.scrollHeight)}px`;
    this.button.classList.toggle("idle", !this.isBusy && !this.field.value.trim());
  }
}
