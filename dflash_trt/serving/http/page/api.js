/** @file Calls to the server that served this page, and to no other. */

/** What went wrong, as a sentence for the user. */
export class Failure extends Error {
  /** @param {string} message @param {number} [status] of HTTP; 0: none came */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Where the server is: an ingress may give it a path of its own. */
const ROOT = new URL("..", import.meta.url);
const KEY = "dflash-key";
let key = sessionStorage.getItem(KEY) ?? "";
/** Asks for the key; set by the page. */
let ask = async () => "";
let asking = null;

/** @param {() => Promise<string>} question resolves to a key, or to "" if there is none */
export function askForKeyBy(question) {
  ask = question;
}

/**
 * A response that is fine; asks for the key where the server wants one.
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<Response>}
 */
async function call(path, options = {}) {
  for (;;) {
    const sent = key;
    const headers = { ...options.headers, ...(sent && { Authorization: `Bearer ${sent}` }) };
    let response;
    try {
      response = await fetch(new URL(`.${path}`, ROOT), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server cannot be reached. Is it still running?");
    }
    if (response.ok) return response;
    const message = await sentence(response);
    if (response.status !== 401) throw new Failure(message, response.status);
    if (sent === key) {
      asking ??= ask().finally(() => (asking = null)); // several calls, one question
      const answer = await asking;
      if (!answer) throw new Failure(message, 401);
      key = answer;
      sessionStorage.setItem(KEY, key);
    }
  }
}

/** What the server says of an error. */
async function sentence(response) {
  try {
    const { error } = JSON.parse(await response.text());
    return error.message ?? error;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

export async function json(path) {
  return (await call(path)).json();
}

export async function text(path) {
  return (await call(path)).text();
}

/**
 * The events of a streamed answer.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 */
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parts = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      parts.push(value);
      if (!value.includes("\n")) continue;
      const lines = parts.join("").split("\n");
      parts.splice(0, parts.length, lines.pop());
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = parse(data);
        if (event.error) throw new Failure(event.error.message ?? String(event.error), 500);
        yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Failure) throw error;
    throw new Failure("The answer was cut off: the connection to the server ended.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Failure("The answer was cut off: the connection to the server ended.");
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Failure("The server sent something that this page does not understand.");
  }
}
