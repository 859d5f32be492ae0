// Describes the server state. Pure.

import { bytes, duration, percent } from "../lib/format.js";

/** tone: good, wait, bad or none. */
export function stateOf(link, status) {
  if (link === "connecting") return { tone: "none", short: "Connecting", title: "Connecting", text: "" };
  if (link === "key")
    return { tone: "wait", short: "Key needed", title: "API key required", text: "Enter it to see live metrics." };
  if (link === "none") return { tone: "none", short: "", title: "No live metrics", text: "This server does not provide them." };
  if (link === "lost")
    return {
      tone: "bad",
      short: "Unreachable",
      title: "The server cannot be reached",
      text: "Reconnecting. The numbers below are the last received.",
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
    title: "The engine is restarting",
    text: "It stopped unexpectedly. New requests get a 503 with Retry-After.",
  }),
  draining: () => ({
    tone: "wait",
    short: "Draining",
    title: "The server is shutting down",
    text: "Requests in flight are finished; new ones are rejected.",
  }),
  dead: () => ({
    tone: "bad",
    short: "Engine down",
    title: "The engine is down",
    text: "It could not be restarted. See the server log.",
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
    ? "Loading weights."
    : `${bytes(status.loading.done_bytes)} of ${bytes(status.loading.total_bytes)} loaded`;
}
