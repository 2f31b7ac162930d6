/** @file The page: a conversation, its composer, and the server beside it. */
import { Answer } from "./answer.js";
import { askForKeyBy, json } from "./api.js";
import { byId, make } from "./dom.js";
import { watch } from "./glance.js";
import { visible } from "./markdown.js";
import { fields, offer, systemMessages } from "./settings.js";
import { legend } from "./tokens.js";

const EXAMPLES = [
  "What is the capital of France?",
  "Write a Python function that reverses a string.",
  "Why is the sky blue? Answer in three sentences.",
];
const CONTINUED = ["def read_json(path):\n", "class Stack:\n", "import unittest\n"];

let server = {};
/** Messages after the system prompt. @type {object[]} */
let messages = [];
/** @type {Answer | null} */
let last = null;
/** @type {AbortController | null} of the answer that is being written */
let running = null;

const message = byId("message");
const turns = byId("turns");

function say(text) {
  if (messages.at(-1)?.role === "user") messages.pop(); // it got no answer
  messages.push({ role: "user", content: text });
  turns.append(make("article", { class: "user", "aria-label": "You" }, make("p", {}, visible(text))));
  answer();
}

/** Asks for the answer to the messages so far. */
async function answer() {
  let request;
  try {
    request = requestOf(fields());
  } catch {
    openPanel(true);
    return; // the field says what is wrong
  }
  byId("welcome").hidden = true;
  last?.settle();
  const mine = new Answer(request, server, { regenerate: () => regenerate(mine), results });
  last = mine;
  turns.append(mine.element);
  running = new AbortController();
  busy(true);
  mine.element.scrollIntoView({ block: "nearest" });
  const follow = setInterval(() => atEnd() && scrollTo(0, document.body.scrollHeight), 200);
  await mine.run(running.signal);
  clearInterval(follow);
  if (last !== mine) return; // a new chat began
  running = null;
  busy(false);
  if (mine.record.content || mine.record.calls.length) messages.push(mine.message());
}

function requestOf(set) {
  const streamed = {
    model: server.model,
    stream: true,
    stream_options: { include_usage: true, include_drafting: true },
  };
  if (server.chat === false)
    return {
      path: "/v1/completions",
      body: { ...streamed, ...set, prompt: messages.map(({ content }) => content).join("") },
    };
  return {
    path: "/v1/chat/completions",
    body: { ...streamed, ...set, messages: [...systemMessages(), ...messages] },
  };
}

function regenerate(old) {
  if (running || old !== last) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  old.comparison?.stop();
  old.element.remove();
  answer();
}

/** Goes on with what the tools returned. */
function results(calls, texts) {
  calls.forEach((call, i) => messages.push({ role: "tool", tool_call_id: call.id, content: texts[i] }));
  answer();
}

/** Shows the button that makes sense; the focus does not get lost with the other. */
function busy(on) {
  const [shown, hidden] = [byId(on ? "stop" : "send"), byId(on ? "send" : "stop")];
  const focused = document.activeElement === hidden;
  shown.hidden = false;
  if (focused) shown.focus();
  hidden.hidden = true;
}

function send(event) {
  event?.preventDefault();
  const text = message.value.trim() && message.value;
  if (!text || running) return;
  message.value = "";
  grow();
  say(text);
}

function newChat() {
  running?.abort();
  last?.comparison?.stop();
  [running, last, messages] = [null, null, []];
  turns.replaceChildren();
  byId("said").replaceChildren();
  byId("welcome").hidden = false;
  busy(false);
  message.focus();
}

function grow() {
  message.rows = Math.min(8, message.value.split("\n").length);
}

function atEnd() {
  return innerHeight + scrollY > document.body.scrollHeight - 120;
}

function keys(event) {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  running?.abort();
  last?.comparison?.stop();
  for (const card of document.querySelectorAll(".card")) card.hidden = true;
}

function openPanel(open) {
  byId("panel-toggle").ariaExpanded = String(open);
  document.body.classList.toggle("panel-open", open);
}

/** Follows the system until the user chooses. */
function theme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = localStorage.getItem("dflash-theme");
  const apply = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    byId("theme").textContent = dark ? "Light" : "Dark";
    byId("theme").ariaLabel = dark ? "Light colors" : "Dark colors";
  };
  system.addEventListener("change", apply);
  byId("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("dflash-theme", chosen);
    apply();
  });
  apply();
}

/** Asks for the server's key. @returns {Promise<string>} */
function askForKey() {
  const dialog = byId("key-dialog");
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => resolve(dialog.returnValue === "go" ? byId("key").value.trim() : ""),
      { once: true },
    );
  });
}

async function start() {
  theme();
  askForKeyBy(askForKey);
  byId("welcome-legend").append(legend(null));
  byId("composer").addEventListener("submit", send);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", newChat);
  byId("panel-toggle").addEventListener("click", () =>
    openPanel(!document.body.classList.contains("panel-open")),
  );
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  byId("key-dialog")
    .querySelector("form")
    .addEventListener("submit", (event) => {
      event.preventDefault();
      byId("key-dialog").close("go");
    });
  document.addEventListener("keydown", keys);
  message.addEventListener("input", grow);
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  try {
    server = await json("/page/server");
  } catch (error) {
    byId("welcome").append(make("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  byId("model").textContent = server.model;
  document.title = `${server.model} · dflash-trt`;
  offer(server);
  const examples = server.chat === false ? CONTINUED : EXAMPLES;
  if (server.chat === false) message.placeholder = "Begin a text: this model goes on with it";
  byId("examples").replaceChildren(
    ...examples.map((text) =>
      make("button", { type: "button", class: "example", onclick: () => running || say(text) }, text.trim()),
    ),
  );
  watch(server);
  message.focus();
}

start();
