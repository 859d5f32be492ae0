// Server-sent events from the body of a fetch: an EventSource could send neither a key nor a question.

/** Feeds on text in any pieces, gives whole events' data. */
export class EventParser {
  #rest = "";
  #data = [];

  push(text) {
    const found = [];
    this.#rest += text;
    // A line may end in \r\n that two pieces share, so a last \r waits for what follows it.
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) this.#take(line, found);
    return found;
  }

  #take(line, found) {
    if (line === "") {
      if (this.#data.length) found.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    // Whoever stops listening hangs up, so that the server's slot is free at once.
    reader.cancel().catch(() => {});
  }
}
