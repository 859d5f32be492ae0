// Client of the server's API: key, errors, chat stream. Does not touch the DOM.

import { events } from "./sse.js";

const KEY = "windlass.key";
// Kept only while the tab is open; never in localStorage, which persists.
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

/** `kind`: key, busy, starting, rejected, server, network or interrupted. */
export class ApiError extends Error {
  constructor(kind, message, retryAfter = null) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter;
  }
}

export function kindOf(status) {
  if (status === 401) return "key";
  if (status === 429) return "busy";
  if (status === 503) return "starting";
  return status < 500 ? "rejected" : "server";
}

const MESSAGES = {
  key: "This server requires an API key.",
  busy: "The server is busy; its queue is full.",
  starting: "The model is not ready yet.",
  rejected: "The server rejected this request.",
  server: "The server failed to answer.",
};

async function errorFrom(response) {
  const kind = kindOf(response.status);
  const body = await response.json().catch(() => null);
  const message = typeof body?.error?.message === "string" ? body.error.message : "";
  const wait = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new ApiError(kind, message || `${MESSAGES[kind]} (HTTP ${response.status})`, Number.isFinite(wait) ? wait : null);
}

async function call(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store" };
  const response = await fetch(path, options).catch((error) => {
    throw signal?.aborted ? error : new ApiError("network", "The server cannot be reached. Is it still running?");
  });
  if (!response.ok) throw await errorFrom(response);
  return response;
}

export async function models() {
  const list = await (await call("/v1/models")).json();
  return (list.data ?? []).map((model) => model.id);
}

/** Throws an error of kind `interrupted` if the stream ends before the answer is complete. */
export async function* chat(body, signal) {
  const response = await call("/v1/chat/completions", { body, signal });
  let ended = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError("server", chunk.error.message ?? MESSAGES.server);
      ended ||= Boolean(chunk.choices?.[0]?.finish_reason);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("interrupted", "The connection was lost before the answer was complete.");
  }
  if (!ended) throw new ApiError("interrupted", "The connection ended before the answer was complete.");
}

export async function* live(signal) {
  const response = await call("/windlass/live", { signal });
  for await (const data of events(response.body)) yield JSON.parse(data);
}

/** Alerts and the last day; an error if the server keeps none. */
export async function history() {
  return (await call("/windlass/history")).json();
}
