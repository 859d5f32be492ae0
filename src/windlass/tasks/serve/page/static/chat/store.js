// Conversations and settings in localStorage. Does not touch the DOM and sends nothing.

const PREFIX = "windlass.conversation.";
const SETTINGS = "windlass.settings";
const MAX_TITLE = 60;

export const DEFAULTS = Object.freeze({
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  thinking: "default",
  loops: "off",
});

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** False if storage is full or unavailable. */
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function loadSettings() {
  const stored = read(SETTINGS);
  const known = Object.entries(stored ?? {}).filter(([name, value]) => Object.hasOwn(DEFAULTS, name) && typeof value === "string");
  return { ...DEFAULTS, ...Object.fromEntries(known) };
}

export const saveSettings = (settings) => write(SETTINGS, settings);

const isConversation = (value) => typeof value?.id === "string" && Array.isArray(value.messages);

/** Newest first. */
export function loadConversations() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys
    .map(read)
    .filter(isConversation)
    .sort((a, b) => b.changed - a.changed);
}

export function newConversation() {
  // Not crypto.randomUUID, which browsers offer only in secure contexts.
  const random = crypto.getRandomValues(new Uint32Array(2));
  return { id: [...random].map((part) => part.toString(36)).join(""), title: "New chat", changed: Date.now(), messages: [] };
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0].trim();
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line || "New chat";
}

export function saveConversation(conversation) {
  return write(PREFIX + conversation.id, conversation);
}

export const deleteConversation = (id) => localStorage.removeItem(PREFIX + id);

/** Calls back when another tab changed a conversation. */
export function onOtherTab(callback) {
  window.addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(PREFIX)) callback(key?.slice(PREFIX.length) ?? null);
  });
}
