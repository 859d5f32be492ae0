// A button that copies text.

import { h, icon } from "./dom.js";

const SHOWN_MS = 1600;

/** `text` is called when the button is pressed, with the button. */
export function copyButton(text, label) {
  const button = h(
    "button",
    { type: "button", class: "quiet", "aria-label": label, title: label },
    icon("copy"),
    h("span", {}, "Copy"),
  );
  button.addEventListener("click", async () => {
    const copied = await copy(text(button));
    button.replaceChildren(icon(copied ? "check" : "close"), h("span", {}, copied ? "Copied" : "Not copied"));
    setTimeout(() => button.replaceChildren(icon("copy"), h("span", {}, "Copy")), SHOWN_MS);
  });
  return button;
}

/** Over plain HTTP from another machine there is no clipboard API; the old way still works. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "unseen", readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}
