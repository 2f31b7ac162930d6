/**
 * @file What is known of one answer, put together from the chunks of its stream.
 *
 * @typedef {"drafter" | "lookup" | "grammar" | "target" | "untold"} Source
 * @typedef {{text: string, source: Source}} Token
 * @typedef {{text: string, source: Source, accepted: boolean, probability: number | null, parent?: number}} Draft
 * @typedef {{round: number, tokens: Token[], proposal: Draft[], at: number}} Round
 * @typedef {{name: string, arguments: string, id: string}} Call
 */

/** Who may have proposed a token, in the order of legends; `word` is for people. */
export const SOURCES = [
  { name: "drafter", word: "drafter", about: "proposed by the drafter and accepted" },
  { name: "lookup", word: "looked up", about: "copied from earlier in the text (n-gram match) and accepted" },
  { name: "grammar", word: "grammar", about: "forced by the schema or grammar" },
  { name: "target", word: "model itself", about: "written by the model in its own pass" },
  { name: "untold", word: "not told", about: "this engine does not tell who proposed it" },
];

export class Record {
  /** @param {number} started milliseconds, by `performance.now()` */
  constructor(started) {
    this.started = started;
    this.ended = 0; // 0: it still runs
    this.raw = ""; // the model's whole text, token by token
    this.content = "";
    this.reasoning = "";
    /** @type {Call[]} */
    this.calls = [];
    /** @type {Round[]} */
    this.rounds = [];
    this.counts = { drafter: 0, lookup: 0, grammar: 0, target: 0, untold: 0 };
    this.tokens = 0;
    this.firstAt = 0; // when the first tokens came
    this.firstTokens = 0; // how many those were
    this.lastAt = 0;
    this.finish = null;
    this.usage = null;
  }

  /**
   * Takes in an event; how many rounds before it are as they were.
   * @param {any} event
   * @param {number} now
   */
  take(event, now) {
    if (event.usage) this.usage = event.usage;
    const same = Math.max(0, this.rounds.length - 1);
    const choice = event.choices?.[0];
    if (!choice) return same;
    const delta = choice.delta ?? { content: choice.text };
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) this.#call(call);
    for (const round of choice.drafting?.rounds ?? []) this.#round(round, now);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (this.tokens && !this.firstAt) [this.firstAt, this.firstTokens] = [now, this.tokens];
    return same;
  }

  #call({ index, id, function: called }) {
    const known = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    known.id ||= id ?? "";
    known.name += called?.name ?? "";
    known.arguments += called?.arguments ?? "";
  }

  /** A round may come in several chunks. */
  #round({ round, tokens, proposal }, now) {
    let last = this.rounds.at(-1);
    if (last?.round !== round) {
      last = { round, tokens: [], proposal: [], at: now };
      this.rounds.push(last);
    }
    last.proposal.push(...(proposal ?? []));
    for (const { text, source } of tokens) {
      const known = source in this.counts ? source : "untold";
      last.tokens.push({ text, source: known });
      this.raw += text;
      this.counts[known] += 1;
      this.tokens += 1;
    }
    if (tokens.length) this.lastAt = now;
  }

  /** The whole text, of servers too that say nothing of tokens. */
  get text() {
    return this.rounds.length ? this.raw : this.reasoning + this.content;
  }

  /** Seconds from the request to its end, or to `now`. */
  seconds(now) {
    return Math.max(0, ((this.ended || now) - this.started) / 1000);
  }

  /** Tokens a second after the first ones; 0 if it cannot be said. */
  get rate() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : 0;
  }

  /** Tokens of the prompt's own pass. */
  get firstOfPrompt() {
    return this.rounds[0]?.round === 0 ? this.rounds[0].tokens.length : 0;
  }

  /** Rounds that decoded; the first is the prompt's own pass. */
  get decoded() {
    return this.rounds.filter(({ round }) => round > 0);
  }
}
