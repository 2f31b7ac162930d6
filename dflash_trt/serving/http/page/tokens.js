/** @file An answer as its tokens, colored by who proposed them, round by round. */
import { count, draw, make, percent } from "./dom.js";
import { visible } from "./markdown.js";
import { SOURCES } from "./record.js";

let views = 0;

/** The tokens of one answer, one tab stop: arrow keys go from round to round. */
export class TokenView {
  /**
   * @param {string} label what it shows, for screen readers
   * @param {{bars?: boolean, silence?: string}} [options] silence: why there are no proposals
   */
  constructor(label, { bars = true, silence = "" } = {}) {
    this.silence = silence;
    /** @type {import("./record.js").Round[]} */
    this.rounds = [];
    this.shown = null; // the round whose details are shown
    const id = `round-${(views += 1)}`;
    this.card = make("div", { class: "card", id, hidden: true });
    this.text = make("div", {
      class: "tokens",
      role: "listbox",
      "aria-label": label,
      "aria-orientation": "horizontal",
      "aria-busy": "true",
    });
    this.bars = new Bars(bars);
    this.element = make("div", { class: "token-view" }, this.text, this.card, this.bars.element);
    this.#listen(id);
  }

  #listen(id) {
    const over = ({ target }) => this.show(indexOf(target));
    this.text.addEventListener("mouseover", over);
    this.bars.element.addEventListener("mouseover", over);
    this.element.addEventListener("mouseleave", () => this.show(-1));
    this.text.addEventListener("focusin", ({ target }) => {
      this.show(indexOf(target));
      target.setAttribute("aria-describedby", id);
    });
    this.text.addEventListener("focusout", () => this.show(-1));
    this.text.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const last = this.text.children.length - 1;
    const at = indexOf(event.target);
    const next = {
      ArrowRight: at + 1,
      ArrowDown: at + 1,
      ArrowLeft: at - 1,
      ArrowUp: at - 1,
      Home: 0,
      End: last,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.text.children[Math.min(last, Math.max(0, next))].focus();
  }

  /**
   * Shows these rounds; the first `same` are as they were.
   * @param {import("./record.js").Round[]} rounds
   */
  update(rounds, same) {
    this.rounds = rounds;
    replaceFrom(this.text, same, rounds, (round, i) => this.#round(round, i));
    this.bars.update(rounds, same);
    if (this.shown !== null && this.shown >= same) this.show(this.shown);
  }

  /** Text of a server that says nothing of tokens. */
  plain(text) {
    this.text.removeAttribute("role");
    this.text.replaceChildren(visible(text));
  }

  finish() {
    this.text.removeAttribute("aria-busy");
    if (!this.rounds.length) this.text.removeAttribute("role");
  }

  #round(round, index) {
    const tokens = round.tokens.map(({ text, source }) => {
      const newline = text.includes("\n") && !text.trim() ? " newline" : "";
      return make("span", { class: `token ${source}${newline}` }, visible(text));
    });
    const said = round.tokens.map(({ text }) => text).join("");
    const label = `${title(round)}: ${visible(said).trim() || "space"}`;
    return make(
      "span",
      {
        class: "round",
        role: "option",
        "aria-selected": "false",
        "aria-label": label,
        tabindex: index ? -1 : 0,
        "data-index": index,
      },
      ...tokens,
    );
  }

  /** Details of a round; -1: none. */
  show(index) {
    if (index === this.shown && index < 0) return;
    for (const part of this.element.querySelectorAll(".round.shown, .bar.shown")) {
      part.classList.remove("shown");
      if (part.role) part.ariaSelected = "false";
    }
    const round = this.rounds[index];
    this.shown = round ? index : null;
    this.card.hidden = !round;
    if (!round) return;
    const element = this.text.children[index];
    element.classList.add("shown");
    element.ariaSelected = "true";
    this.bars.element.querySelector(`[data-index="${index}"]`)?.classList.add("shown");
    this.card.replaceChildren(...details(round, this.silence));
    this.#place(element);
  }

  /** The card stands below the last line of its round, within the answer. */
  #place(element) {
    const box = this.element.getBoundingClientRect();
    const lines = element.getClientRects();
    const line = lines[lines.length - 1] ?? box;
    const left = Math.min(line.left - box.left, box.width - this.card.offsetWidth);
    this.card.style.left = `${Math.max(0, left)}px`;
    this.card.style.top = `${line.bottom - box.top + 4}px`;
  }
}

