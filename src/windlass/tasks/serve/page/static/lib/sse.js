// Server-sent events from a fetch body: EventSource can send neither headers nor a request body.

/** Text in arbitrary pieces -> the data of complete events. */
export class EventParser {
  #rest = "";
  #data = [];

  push(text) {
    const found = [];
    this.#rest += text;
    // A trailing \r may be the first half of \r\n, so it waits for the next piece.
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
    // Cancel, so that the server stops generating at once.
    reader.cancel().catch(() => {});
  }
}
