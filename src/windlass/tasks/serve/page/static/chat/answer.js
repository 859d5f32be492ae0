// Accumulates the chunks of a streamed answer into a message. Pure; the clock is an argument.

const seconds = (from, to) => (from === null || to === null ? null : (to - from) / 1000);

export class Answer {
  constructor(model, now) {
    this.message = { role: "assistant", model, content: "", reasoning: "", tool_calls: [], finish: null };
    this.usage = null;
    this.pieces = 0;
    this.sent = now;
    this.first = null;
    this.last = null;
    this.thinking = { from: null, to: null };
  }

  take(chunk, now) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (content || reasoning || calls?.length) this.#tick(now);
    if (reasoning) this.#think(reasoning, now);
    if (content) this.message.content += content;
    for (const call of calls ?? []) this.#call(call);
    if ((content || calls?.length) && this.thinking.from !== null) this.thinking.to ??= now;
    if (choice.finish_reason) this.message.finish = choice.finish_reason;
  }

  #tick(now) {
    this.first ??= now;
    this.last = now;
    this.pieces += 1;
  }

  #think(text, now) {
    this.thinking.from ??= now;
    this.thinking.to = null;
    this.message.reasoning += text;
  }

  #call({ index = 0, id, function: called }) {
    const slot = (this.message.tool_calls[index] ??= { id: "", name: "", arguments: "" });
    if (id) slot.id = id;
    if (called?.name) slot.name += called.name;
    if (called?.arguments) slot.arguments += called.arguments;
  }

  /** True while the model reasons, before its answer. */
  get isThinking() {
    return this.thinking.from !== null && this.thinking.to === null && this.message.finish === null;
  }

  thoughtSeconds(now) {
    return seconds(this.thinking.from, this.thinking.to ?? now);
  }

  /** The message to store, with its statistics. Chunks are counted as tokens if the answer was stopped before usage arrived. */
  finished(finish = this.message.finish) {
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const span = seconds(this.first, this.last);
    const rate = tokens > 1 && span > 0 ? (tokens - 1) / span : null;
    const figures = {
      tokens,
      exact: this.usage !== null,
      rate,
      ttft: seconds(this.sent, this.first),
      prompt_tokens: this.usage?.prompt_tokens ?? null,
    };
    const calls = this.message.tool_calls.filter(Boolean);
    return { ...this.message, tool_calls: calls, finish, figures, thought_seconds: this.thoughtSeconds(this.last) };
  }
}
