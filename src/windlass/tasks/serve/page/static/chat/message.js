// One message of a conversation as an element.

import { h, icon, setText } from "../lib/dom.js";
import { count, latency, number } from "../lib/format.js";
import { copyButton, MarkdownView } from "../markdown/view.js";

const thoughtFor = (seconds) => (seconds === null || seconds === undefined ? "Reasoning" : `Thought for ${latency(seconds)}`);

export function userMessage(message, onEdit) {
  const edit =
    onEdit &&
    h(
      "button",
      { type: "button", class: "quiet", onclick: onEdit, "aria-label": "Edit this message" },
      icon("pencil"),
      h("span", {}, "Edit"),
    );
  const actions = h(
    "div",
    { class: "actions" },
    edit,
    copyButton(() => message.content, "Copy message"),
  );
  return h("article", { class: "message user", "aria-label": "You" }, h("div", { class: "bubble" }, message.content), actions);
}

/** The user's message as a field; calls back with the new text, or null. */
export function editMessage(message, done) {
  const field = h("textarea", { "aria-label": "Edit your message", rows: Math.min(12, message.content.split("\n").length + 1) });
  field.value = message.content;
  const finish = () => field.value.trim() && done(field.value);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") done(null);
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) finish();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const cancel = h("button", { type: "button", class: "button", onclick: () => done(null) }, "Cancel");
  const send = h("button", { type: "button", class: "button primary", onclick: finish }, "Send");
  const element = h(
    "article",
    { class: "message user editing", "aria-label": "Edit your message" },
    field,
    h("div", { class: "actions shown" }, cancel, send),
  );
  return { element, focus: () => field.focus() };
}

/** An answer: `update` while it streams, `finish` at its end. */
export class AnswerView {
  constructor(model) {
    this.prose = new MarkdownView();
    this.waiting = h(
      "p",
      { class: "waiting" },
      h("span", { class: "pulse", "aria-hidden": "true" }),
      h("span", { class: "unseen" }, "Waiting for the first token"),
    );
    this.before = h("div", { class: "reasoning-slot" });
    this.calls = h("div", { class: "calls" });
    this.after = h("div", { class: "after" });
    this.reasoning = null;
    this.element = h(
      "article",
      { class: "message answer", "aria-label": `Answer from ${model || "the model"}` },
      this.before,
      this.waiting,
      this.prose.element,
      this.calls,
      this.after,
    );
  }

  update(answer, now) {
    const { message } = answer;
    this.element.classList.toggle("writing", true);
    this.element.classList.toggle("thinking", answer.isThinking);
    this.waiting.hidden = Boolean(message.content || message.reasoning || message.tool_calls.length);
    if (message.reasoning)
      this.#reason(
        message.reasoning,
        answer.isThinking ? `Thinking, ${latency(answer.thoughtSeconds(now))}` : thoughtFor(answer.thoughtSeconds(now)),
      );
    this.prose.update(message.content);
    this.#call(message.tool_calls);
  }

  finish(message, actions) {
    this.element.classList.remove("writing", "thinking");
    this.waiting.hidden = true;
    if (message.reasoning) this.#reason(message.reasoning, thoughtFor(message.thought_seconds));
    this.prose.update(message.content);
    this.#call(message.tool_calls ?? []);
    const bare = message.error && !message.content; // no statistics to show
    this.after.replaceChildren(...notes(message), ...(actions.error ?? []), ...(bare ? [] : [footer(message, actions)]));
  }

  #reason(text, summary) {
    if (!this.reasoning) {
      this.reasoning = { view: new MarkdownView(), summary: h("span") };
      this.before.append(
        h(
          "details",
          { class: "reasoning" },
          h("summary", {}, icon("chevron"), this.reasoning.summary),
          this.reasoning.view.element,
        ),
      );
    }
    setText(this.reasoning.summary, summary);
    this.reasoning.view.update(text);
  }

  #call(calls) {
    const shown = calls.filter(Boolean);
    shown.forEach((call, index) => {
      const place = this.calls.children[index] ?? this.calls.appendChild(callBox());
      setText(place.querySelector(".call-name"), call.name || "…");
      setText(place.querySelector("code"), pretty(call.arguments));
    });
  }
}

function callBox() {
  const summary = h("summary", {}, icon("chevron"), "Calls ", h("span", { class: "call-name" }));
  return h("details", { class: "call", open: true }, summary, h("pre", { tabindex: 0, "aria-label": "Arguments" }, h("code")));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete, or not JSON
  }
}

function notes(message) {
  if (message.error) return [];
  const note = {
    length: "The answer reached the token limit.",
    stopped: "You stopped this answer.",
    loop: "Stopped, because the answer only repeated itself. Settings can let such answers run.",
    content_filter: "The rest was removed by a content filter.",
  }[message.finish];
  const empty =
    !message.content && !message.reasoning && !message.tool_calls?.length && message.finish !== "stopped"
      ? "The model returned an empty answer."
      : null;
  return [note, empty].filter(Boolean).map((text) => h("p", { class: "note" }, text));
}

function footer(message, actions) {
  const figures = message.figures ?? {};
  const about = figures.exact === false ? "about " : "";
  const parts = [
    figures.rate && `${about}${number(figures.rate)} tokens/s`,
    figures.ttft !== null && figures.ttft !== undefined && `first token ${latency(figures.ttft)}`,
    figures.tokens > 0 && `${about}${count(figures.tokens)} token${figures.tokens === 1 ? "" : "s"}`,
    message.model,
  ].filter(Boolean);
  const copy = message.content ? copyButton(() => message.content, "Copy answer") : null;
  const again =
    actions.again &&
    h(
      "button",
      { type: "button", class: "quiet", onclick: actions.again, "aria-label": "Regenerate this answer" },
      icon("again"),
      h("span", {}, "Regenerate"),
    );
  const spans = parts.map((part) => h("span", {}, part));
  return h(
    "footer",
    { class: actions.again ? "shown" : null },
    h("div", { class: "figures" }, spans),
    h("div", { class: "actions" }, copy, again),
  );
}
