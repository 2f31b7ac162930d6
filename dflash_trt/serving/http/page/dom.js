/** @file DOM nodes made one by one: text only ever goes in as text. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element; `onclick` and its like are listeners, `true` is an empty attribute, and what is
 * false or missing is left out.
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes]
 * @param {...(Node | string)} children
 */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for a part of a picture. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** @param {string} id */
export function byId(id) {
  return document.getElementById(id);
}

/** A number for people: three digits that matter. */
export function number(value) {
  return (value >= 100 ? Math.round(value) : Number(value.toPrecision(3))).toLocaleString("en");
}

/** `1 token`, `2 tokens`. */
export function count(amount, word) {
  return `${amount.toLocaleString("en")} ${word}${amount === 1 ? "" : "s"}`;
}

/** @param {number} share 0 to 1 */
export function percent(share) {
  return `${Math.round(share * 100)} %`;
}
