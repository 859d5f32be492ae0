// The server's API: the key, kind errors, the chat's stream. Knows no element of the page.

import { events } from "./sse.js";

const KEY = "windlass.key";
// For as long as the tab is open and no longer; never in localStorage, where it would outlive the visit.
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

/** What went wrong, in `kind`: key, busy, starting, refused, server, network or cut. */
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
  return status < 500 ? "refused" : "server";
}

const PLAIN = {
  key: "This server asks for a key.",
  busy: "The server is busy; its queue is full.",
  starting: "The model is not ready yet.",
  refused: "The server did not accept this request.",
  server: "The server could not answer.",
};

async function refusal(response) {
  const kind = kindOf(response.status);
  const body = await response.json().catch(() => null);
  const told = typeof body?.error?.message === "string" ? body.error.message : "";
  const wait = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new ApiError(kind, told || `${PLAIN[kind]} (HTTP ${response.status})`, Number.isFinite(wait) ? wait : null);
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
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function models() {
  const list = await (await call("/v1/models")).json();
  return (list.data ?? []).map((model) => model.id);
}

/** Throws an error of kind `cut` when the stream ends before the answer does. */
export async function* chat(body, signal) {
  const response = await call("/v1/chat/completions", { body, signal });
  let ended = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError("server", chunk.error.message ?? PLAIN.server);
      ended ||= Boolean(chunk.choices?.[0]?.finish_reason);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("cut", "The connection was lost before the answer was complete.");
  }
  if (!ended) throw new ApiError("cut", "The connection ended before the answer was complete.");
}

export async function* live(signal) {
  const response = await call("/windlass/live", { signal });
  for await (const data of events(response.body)) yield JSON.parse(data);
}
