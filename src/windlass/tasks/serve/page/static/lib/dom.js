// Creates elements. Text becomes text nodes and attributes are set one by one: no HTML is ever parsed.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** h("button", {class: "quiet", onclick: f}, "Copy") */
export const h = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties = {}, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const find = (selector, inside = document) => inside.querySelector(selector);

/** Writes only changed text, so that selections and screen readers keep their place. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const PATHS = {
  menu: "M3 5h14M3 10h14M3 15h9",
  plus: "M10 4v12M4 10h12",
  trash: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6M8.5 9v4.5M11.5 9v4.5",
  sliders: "M3 6h7M14 6h3M3 14h3M10 14h7M12 4v4M8 12v4",
  send: "M10 16V4M5 9l5-5 5 5",
  copy: "M7 7h9v9H7zM4 13V4h9",
  check: "M4 10.5l4 4 8-9",
  again: "M15.5 7A6.3 6.3 0 1 0 16.3 10M16 3v4h-4",
  pencil: "M4 16l.8-3.4L13 4.4l2.6 2.6-8.2 8.2zM11.5 6l2.5 2.5",
  theme: "M10 3a7 7 0 1 0 0 14zM10 3a7 7 0 0 1 0 14",
  down: "M10 4v12M5 11l5 5 5-5",
  close: "M5 5l10 10M15 5L5 15",
  chevron: "M8 5l5 5-5 5",
};

/** Decorative: its container carries the label. */
export function icon(name) {
  const shape =
    name === "stop" ? s("rect", { x: 5.5, y: 5.5, width: 9, height: 9, rx: 1.5, class: "solid" }) : s("path", { d: PATHS[name] });
  return s("svg", { viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true" }, shape);
}

export function iconButton(name, label, onclick, properties = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...properties },
    icon(name),
  );
}
