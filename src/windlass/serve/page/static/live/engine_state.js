// The server's state in words. Pure.

import { bytes, duration, percent } from "../lib/format.js";

/** tone: good, wait, bad or none. */
export function stateOf(link, status) {
  if (link === "connecting") return { tone: "none", short: "Connecting", title: "Connecting", text: "" };
  if (link === "key")
    return { tone: "wait", short: "Key needed", title: "This server asks for a key", text: "Numbers come when it has one." };
  if (link === "none") return { tone: "none", short: "", title: "No live numbers", text: "This server gives none." };
  if (link === "lost")
    return {
      tone: "bad",
      short: "Not reached",
      title: "The server cannot be reached",
      text: "Trying again by itself. The numbers below are the last that came.",
    };
  return STATES[status.state]?.(status) ?? { tone: "none", short: status.state, title: `State: ${status.state}`, text: "" };
}

const STATES = {
  ready: (status) => ({ tone: "good", short: "Ready", title: "Ready", text: `Up for ${duration(status.uptime_seconds)}` }),
  loading: (status) => ({
    tone: "wait",
    short: loadingShort(status),
    title: "Loading the model",
    text: loadingText(status),
    progress: loadedShare(status),
  }),
  restarting: () => ({
    tone: "wait",
    short: "Restarting",
    title: "The engine is starting again",
    text: "It stopped unexpectedly. New requests are asked to come back in a moment.",
  }),
  draining: () => ({
    tone: "wait",
    short: "Closing",
    title: "The server is closing",
    text: "Answers under way are finished; new requests are refused.",
  }),
  dead: () => ({
    tone: "bad",
    short: "Engine down",
    title: "The engine is down",
    text: "It could not be started again. The server’s log says why.",
  }),
};

export function loadedShare({ loading }) {
  return loading?.total_bytes > 0 ? Math.min(1, loading.done_bytes / loading.total_bytes) : null;
}

function loadingShort(status) {
  const share = loadedShare(status);
  return share === null ? "Loading" : `Loading ${percent(share)}`;
}

function loadingText(status) {
  const share = loadedShare(status);
  return share === null
    ? "Reading the weights."
    : `${bytes(status.loading.done_bytes)} of ${bytes(status.loading.total_bytes)} read`;
}
