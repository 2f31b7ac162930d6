/** @file The same answer by plain decoding, beside the drafted one at the pace at which it came. */
import { stream } from "./api.js";
import { count, make, number } from "./dom.js";
import { Record } from "./record.js";
import { TokenView } from "./tokens.js";

export class Comparison {
  /**
   * @param {Record} drafted an answer that has ended
   * @param {import("./answer.js").Request} request the one that it answers
   */
  constructor(drafted, request) {
    this.drafted = drafted;
    this.request = request;
    this.plain = new Record(performance.now());
    this.abort = new AbortController();
    this.lanes = [
      lane("With drafts, as it came", "Tokens with drafts"),
      lane("Plain decoding, now", "Tokens of plain decoding"),
    ];
    this.verdict = make("p", { class: "verdict-line", role: "status" });
    this.element = make(
      "div",
      { class: "comparison", role: "group", "aria-label": "Comparison with plain decoding" },
      make("div", { class: "lanes" }, ...this.lanes.map(({ element }) => element)),
      this.verdict,
    );
  }

  stop() {
    this.abort.abort();
  }

  async run() {
    let running = true;
    const tick = () => {
      const ended = this.#show();
      if (running || !ended) setTimeout(tick, 50);
    };
    this.plain.started = performance.now();
    tick();
    let problem = "";
    try {
      const body = { ...this.request.body, drafting: false };
      for await (const event of stream(this.request.path, body, this.abort.signal))
        this.plain.take(event, performance.now());
    } catch (error) {
      problem = error.name === "AbortError" ? "Stopped." : error.message;
    }
    this.plain.ended = performance.now();
    running = false;
    this.#show();
    this.verdict.textContent = problem || verdict(this.drafted, this.plain);
    this.verdict.classList.toggle("error", Boolean(problem));
  }

  /** Both as they are at this moment; whether both have ended. */
  #show() {
    const { drafted, plain } = this;
    const passed = performance.now() - plain.started;
    const came = drafted.rounds.filter(({ at }) => at - drafted.started <= passed);
    const whole = drafted.ended - drafted.started;
    this.lanes[0].show(came, Math.min(passed, whole) / 1000, passed >= whole);
    this.lanes[1].show(plain.rounds, plain.seconds(performance.now()), plain.ended > 0);
    return passed >= whole && plain.ended > 0;
  }
}

/** One text with its clock. */
function lane(title, label) {
  const clock = make("span", { class: "clock" });
  const view = new TokenView(label, { bars: false });
  const element = make("div", { class: "lane" }, make("h3", {}, title), clock, view.element);
  let shown = 0;
  const show = (rounds, seconds, ended) => {
    const tokens = rounds.reduce((sum, round) => sum + round.tokens.length, 0);
    clock.textContent = `${seconds.toFixed(2)} s · ${count(tokens, "token")}`;
    element.classList.toggle("ended", ended);
    if (tokens !== shown) view.update([...rounds], Math.max(0, view.rounds.length - 1));
    shown = tokens;
    if (ended) view.finish();
  };
  return { element, show };
}

/** Whether the texts are equal, and which was faster. */
function verdict(drafted, plain) {
  const same = drafted.text === plain.text;
  const first = [...drafted.text].findIndex((letter, i) => letter !== [...plain.text][i]);
  const texts = same
    ? `The texts are equal: ${count(plain.tokens, "token")}, ${count(plain.text.length, "character")}.`
    : `The texts differ from character ${(first < 0 ? drafted.text.length : first) + 1} on.`;
  if (!drafted.rate || !plain.rate) return texts;
  return `${texts} After the first tokens: ${number(drafted.rate)} tokens/s with drafts, ${number(plain.rate)} without, ${number(drafted.rate / plain.rate)} times as many.`;
}
