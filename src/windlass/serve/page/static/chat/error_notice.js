// What went wrong, told kindly, with what to do about it.

import { h, say } from "../lib/dom.js";

const TITLES = {
  key: "This server asks for a key",
  busy: "The server is busy",
  starting: "The model is not ready",
  refused: "The server could not take this",
  server: "Something went wrong on the server",
  network: "The server cannot be reached",
  cut: "The answer broke off",
};

const HINTS = {
  busy: "Others are being answered. Your message is kept.",
  starting: "It may be loading or starting again. Your message is kept.",
  refused: "Edit the message or change the settings, then try again.",
  network: "Your message is kept. Check that the server runs, then try again.",
  cut: "What came so far is above.",
};

/** With `retry`, a button; where the server said how long to wait, it counts down before it can be pressed. */
export function trouble({ kind, message, retry_after: wait }, retry) {
  const title = TITLES[kind] ?? TITLES.server;
  const said = message && message !== title ? h("p", {}, message) : null;
  const hint = HINTS[kind] ? h("p", { class: "small" }, HINTS[kind]) : null;
  return h("div", { class: "trouble", role: "alert" }, h("strong", {}, title), said, hint, retry && retryButton(wait, retry));
}

function retryButton(wait, retry) {
  const button = h("button", { type: "button", class: "button", onclick: retry }, "Try again");
  let left = Math.min(600, Math.ceil(wait ?? 0));
  const tick = () => {
    button.disabled = left > 0;
    say(button, left > 0 ? `Try again in ${left} s` : "Try again");
    if (left-- > 0) setTimeout(() => button.isConnected && tick(), 1000);
  };
  // The first tick waits until the button is in the page.
  requestAnimationFrame(tick);
  return button;
}
