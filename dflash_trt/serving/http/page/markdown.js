/**
 * @file Markdown as DOM nodes. What a model writes becomes text of a fixed set of elements, never
 * markup; time and number of elements are bounded by the length of the text.
 */
import { make } from "./dom.js";

const DEEPEST = 6; // lists, quotes and emphasis within each other
const MOST_NODES = 5000; // the rest is plain text
const LIST = /^( {0,12})([-*+]|\d{1,9}[.)]) +(?=\S)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const TABLE_RULE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const INLINE =
  /(`+)|\*\*|__|~~|[*_]|!?\[([^[\]]{1,300})\]\(([^\s()<>]{1,500})\)|https?:\/\/[^\s<>"'`*)\]]{1,500}|\\([\\`*_{}[\]()#+.!~|>-])/g;
const NOT_HERE = -1;
const NEVER = -2; // no such mark comes any more
const ELEMENT = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/**
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function markdown(text) {
  const whole = document.createDocumentFragment();
  blocks(visible(text).split("\n"), whole, 0, { left: MOST_NODES, heading: 2 });
  return whole;
}

/**
 * Text in which control characters can be seen and none of them turns the rest around.
 * @param {string} text
 */
export function visible(text) {
  return text
    .replace(/\r\n?/g, "\n")
    .replace(/[\0-\x08\x0b-\x1f]/g, (found) => String.fromCharCode(0x2400 + found.charCodeAt(0)))
    .replace(
      /[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
      (found) => `⟨${found.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
    );
}

/** Fills `parent`; `budget` is shared by all that is within one text. */
function blocks(lines, parent, depth, budget) {
  for (let at = 0; at < lines.length;) {
    if (budget.left <= 0 || depth > DEEPEST) {
      parent.append(make("p", {}, lines.slice(at).join("\n")));
      return;
    }
    budget.left -= 1;
    const line = lines[at];
    const fence = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})/.exec(line);
    const heading = /^ {0,3}(#{1,6}) +(.*)$/.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) at = code(lines, at, fence, parent);
    else if (heading) {
      budget.heading = Math.min(budget.heading + 1, heading[1].length + 2, 6);
      parent.append(inline(heading[2], make(`h${budget.heading}`), 0, budget));
      at += 1;
    } else if (line.length < 1000 && RULE.test(line)) {
      parent.append(make("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(line)) at = quote(lines, at, parent, depth, budget);
    else if (LIST.test(line)) at = list(lines, at, parent, depth, budget);
    else if (isTable(lines, at)) at = table(lines, at, parent, budget);
    else at = paragraph(lines, at, parent, budget);
  }
}

function code(lines, start, [, marks, language], parent) {
  let end = start + 1;
  const closes = (line) =>
    line.trim().startsWith(marks) && !line.trim().slice(marks.length).replaceAll(marks[0], "");
  while (end < lines.length && !closes(lines[end])) end += 1;
  parent.append(codeBlock(lines.slice(start + 1, end).join("\n"), language));
  return end + 1;
}

/** Code with its button to copy it. */
export function codeBlock(text, language) {
  return make(
    "div",
    { class: "code" },
    make(
      "div",
      { class: "code-head" },
      make("span", {}, language || "text"),
      copyButton(() => text),
    ),
    make("pre", { tabindex: 0 }, make("code", {}, text)),
  );
}

/** @param {() => string} text */
export function copyButton(text) {
  const copy = async () => {
    await copyText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  const button = make("button", { type: "button", class: "quiet", onclick: copy }, "Copy");
  return button;
}

/** Puts text on the clipboard, on pages without HTTPS too, where there is no `clipboard`. */
async function copyText(text) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch {
    // the old way follows
  }
  const area = make("textarea", { class: "hidden-text", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function quote(lines, start, parent, depth, budget) {
  let end = start;
  const inner = [];
  while (end < lines.length && /^ {0,3}>/.test(lines[end]))
    inner.push(lines[end++].replace(/^ {0,3}> ?/, ""));
  const element = make("blockquote");
  blocks(inner, element, depth + 1, budget);
  parent.append(element);
  return end;
}

function list(lines, start, parent, depth, budget) {
  const [, indent, mark] = LIST.exec(lines[start]);
  const ordered = /\d/.test(mark);
  const first = parseInt(mark, 10);
  const element = make(ordered ? "ol" : "ul", ordered && first !== 1 ? { start: first } : {});
  let at = start;
  while (at < lines.length) {
    const found = LIST.exec(lines[at]);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== ordered || budget.left <= 0)
      break;
    budget.left -= 1;
    const inner = [lines[at++].slice(found[0].length)];
    // what is indented further is this item's, after an empty line too
    const deeper = (line) => line !== undefined && /^ */.exec(line)[0].length > indent.length;
    while (at < lines.length && (deeper(lines[at]) || (!lines[at].trim() && deeper(lines[at + 1])))) {
      const own = Math.min(found[0].length, /^ */.exec(lines[at])[0].length);
      inner.push(lines[at++].slice(own));
    }
    while (
      at < lines.length &&
      !lines[at].trim() &&
      LIST.exec(lines[at + 1] ?? "")?.[1].length === indent.length
    )
      at += 1;
    const item = make("li");
    if (inner.length === 1) inline(inner[0], item, 0, budget);
    else blocks(inner, item, depth + 1, budget);
    element.append(item);
  }
  parent.append(element);
  return at;
}

function isTable(lines, at) {
  const rule = lines[at + 1] ?? "";
  return lines[at].includes("|") && rule.includes("|") && rule.length < 1000 && TABLE_RULE.test(rule);
}

function table(lines, start, parent, budget) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split("|")
      .slice(0, 50);
  const row = (line, tag) => {
    budget.left -= 1;
    return make("tr", {}, ...cells(line).map((cell) => inline(cell.trim(), make(tag), 0, budget)));
  };
  const head = make("thead", {}, row(lines[start], "th"));
  const body = make("tbody");
  let at = start + 2;
  while (at < lines.length && lines[at].includes("|") && budget.left > 0) body.append(row(lines[at++], "td"));
  parent.append(make("div", { class: "wide", tabindex: 0 }, make("table", {}, head, body)));
  return at;
}

function paragraph(lines, start, parent, budget) {
  let end = start + 1;
  const other = (at) =>
    !lines[at].trim() ||
    /^ {0,3}(`{3}|~{3}|#{1,6} |>)/.test(lines[at]) ||
    LIST.test(lines[at]) ||
    isTable(lines, at);
  while (end < lines.length && !other(end)) end += 1;
  parent.append(inline(lines.slice(start, end).join("\n"), make("p"), 0, budget));
  return end;
}

/** Fills `parent` with emphasis, code and links. Each kind of mark is looked for once in vain. */
function inline(text, parent, depth, budget) {
  budget.left -= 1;
  const unclosed = new Set();
  const finder = new RegExp(INLINE);
  let plain = 0; // where text begins that has not been written yet
  const write = (end, node, next) => {
    parent.append(text.slice(plain, end), ...(node ? [node] : []));
    plain = finder.lastIndex = next;
    budget.left -= 1;
  };
  for (let found; budget.left > 0 && (found = finder.exec(text));) {
    const [mark, ticks, label, target, escaped] = found;
    const start = found.index;
    const inside = start + mark.length;
    if (escaped) write(start, document.createTextNode(escaped), inside);
    else if (ticks) {
      const end = unclosed.has(mark) ? -1 : text.indexOf(mark, inside);
      if (end < 0) unclosed.add(mark);
      else write(start, make("code", {}, text.slice(inside, end)), end + mark.length);
    } else if (label) write(start, link(label, target), inside);
    else if (mark.startsWith("http")) {
      const address = mark.replace(/[.,;:!?]+$/, "");
      write(start, link(address, address), start + address.length);
    } else {
      const end = depth >= DEEPEST || unclosed.has(mark) ? NEVER : closing(text, mark, inside);
      if (end === NEVER) unclosed.add(mark);
      if (end >= 0) {
        const element = inline(text.slice(inside, end), make(ELEMENT[mark]), depth + 1, budget);
        write(start, element, end + mark.length);
      }
    }
  }
  parent.append(text.slice(plain));
  return parent;
}

/** Where emphasis ends: `_` within a word and marks beside spaces are text. */
function closing(text, mark, inside) {
  const word = (at) => mark[0] === "_" && /\w/.test(text.charAt(at));
  if (/\s|^$/.test(text.charAt(inside)) || word(inside - mark.length - 1)) return NOT_HERE;
  const end = text.indexOf(mark, inside + 1);
  if (end < 0) return NEVER;
  return /\s/.test(text.charAt(end - 1)) || word(end + mark.length) ? NOT_HERE : end;
}

/** A link to http or https; any other target is shown as the text that it is. */
function link(label, target) {
  let url;
  try {
    url = new URL(target);
  } catch {
    url = null;
  }
  if (url?.protocol !== "https:" && url?.protocol !== "http:")
    return document.createTextNode(label === target ? label : `${label} (${target})`);
  return make("a", { href: url.href, rel: "noopener noreferrer", target: "_blank" }, label);
}
