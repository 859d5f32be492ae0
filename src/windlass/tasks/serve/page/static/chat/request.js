// Builds the body of a chat request. Pure. Empty settings are not sent, so the server's defaults apply.

const NUMBERS = {
  temperature: { low: 0, high: 2, whole: false, name: "Temperature" },
  top_p: { low: 0.01, high: 1, whole: false, name: "Top p" },
  max_tokens: { low: 1, high: 1e7, whole: true, name: "Max tokens" },
  seed: { low: 0, high: Number.MAX_SAFE_INTEGER, whole: true, name: "Seed" },
};

/** An error message for a setting, or "". */
export function problem(name, value) {
  const limits = NUMBERS[name];
  if (!limits || value.trim() === "") return "";
  const parsed = Number(value);
  const fits =
    Number.isFinite(parsed) && parsed >= limits.low && parsed <= limits.high && (!limits.whole || Number.isInteger(parsed));
  if (fits) return "";
  const range = limits.high >= 1e7 ? `${limits.low} or more` : `between ${limits.low} and ${limits.high}`;
  return `${limits.name} should be a ${limits.whole ? "whole " : ""}number, ${range}.`;
}

function sampling(settings) {
  const set = Object.keys(NUMBERS).filter((name) => settings[name].trim() !== "" && problem(name, settings[name]) === "");
  return Object.fromEntries(set.map((name) => [name, Number(settings[name])]));
}

/** Reasoning is not sent back, as chat templates expect; empty answers are left out. */
function history(messages) {
  return messages.filter(({ role, content }) => role === "user" || content).map(({ role, content }) => ({ role, content }));
}

export function chatRequest(model, settings, messages) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const thinking =
    settings.thinking === "default" ? {} : { chat_template_kwargs: { enable_thinking: settings.thinking === "on" } };
  return {
    ...(model ? { model } : {}),
    messages: [...system, ...history(messages)],
    stream: true,
    stream_options: { include_usage: true },
    ...sampling(settings),
    ...thinking,
  };
}
