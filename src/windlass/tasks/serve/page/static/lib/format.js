// Formats numbers for display. Pure.

const ABSENT = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const grouped = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** About three significant digits: 0.42, 7.31, 42.8, 1,250. */
export function number(value) {
  if (!isNumber(value)) return ABSENT;
  if (Number.isInteger(value) || Math.abs(value) >= 100) return grouped(value);
  return grouped(value, Math.abs(value) >= 10 ? 1 : 2);
}

export const count = (value) => (isNumber(value) ? grouped(Math.round(value)) : ABSENT);
export const percent = (fraction) =>
  isNumber(fraction) ? `${grouped(fraction * 100, fraction > 0 && fraction < 0.0995 ? 1 : 0)} %` : ABSENT;

/** 0.42 ms, 38 ms, 1.24 s. */
export function latency(seconds) {
  if (!isNumber(seconds)) return ABSENT;
  if (seconds < 0.01) return `${grouped(seconds * 1000, 1)} ms`;
  if (seconds < 0.9995) return `${grouped(seconds * 1000)} ms`;
  return `${grouped(seconds, seconds < 10 ? 2 : 1)} s`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return ABSENT;
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes) return `${minutes} min ${whole % 60} s`;
  return `${whole} s`;
}

export function bytes(value) {
  if (!isNumber(value)) return ABSENT;
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(value, 1)) / 10)));
  const scaled = value / 1024 ** power;
  return `${grouped(scaled, power < 2 || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2)} ${units[power]}`;
}

export function energy(joules) {
  if (!isNumber(joules)) return ABSENT;
  if (joules < 3600) return `${number(joules)} J`;
  return joules < 3.6e6 ? `${number(joules / 3600)} Wh` : `${number(joules / 3.6e6)} kWh`;
}

export const watts = (value) => (isNumber(value) ? `${number(Math.round(value))} W` : ABSENT);

/** A round number at or above `value`, so that a chart's top can be read. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((factor) => factor * step).find((top) => top >= value * 0.999);
}
