// An error with a hint and a retry button.

import { h, setText } from "../lib/dom.js";

const TITLES = {
  key: "API key required",
  busy: "The server is busy",
  starting: "The model is not ready",
  rejected: "The server rejected this request",
  server: "Server error",
  network: "The server cannot be reached",
  interrupted: "The response was interrupted",
};

const HINTS = {
  busy: "Its queue is full. Your message is kept.",
  starting: "It may be loading or restarting. Your message is kept.",
  rejected: "Edit the message or change the settings, then try again.",
  network: "Your message is kept. Check that the server is running, then try again.",
  interrupted: "The partial response is above.",
};

/** With `retry`, a button; it is disabled for the time in Retry-After. */
export function errorNotice({ kind, message, retry_after: wait }, retry) {
  const title = TITLES[kind] ?? TITLES.server;
  const text = message && message !== title ? h("p", {}, message) : null;
  const hint = HINTS[kind] ? h("p", { class: "small" }, HINTS[kind]) : null;
  return h("div", { class: "error-notice", role: "alert" }, h("strong", {}, title), text, hint, retry && retryButton(wait, retry));
}

function retryButton(wait, retry) {
  const button = h("button", { type: "button", class: "button", onclick: retry }, "Try again");
  let left = Math.min(600, Math.ceil(wait ?? 0));
  const tick = () => {
    button.disabled = left > 0;
    setText(button, left > 0 ? `Try again in ${left} s` : "Try again");
    if (left-- > 0) setTimeout(() => button.isConnected && tick(), 1000);
  };
  // The first tick waits until the button is in the page.
  requestAnimationFrame(tick);
  return button;
}