/** Makes the children from `same` on anew. */
function replaceFrom(parent, same, rounds, child) {
  for (let left = parent.childElementCount - same; left > 0; left -= 1) parent.lastChild.remove();
  const news = document.createDocumentFragment();
  for (let i = same; i < rounds.length; i += 1) news.append(child(rounds[i], i));
  parent.append(news);
}

function indexOf(target) {
  const found = target.closest?.("[data-index]");
  return found ? Number(found.dataset.index) : -1;
}

function title({ round, tokens }) {
  return round === 0
    ? `The prompt's pass, ${count(tokens.length, "token")}`
    : `Round ${round}, ${count(tokens.length, "token")}`;
}

/** What a round proposed, and what became of it. */
function details(round, silence) {
  const head = make("p", { class: "card-title" }, title(round));
  if (round.round === 0)
    return [
      head,
      make("p", {}, "The model read the prompt and wrote its first token. Nothing is drafted before that."),
    ];
  if (!round.proposal.length)
    return [head, make("p", {}, silence || "Nothing was proposed: the model wrote this by itself.")];
  const accepted = round.proposal.filter((draft) => draft.accepted).length;
  const refused = round.proposal.length - accepted;
  const rows = round.proposal.map((draft, i) =>
    make(
      "li",
      { class: draft.accepted ? "accepted" : "refused" },
      make(
        "span",
        { class: "verdict" },
        draft.accepted ? "✓" : "✗",
        make("span", { class: "hidden-text" }, draft.accepted ? "accepted" : "refused"),
      ),
      make("span", { class: "place" }, String(i + 1)),
      make("span", { class: `token ${draft.source ?? "untold"}` }, spaced(draft.text)),
      make("span", { class: "likely" }, ...likelihood(draft.probability)),
    ),
  );
  const own = round.tokens.filter(({ source }) => source === "target").map(({ text }) => text);
  const after = own.length
    ? make("p", {}, "Then the model's own: ", make("span", { class: "token target" }, spaced(own.join(""))))
    : "";
  return [
    head,
    make("p", {}, `${round.proposal.length} proposed, ${accepted} accepted, ${refused} refused.`),
    make("ol", {}, ...rows),
    after,
  ];
}

function likelihood(probability) {
  if (probability == null) return ["–"];
  return [make("meter", { value: probability, min: 0, max: 1, "aria-hidden": "true" }), percent(probability)];
}

/** Text of a token, with its spaces and line ends to be seen. */
function spaced(text) {
  return visible(text).replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

/** A bar for each round, as high as it has tokens. */
class Bars {
  constructor(wanted) {
    this.most = 1;
    this.picture = draw("svg", { role: "img", preserveAspectRatio: "none" });
    this.caption = make("figcaption");
    this.element = make("figure", { class: "bars", hidden: true }, this.picture, this.caption);
    this.wanted = wanted;
  }

  update(rounds, same) {
    if (!this.wanted || !rounds.length) return;
    this.element.hidden = false;
    replaceFrom(this.picture, same, rounds, bar);
    this.most = Math.max(this.most, ...rounds.slice(same).map(({ tokens }) => tokens.length));
    this.picture.setAttribute("viewBox", `0 ${-this.most} ${rounds.length} ${this.most}`);
    this.picture.setAttribute("width", String(rounds.length * 10));
    const said = `Tokens by round: ${count(rounds.filter(({ round }) => round > 0).length, "round")}, up to ${count(this.most, "token")} in one`;
    this.picture.setAttribute("aria-label", said);
    this.caption.textContent = said;
  }
}

function bar({ tokens }, index) {
  const group = draw(
    "g",
    { class: "bar", "data-index": index },
    draw("rect", { class: "back", x: index, y: -99, width: 1, height: 99 }),
  );
  let height = 0;
  for (const { name } of SOURCES) {
    const amount = tokens.filter(({ source }) => source === name).length;
    if (amount)
      group.append(
        draw("rect", { class: name, x: index + 0.1, y: -height - amount, width: 0.8, height: amount }),
      );
    height += amount;
  }
  return group;
}

/** Who wrote how many tokens. */
export function legend(counts) {
  const items = SOURCES.filter(({ name }) => name !== "untold" || counts?.untold).map(
    ({ name, word, about }) =>
      make(
        "li",
        { title: about, "data-source": name, "data-count": counts?.[name] ?? "" },
        make("span", { class: `token ${name}` }, word),
        counts ? ` ${counts[name].toLocaleString("en")}` : "",
      ),
  );
  return make("ul", { class: "legend", "aria-label": "Who proposed the tokens" }, ...items);
}
