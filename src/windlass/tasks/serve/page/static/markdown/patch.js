// Makes elements that are shown like newer ones, and changes only what differs: nothing flickers, and what is selected stays so.

/** Makes `shown` like `fresh`; false if it cannot be. `stays` decides for elements that are filled by others; null: it is none of those. */
export function become(shown, fresh, stays = () => null) {
  if (shown.nodeType !== fresh.nodeType || shown.localName !== fresh.localName) return false;
  if (shown.nodeType === Node.TEXT_NODE) {
    if (shown.data !== fresh.data) shown.data = fresh.data;
    return true;
  }
  const answer = stays(shown, fresh);
  if (answer !== null) return answer;
  if (shown.localName === "button") return true; // its label is its own
  for (const { name } of [...shown.attributes]) if (!fresh.hasAttribute(name)) shown.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  becomeInside(shown, fresh, stays);
  return true;
}

export function becomeInside(shown, fresh, stays) {
  let at = shown.firstChild;
  for (const next of [...fresh.childNodes]) {
    const after = at?.nextSibling ?? null;
    if (!at) shown.append(next);
    else if (!become(at, next, stays)) at.replaceWith(next);
    at = after;
  }
  while (at) {
    const after = at.nextSibling;
    at.remove();
    at = after;
  }
}
