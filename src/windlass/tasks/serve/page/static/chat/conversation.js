// Conversations and the answers being generated in them. Does not touch the DOM; notifies a listener.

import { ApiError, chat } from "../lib/api.js";
import { loopPeriod } from "../lib/loops.js";
import { Answer } from "./answer.js";
import { chatRequest } from "./request.js";
import { deleteConversation, loadConversations, newConversation, onOtherTab, saveConversation, titleOf } from "./store.js";

const SAVE_EVERY_MS = 2000;

/** listener: {list(), open(), progress(), done(message)} for the current conversation, and storageFull(). */
export class ChatSession {
  constructor(listener, settings) {
    this.listener = listener;
    this.settings = settings;
    this.model = "";
    this.conversations = loadConversations();
    this.current = newConversation();
    this.answers = new Map();
    onOtherTab((id) => this.#fromOtherTab(id));
  }

  get answer() {
    return this.answers.get(this.current.id)?.answer ?? null;
  }

  isAnswering(id) {
    return this.answers.has(id);
  }

  /** An unknown id opens an empty chat. */
  open(id) {
    if (id === this.current.id) return;
    this.current = this.conversations.find((one) => one.id === id) ?? newConversation();
    this.listener.open();
  }

  startNew() {
    this.current = newConversation();
    this.listener.open();
  }

  send(text) {
    const { current } = this;
    if (!text.trim() || this.answer) return;
    if (!current.messages.length) current.title = titleOf(text);
    if (!this.conversations.includes(current)) this.conversations.unshift(current);
    current.messages.push({ role: "user", content: text });
    this.#touch(current);
    this.#run(current);
  }

  /** Replaces the user's last message; what followed it is dropped. */
  edit(text) {
    const at = this.current.messages.findLastIndex(({ role }) => role === "user");
    if (at < 0 || this.answer || !text.trim()) return;
    this.current.messages.length = at;
    this.send(text);
  }

  regenerate() {
    const { messages } = this.current;
    if (this.answer || !messages.length) return;
    while (messages.at(-1)?.role === "assistant") messages.pop();
    this.#run(this.current);
  }

  stop() {
    this.answers.get(this.current.id)?.controller.abort();
  }

  remove(id) {
    this.answers.get(id)?.controller.abort();
    const at = this.conversations.findIndex((one) => one.id === id);
    const [removed] = this.conversations.splice(at, 1);
    deleteConversation(id);
    this.listener.list();
    if (this.current === removed) this.startNew();
    return removed;
  }

  restore(conversation) {
    this.conversations.push(conversation);
    this.conversations.sort((a, b) => b.changed - a.changed);
    this.#save(conversation);
    this.listener.list();
  }

  async #run(conversation) {
    const controller = new AbortController();
    const answer = new Answer(this.model, performance.now());
    this.answers.set(conversation.id, { controller, answer });
    if (conversation === this.current) this.listener.open();
    this.listener.list();
    const failure = await this.#stream(conversation, answer, controller.signal);
    this.answers.delete(conversation.id);
    if (answer.looped) controller.abort();
    this.#finish(conversation, answer, controller.signal.aborted, failure);
  }

  /** Returns the error, or null. */
  async #stream(conversation, answer, signal) {
    let saved = performance.now();
    try {
      for await (const chunk of chat(chatRequest(this.model, this.settings, conversation.messages), signal)) {
        const now = performance.now();
        answer.take(chunk, now);
        if (conversation === this.current) this.listener.progress();
        if (this.#loops(answer)) return null;
        if (now - saved > SAVE_EVERY_MS) {
          saved = now;
          this.#save({ ...conversation, messages: [...conversation.messages, answer.finished("stopped")] });
        }
      }
      return null;
    } catch (error) {
      if (signal.aborted) return null;
      if (error instanceof ApiError) return error;
      console.error(error);
      return new ApiError("server", "The server sent an invalid response.");
    }
  }

  /** Whether the answer only repeats itself; then its request is ended. */
  #loops(answer) {
    answer.looped = this.settings.loops !== "on" && loopPeriod(answer.message.content) > 0;
    return answer.looped;
  }

  #finish(conversation, answer, stopped, failure) {
    const message = answer.finished(answer.looped ? "loop" : stopped ? "stopped" : undefined);
    if (failure) message.error = { kind: failure.kind, message: failure.message, retry_after: failure.retryAfter };
    conversation.messages.push(message);
    if (this.conversations.includes(conversation)) this.#touch(conversation);
    this.listener.list();
    if (conversation === this.current) this.listener.done(message);
  }

  #touch(conversation) {
    conversation.changed = Date.now();
    this.conversations.sort((a, b) => b.changed - a.changed);
    this.#save(conversation);
  }

  #save(conversation) {
    if (!saveConversation(conversation)) this.listener.storageFull();
  }

  #fromOtherTab(id) {
    if (this.answers.size) return; // this tab's answers are newer
    this.conversations = loadConversations();
    this.listener.list();
    const again = this.conversations.find((one) => one.id === this.current.id);
    if (again && (id === null || id === again.id)) {
      this.current = again;
      this.listener.open();
    }
  }
}
