/** @file Prometheus text, and what changed of it in the last minutes. */

const LINE = /^((?:dflash|trtllm)_\w+)(?:\{(.*)\})? (\S+)$/gm;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
export const KEPT = 90; // samples

/**
 * @typedef {{labels: Record<string, string>, value: number}} Series
 * @typedef {{at: number, families: Map<string, Series[]>}} Sample at: milliseconds
 */

/**
 * @param {string} text
 * @param {number} at
 * @returns {Sample}
 */
export function parse(text, at) {
  const families = new Map();
  for (const [, name, labels, value] of text.matchAll(LINE)) {
    if (!families.has(name)) families.set(name, []);
    const pairs = [...(labels ?? "").matchAll(LABEL)].map(([, key, said]) => [key, said]);
    families.get(name).push({ labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return { at, families };
}

/** The samples of the last minutes. */
export class History {
  constructor() {
    /** @type {Sample[]} */
    this.samples = [];
  }

  /** Takes in a sample; counters that fell are those of a server that was started anew. */
  add(sample) {
    const name = "trtllm_generation_tokens_total";
    if (this.samples.length && total(sample, name) < total(this.samples.at(-1), name)) this.samples = [];
    this.samples.push(sample);
    if (this.samples.length > KEPT) this.samples.shift();
  }

  get last() {
    return this.samples.at(-1);
  }

  /** How much a counter grew while this page looked on; since the server's start if it did not. */
  grown(name, labels = {}) {
    const now = total(this.last, name, labels);
    const grown = now - total(this.samples[0], name, labels);
    return this.quiet ? now : grown;
  }

  /** Whether no token was written while this page looked on. */
  get quiet() {
    const name = "trtllm_generation_tokens_total";
    return total(this.last, name) === total(this.samples[0], name);
  }

  /** A counter's growth per second, between each two samples. */
  rates(name) {
    return this.samples.slice(1).map((sample, i) => {
      const before = this.samples[i];
      return (1000 * (total(sample, name) - total(before, name))) / (sample.at - before.at);
    });
  }

  /** A gauge, sample by sample. */
  values(name) {
    return this.samples.map((sample) => total(sample, name));
  }

  has(name) {
    return this.last.families.has(name);
  }
}

/** The sum of a family's series with these labels. */
export function total(sample, name, labels = {}) {
  const wanted = Object.entries(labels);
  return (sample.families.get(name) ?? [])
    .filter((series) => wanted.every(([key, value]) => series.labels[key] === value))
    .reduce((sum, series) => sum + series.value, 0);
}
