/** @file The server at a glance: its metrics of the last minutes as figures and small charts. */
import { text } from "./api.js";
import { byId, draw, make, number, percent } from "./dom.js";
import { History, KEPT, parse } from "./metrics.js";

const EVERY = 2000; // milliseconds
const TOKENS = "trtllm_generation_tokens_total";
const DRAFTED = "trtllm_spec_decode_drafted_tokens_total";
const ACCEPTED = "trtllm_spec_decode_accepted_tokens_total";
const WIDTH = 280;
const HEIGHT = 60;

/**
 * Shows the server, and looks again as long as the page can be seen.
 * @param {any} server what `/page/server` says
 */
export async function watch(server) {
  const history = new History();
  const body = byId("glance-body");
  for (;;) {
    if (document.visibilityState === "visible" && body.offsetParent) {
      try {
        history.add(parse(await text("/metrics"), performance.now()));
        body.replaceChildren(...parts(history, server));
      } catch (error) {
        body.replaceChildren(make("p", { class: "error" }, error.message));
        if (error.status === 401) return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, EVERY));
  }
}

function parts(history, server) {
  const minutes = (KEPT * EVERY) / 60000;
  const since = history.quiet
    ? "Nothing was written while this page looked on: shares are those since the server started."
    : `Of the last ${minutes} minutes, or since this page looks on.`;
  const found = [figures(history, server), make("p", { class: "small" }, since)];
  const rates = history.rates(TOKENS);
  found.push(
    chart(
      "Tokens/s",
      line([rates]),
      `now ${number(rates.at(-1) ?? 0)}, at most ${number(Math.max(0, ...rates))}`,
    ),
  );
  const running = history.values("trtllm_num_requests_running");
  const waiting = history.values("trtllm_num_requests_waiting");
  found.push(
    chart(
      "Requests",
      line([running, waiting]),
      `${running.at(-1)} running, ${waiting.at(-1)} waiting (dashed)`,
    ),
  );
  const shares = acceptance(history, server);
  if (shares.length)
    found.push(chart("Drafts accepted, by position", bars(shares), shares.map(percent).join(", ")));
  found.push(cache(history), ...about(server));
  return found.filter(Boolean);
}

function figures(history, server) {
  const rate = history.rates(TOKENS).at(-1) ?? 0;
  const used = history.values("trtllm_num_requests_running").at(-1);
  const rounds = history.grown("dflash_acceptance_length_count");
  const facts = [
    ["Tokens/s", number(rate)],
    ["Waiting", number(history.values("trtllm_num_requests_waiting").at(-1))],
    ["Slots in use", server.slots ? `${used} of ${server.slots}` : number(used)],
    ["Tokens a round", rounds ? number(history.grown("dflash_acceptance_length_sum") / rounds) : "–"],
  ];
  return make(
    "dl",
    { class: "figures" },
    ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
}

/** The share of drafts that was accepted at each position that was drafted. */
function acceptance(history, server) {
  const shares = [];
  for (let position = 0; position < (server.max_draft_tokens ?? 64); position += 1) {
    const labels = { token_position: String(position) };
    const drafted = history.grown(DRAFTED, labels);
    if (!drafted) break;
    shares.push(history.grown(ACCEPTED, labels) / drafted);
  }
  return shares;
}

function cache(history) {
  const prompt = history.grown("trtllm_prompt_tokens_total");
  if (!prompt) return null;
  const bytes = history.has("dflash_prefix_cache_bytes")
    ? `, ${number(history.values("dflash_prefix_cache_bytes").at(-1) / 2 ** 20)} MiB kept`
    : "";
  const hits = history.grown("dflash_cached_prompt_tokens_total") / prompt;
  return chart("Prompt cache", meter(hits), `${percent(hits)} of prompt tokens reused${bytes}`);
}

function about(server) {
  const untold = (server.untold ?? []).map((sentence) => make("p", { class: "small" }, sentence));
  const facts = make(
    "p",
    { class: "small" },
    `${server.model ?? "A model"} on ${server.engine ?? "this engine"}, up to ${server.max_model_len} tokens, ${server.max_draft_tokens} drafts a round.`,
  );
  return [facts, ...untold];
}

function chart(title, picture, caption) {
  picture.setAttribute("aria-label", `${title}: ${caption}`);
  return make(
    "section",
    { class: "chart" },
    make("h3", {}, title),
    picture,
    make("p", { class: "small" }, caption),
  );
}

/** Lines over the last minutes, the newest at the right; the second is dashed. */
function line(series) {
  const most = Math.max(1e-9, ...series.flat());
  const points = (values) =>
    values
      .map(
        (value, i) =>
          `${(WIDTH * (i + KEPT - values.length)) / (KEPT - 1)},${HEIGHT - 2 - ((HEIGHT - 6) * value) / most}`,
      )
      .join(" ");
  const picture = draw(
    "svg",
    { role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "line" },
    draw("path", { class: "ground", d: `M0 ${HEIGHT - 1}H${WIDTH}` }),
  );
  const [first] = series;
  if (first.length > 1) {
    const from = (WIDTH * (KEPT - first.length)) / (KEPT - 1);
    picture.append(
      draw("polygon", { class: "area", points: `${from},${HEIGHT} ${points(first)} ${WIDTH},${HEIGHT}` }),
    );
  }
  picture.append(
    ...series.map((values, i) => draw("polyline", { class: i ? "dashed" : "solid", points: points(values) })),
  );
  return picture;
}

/** Shares, 0 to 1, as bars. */
function bars(shares) {
  const step = WIDTH / shares.length;
  const rects = shares.flatMap((share, i) => [
    draw("rect", { class: "back", x: i * step + 1, y: 0, width: step - 2, height: HEIGHT }),
    draw("rect", {
      class: "drafter",
      x: i * step + 1,
      y: HEIGHT * (1 - share),
      width: step - 2,
      height: HEIGHT * share,
    }),
  ]);
  return draw("svg", { role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "shares" }, ...rects);
}

function meter(share) {
  return draw(
    "svg",
    { role: "img", viewBox: `0 0 ${WIDTH} 8`, class: "shares" },
    draw("rect", { class: "back", width: WIDTH, height: 8, rx: 4 }),
    draw("rect", { class: "drafter", width: WIDTH * share, height: 8, rx: 4 }),
  );
}
