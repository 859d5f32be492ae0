// HTML to elements: the one place of the page where HTML is parsed, by DOMPurify, which keeps what is named here and nothing else.

import "../vendor/dompurify/purify.min.js";

const { DOMPurify } = globalThis;

const TAGS =
  "p h3 h4 h5 h6 ul ol li blockquote hr pre code table thead tbody tr th td a br span strong em s b i u ins sub sup kbd mark small";
// Ours alone, so that no text can look like a part of the page.
const CLASSES = /^(?:language-\S+|math|block|pending|task|done|left|center|right|level-[1-6])$/;

// This also makes the one policy of trusted types that the server allows, so that nobody else can.
DOMPurify.setConfig({
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "scope"],
  ADD_URI_SAFE_ATTR: ["start", "scope"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
});

DOMPurify.addHook("uponSanitizeAttribute", (_, attribute) => {
  if (attribute.attrName !== "class") return;
  const kept = attribute.attrValue.split(/\s+/).filter((name) => CLASSES.test(name));
  attribute.attrValue = kept.join(" ");
  attribute.keepAttr = kept.length > 0;
});

DOMPurify.addHook("afterSanitizeAttributes", (element) => {
  if (element.localName !== "a") return;
  element.setAttribute("target", "_blank");
  element.setAttribute("rel", "noopener noreferrer nofollow");
});

/** A fragment of what is harmless in `html`. */
export const clean = (html) => DOMPurify.sanitize(html);
