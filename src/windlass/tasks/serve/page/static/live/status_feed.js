// The server status, once a second while the page is visible, with the history of the last minutes.

import { ApiError, live } from "../lib/api.js";

export const WINDOW_SECONDS = 180;
const MAX_WAIT_MS = 8000;
const LINGER_MS = 15000;

/** Notifies listeners of {status, link, history}; link is connecting, live, lost, key or none (the server has no live status). */
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

  /** Reconnects at once. */
  retry() {
    this.wake();
  }

  #notify(link) {
    this.link = link;
    for (const listener of this.listeners) listener(this);
  }

  // A hidden page disconnects after a while: browsers allow few connections per server.
  #visibility() {
    clearTimeout(this.linger);
    if (document.hidden) this.linger = setTimeout(() => this.controller?.abort(), LINGER_MS);
    else this.wake();
  }

  async #run() {
    for (let failures = 0; ;) {
      const received = await this.#connect();
      failures = received ? 0 : failures + 1;
      await this.#pause(Math.min(MAX_WAIT_MS, 500 * 2 ** failures));
    }
  }

  /** True if at least one status arrived. */
  async #connect() {
    let received = false;
    this.controller = new AbortController();
    try {
      for await (const status of live(this.controller.signal)) {
        received = true;
        this.#take(status);
      }
      this.#notify("lost");
    } catch (error) {
      if (this.controller.signal.aborted)
        this.#notify("connecting"); // the page is hidden
      else this.#notify(error instanceof ApiError && error.kind === "key" ? "key" : error?.kind === "rejected" ? "none" : "lost");
    }
    return received;
  }

  #take(status) {
    const now = Date.now();
    this.status = status;
    this.history.push({ at: now, ...status.now });
    while (this.history[0].at < now - WINDOW_SECONDS * 1000) this.history.shift();
    this.#notify("live");
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
