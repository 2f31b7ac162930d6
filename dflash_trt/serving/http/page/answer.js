/** @file One answer: it is streamed, shown as tokens or as text, and compared. */
import { stream } from "./api.js";
import { Comparison } from "./compare.js";
import { byId, count, make, number } from "./dom.js";
import { codeBlock, copyButton, markdown, visible } from "./markdown.js";
import { Record } from "./record.js";
import { TokenView, legend } from "./tokens.js";

const SAY_FROM = 160; // characters that are read out together
let preferred = "tokens"; // the view that was chosen last

/**
 * @typedef {{path: string, body: object}} Request
 * @typedef {{plain?: boolean, untold?: string[]}} Server
 */
export class Answer {
  /**
   * @param {Request} request
   * @param {Server} server
   * @param {{regenerate: () => void, results: (calls: object[], texts: string[]) => void}} actions
   */
  constructor(request, server, actions) {
    this.request = request;
    this.server = server;
    this.actions = actions;
    this.record = new Record(performance.now());
    this.said = 0;
    this.rendered = 0; // milliseconds that the last rendering took
    this.tokens = new TokenView("Tokens of the answer, by round", { silence: server.untold?.[0] });
    this.text = make("div", { class: "text" });
    this.legend = make("div");
    this.facts = make("p", { class: "facts small" });
    this.note = make("p", { class: "error", role: "alert", hidden: true });
    this.buttons = make("div", { class: "buttons" });
    this.extra = make("div");
    this.toggles = ["tokens", "text"].map((name) =>
      make(
        "button",
        { type: "button", class: "toggle", onclick: () => this.view((preferred = name)) },
        name === "tokens" ? "Tokens" : "Text",
      ),
    );
    const views = make("div", { class: "views", role: "group", "aria-label": "View" }, ...this.toggles);
    this.element = make(
      "article",
      { class: "answer", "aria-label": "Answer" },
      make("h2", { class: "hidden-text" }, "Answer"),
      make("div", { class: "answer-head" }, views, this.legend),
      this.tokens.element,
      this.text,
      this.note,
      make("div", { class: "answer-foot" }, this.facts, this.buttons),
      this.extra,
    );
    this.view(preferred);
  }

  /** @param {string} name */
  view(name) {
    this.current = name;
    this.toggles.forEach((button, i) => (button.ariaPressed = String(["tokens", "text"][i] === name)));
    this.tokens.element.hidden = name !== "tokens";
    this.text.hidden = name !== "text";
    if (name === "text") this.#render();
  }

  /**
   * Streams until the answer ends, fails or is stopped.
   * @param {AbortSignal} signal
   */
  async run(signal) {
    this.element.classList.add("running");
    this.record.started = performance.now();
    const clock = setInterval(() => this.#facts(), 200);
    let same = Infinity;
    let due = 0;
    const update = () => {
      due = 0;
      this.#update(same);
      same = Infinity;
    };
    try {
      for await (const event of stream(this.request.path, this.request.body, signal)) {
        same = Math.min(same, this.record.take(event, performance.now()));
        due ||= setTimeout(update, Math.max(30, 4 * this.rendered));
      }
    } catch (error) {
      if (error.name === "AbortError") this.stopped = true;
      else this.#fail(error);
    } finally {
      clearInterval(clock);
      clearTimeout(due);
      this.record.ended = performance.now();
      this.#update(Math.min(same, this.record.rounds.length));
      this.#end();
    }
  }

  #update(same) {
    const began = performance.now();
    if (this.record.rounds.length)
      this.tokens.update(
        this.record.rounds,
        Math.min(same, this.tokens.rounds.length, this.tokens.text.children.length),
      );
    else if (this.record.text) this.tokens.plain(this.record.text);
    if (this.current === "text") this.#render();
    this.legend.replaceChildren(legend(this.record.counts));
    this.#facts();
    this.#say(false);
    this.rendered = performance.now() - began;
  }

  #render() {
    const { record } = this;
    const parts = [];
    if (record.reasoning)
      parts.push(
        make(
          "details",
          { class: "thoughts", open: !record.content },
          make("summary", {}, "Thoughts"),
          markdown(record.reasoning),
        ),
      );
    parts.push(markdown(record.content || (record.reasoning || record.calls.length ? "" : record.raw)));
    for (const call of record.calls)
      parts.push(
        make("p", { class: "call" }, `Calls ${visible(call.name)} with`),
        codeBlock(visible(call.arguments), "json"),
      );
    this.text.replaceChildren(...parts);
  }

  #facts() {
    const { record } = this;
    const rounds = record.decoded.length;
    const parts = [`${record.seconds(performance.now()).toFixed(1)} s`];
    if (record.tokens) parts.push(count(record.tokens, "token"));
    if (rounds) parts.push(`${number((record.tokens - record.firstOfPrompt) / rounds)} a round`);
    if (record.rate) parts.push(`${number(record.rate)} tokens/s`);
    if (record.finish === "length") parts.push("ended at the length that was set");
    if (this.stopped) parts.push("stopped");
    this.facts.textContent = parts.join(" · ");
  }

  /** Reads out whole sentences or lines, not tokens. */
  #say(last) {
    const text = this.record.content || this.record.text;
    const news = text.slice(this.said);
    const end = last ? news.length : Math.max(news.lastIndexOf("\n"), news.lastIndexOf(". ")) + 1;
    if (!end || (!last && end < SAY_FROM)) return;
    byId("said").append(make("p", {}, visible(news.slice(0, end))));
    this.said += end;
  }

  #fail(error) {
    this.note.textContent = error.message;
    this.note.hidden = false;
    this.failed = true;
  }

  #end() {
    const { record } = this;
    this.element.classList.remove("running");
    this.tokens.finish();
    this.#say(true);
    const button = (label, act) => make("button", { type: "button", class: "quiet", onclick: act }, label);
    this.again = button("Regenerate", () => this.actions.regenerate());
    this.buttons.replaceChildren(
      ...(record.text ? [copyButton(() => record.content || record.text)] : []),
      this.again,
    );
    const whole = record.finish && !this.failed && !this.stopped;
    if (whole && record.rounds.length && this.server.plain !== false)
      this.buttons.append(button("Compare with plain decoding", () => this.#compare()));
    if (whole && record.calls.length) this.extra.append(this.#results());
  }

  async #compare() {
    this.comparison?.stop();
    this.comparison?.element.remove();
    this.comparison = new Comparison(this.record, this.request);
    this.extra.prepend(this.comparison.element);
    this.comparison.element.scrollIntoView({ block: "nearest" });
    await this.comparison.run();
  }

  /** Asks the user for what the tools return. */
  #results() {
    const calls = this.record.calls;
    const areas = calls.map(() => make("textarea", { rows: 2, class: "mono" }));
    const labels = calls.map((call, i) => make("label", {}, `Result of ${visible(call.name)}`, areas[i]));
    const form = make(
      "form",
      {
        class: "results",
        onsubmit: (event) => {
          event.preventDefault();
          form.remove();
          this.actions.results(
            calls,
            areas.map((area) => area.value),
          );
        },
      },
      ...labels,
      make("button", { type: "submit" }, "Send results"),
    );
    return form;
  }

  /** What the next turn has of it. */
  message() {
    const { content, calls } = this.record;
    if (!calls.length) return { role: "assistant", content };
    const called = calls.map(({ id, name, arguments: args }) => ({
      id,
      type: "function",
      function: { name, arguments: args },
    }));
    return { role: "assistant", content: content || null, tool_calls: called };
  }

  /** Only the last answer can be written again. */
  settle() {
    this.again?.remove();
  }
}
