// The server's state, once a second while the page is looked at, with what it was in the last minutes.

import { ApiError, live } from "../lib/api.js";

export const WINDOW_SECONDS = 180;
const MAX_WAIT_MS = 8000;
const LINGER_MS = 15000;

/** Tells listeners {status, link, history}; link is connecting, live, lost, key or none (this server has no such numbers). */
export class StatusFeed {
  constructor() {
    this.status = null;
    this.link = "connecting";
    this.history = [];
    this.listeners = new Set();
    this.controller = null;
    this.wake = () => {};
  }

  start() {
    document.addEventListener("visibilitychange", () => this.#visibility());
    this.#run();
  }

  listen(listener) {
    this.listeners.add(listener);
    listener(this);
  }

  /** Tries at once: a key was given, or the user asked. */
  retry() {
    this.wake();
  }

  #tell(link) {
    this.link = link;
    for (const listener of this.listeners) listener(this);
  }

  // A page nobody sees hangs up after a while: browsers allow few connections to one server.
  #visibility() {
    clearTimeout(this.linger);
    if (document.hidden) this.linger = setTimeout(() => this.controller?.abort(), LINGER_MS);
    else this.wake();
  }

  async #run() {
    for (let failures = 0; ;) {
      const heard = await this.#connect();
      failures = heard ? 0 : failures + 1;
      await this.#pause(Math.min(MAX_WAIT_MS, 500 * 2 ** failures));
    }
  }

  /** True where at least one status came. */
  async #connect() {
    let heard = false;
    this.controller = new AbortController();
    try {
      for await (const status of live(this.controller.signal)) {
        heard = true;
        this.#take(status);
      }
      this.#tell("lost");
    } catch (error) {
      if (this.controller.signal.aborted)
        this.#tell("connecting"); // nobody looks
      else this.#tell(error instanceof ApiError && error.kind === "key" ? "key" : error?.kind === "refused" ? "none" : "lost");
    }
    return heard;
  }

  #take(status) {
    const now = Date.now();
    this.status = status;
    this.history.push({ at: now, ...status.now });
    while (this.history[0].at < now - WINDOW_SECONDS * 1000) this.history.shift();
    this.#tell("live");
  }

  #pause(milliseconds) {
    const forTime = this.link === "key" || this.link === "none" || document.hidden ? 3600_000 : milliseconds;
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, forTime);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
