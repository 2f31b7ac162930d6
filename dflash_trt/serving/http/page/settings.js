/** @file What the user sets of requests. */
import { byId } from "./dom.js";
import { Failure } from "./api.js";

/**
 * Offers what the server has.
 * @param {{schema?: boolean, tools?: boolean, chat?: boolean, max_model_len?: number}} server
 */
export function offer(server) {
  byId("schema-field").hidden = server.schema === false;
  byId("tools-field").hidden = server.tools === false;
  byId("system").parentElement.hidden = server.chat === false;
  const length = byId("length");
  if (server.max_model_len) {
    length.max = server.max_model_len;
    length.value = Math.min(length.value, server.max_model_len / 2);
  }
}

/** The fields of a request; throws a `Failure` that names the field which is wrong. */
export function fields() {
  const error = byId("settings-error");
  error.hidden = true;
  try {
    return read();
  } catch (failure) {
    error.textContent = failure.message;
    error.hidden = false;
    byId("settings").open = true;
    throw failure;
  }
}

function read() {
  const request = {
    temperature: numberOf("temperature", "The temperature"),
    max_tokens: numberOf("length", "The number of tokens"),
  };
  // the same seed lets plain decoding draw the same text
  if (request.temperature > 0) request.seed = Math.floor(Math.random() * 2 ** 31);
  const schema = jsonOf("schema", "The JSON schema");
  if (schema) request.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = jsonOf("tools", "The list of tools");
  if (tools) request.tools = tools;
  return request;
}

/** The system prompt as a message, if there is one. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

function numberOf(id, what) {
  const input = byId(id);
  if (!input.value || !input.validity.valid) {
    const most = input.max ? ` to ${input.max}` : "";
    throw new Failure(`${what} has to be a number from ${input.min}${most}.`);
  }
  return Number(input.value);
}

function jsonOf(id, what) {
  const input = byId(id);
  if (input.closest("[hidden]") || !input.value.trim()) return null;
  try {
    return JSON.parse(input.value);
  } catch (error) {
    throw new Failure(`${what} is not JSON: ${error.message}.`);
  }
}
