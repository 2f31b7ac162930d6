"""What clients send, to real servers: a request has one answer, whatever is around it.

`python -m tests.support.traffic COUNT [SEED]` serves a taught pair under chat templates of every
tool format, in both modes, by `dflash-trt serve`. A request is first answered alone, whole, by
plain decoding and with an empty cache. Then it is sent beside 31 others over every door that can
ask for it, whole and streamed, with drafts and without, with a warm cache and a cold one, and cut
by a client that leaves. All answers have to be the first one; what differs is printed as JSON.

Nobody taught the pair to chat. What it answers is steered: by choices of which it takes one, calls
as the template writes them, whole or with marks lost, doubled and misplaced; and by a bias for the
tokens of marks, which makes a salad of them.
"""

import json
import re
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
from tokenizers import AddedToken, Tokenizer
from tritonclient.grpc import InferenceServerClient, InferInput

from dflash_trt.builder.pipeline import build
from dflash_trt.chat import HARMONY, AnswerParser, ChatModel, load_chat_template, parse_tools
from dflash_trt.chat.formats import FORMATS, REASONING_TAGS
from dflash_trt.chat.formats.lark import Lark
from dflash_trt.checkpoints import Spell, load_tokenizer, speller
from dflash_trt.request_schema import tensors
from dflash_trt.serving.answer import Chunk, from_arrays, join_all
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports
from tests.support.builds import config_of, quiet
from tests.support.chats import ANSWER, CALL, SYSTEM, TOOL, USER, call, result, says
from tests.support.pairs import Pair, make_pair, teach
from tests.support.request_tools import WAIT, as_tensors
from tests.support.servers import serve_ports, serving
from tests.support.tool_templates import WRITING, renderer

Json = dict[str, Any]
MODES = ("ensemble", "in_process")
BESIDE = 32  # requests at a time
A_SERVER = 250  # requests to one pair of servers, as far as there are formats
SIZES: Json = {"slots": BESIDE, "max_queue": 4096, "max_per_client": 4096, "max_seq_len": 1024}
VOCABULARY = 320
# what templates write around an answer
HEAD = re.compile(r"(<.start.>|<.im_start.>|<.start_header_id.>)assistant(<.end_header_id.>)?\n*")
ENDS = ("<|im_end|>\n", "</s>", "<|eot_id|>")
LETTERS = "abc é"
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"enum": [1, None, "x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SAMPLING: list[Json] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.4},
]


@dataclass(frozen=True)
class Case:
    """A request, in the names of Triton's inputs; `messages` or a `prompt`, text or ids."""

    prompt: str | list[int] = ""
    messages: list[Json] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)
    options: Json = field(default_factory=dict)

    @property
    def input(self) -> Any:
        return self.messages or self.prompt


class Choice(NamedTuple):
    text: str
    reason: str  # "stop" or "length"
    thoughts: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments
    tokens: tuple[str, ...] | None = None  # with log-probabilities; None: the door has none


class Way(NamedTuple):
    door: str
    mode: str
    drafting: bool
    warm: bool
    cut: bool = False  # the client leaves after the first pieces


PLAIN = Way("grpc", "in_process", drafting=False, warm=False)  # of what others are held against


class Served:
    """A served build, and connections to it."""

    def __init__(self, directory: Path, ports: Ports) -> None:
        self.tokenizer = load_tokenizer(directory / "tokenizer")
        self.spell: Spell = speller(self.tokenizer)
        self.chat = ChatModel(self.tokenizer, load_chat_template(directory / "tokenizer"))
        limits = httpx.Limits(max_connections=2 * BESIDE)
        url = f"http://127.0.0.1:{ports.http}"
        self.http = httpx.Client(base_url=url, timeout=WAIT, limits=limits)
        self.client = Client(f"127.0.0.1:{ports.grpc}")
        self.grpc = InferenceServerClient(f"127.0.0.1:{ports.grpc}")

    def close(self) -> None:
        self.http.close()
        self.client.__exit__()
        self.grpc.close()

    def parsed(self, case: Case, chunk: Chunk) -> Choice:
        """Return a choice of Triton's doors as OpenAI's tell it."""
        tokens = None
        if case.options.get("logprobs") is not None:
            tokens = tuple(self.spell(token).decode(errors="replace") for token in chunk.token_ids)
        if not case.messages:
            return Choice(chunk.text, chunk.finish_reason, tokens=tokens)
        dialect = self.chat.dialect
        form = dialect.format if case.tools or dialect.format is HARMONY else None
        tools = parse_tools(case.tools)
        parser = AnswerParser(form, tools, dialect.reasoning_tags, thinking=chunk.thinking)
        news = parser.push(chunk.text, last=chunk.finish_reason != "")
        calls: dict[int, list[str]] = {}
        for delta in news.calls:
            name, arguments = calls.get(delta.index, ["", ""])
            calls[delta.index] = [name or delta.name, arguments + delta.arguments]
        written = tuple((name, arguments) for name, arguments in calls.values())
        return Choice(news.content, chunk.finish_reason, news.reasoning, written, tokens)


# --- doors: each sends a request and returns its choices; `cut`: after so many pieces ------------


def grpc_whole(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    answer = served.client.generate(case.input, **_of_triton(case, sent))
    return [served.parsed(case, chunk) for chunk in answer.choices]


def grpc_stream(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    chunks = served.client.stream(case.input, **_of_triton(case, sent))
    return [served.parsed(case, chunk) for chunk in join_all(_first(chunks, cut))]


def grpc_infer(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    values = _of_triton(case, sent)
    values["messages" if case.messages else "text_input"] = case.input
    if isinstance(case.prompt, list):
        values["input_ids"] = values.pop("text_input")
    inputs = []
    for name, array in as_tensors(values).items():
        tensor = InferInput(name, list(array.shape), tensors()[name].datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    answer = served.grpc.infer("dflash_infer", inputs, client_timeout=WAIT)
    names = [output.name for output in answer.get_response().outputs]
    chunks = from_arrays({name: answer.as_numpy(name) for name in names}, 0.0)
    return [served.parsed(case, chunk) for chunk in chunks]


def completions(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    body = {**_of_openai(sent), "prompt": case.prompt}
    return [_completion([choice]) for choice in _post(served, "completions", body)["choices"]]


def completions_stream(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    body = {**_of_openai(sent), "prompt": case.prompt}
    return [_completion(pieces) for pieces in _by_index(served, "completions", body, cut)]


def chats(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    answer = _post(served, "chat/completions", _chat(case, sent))
    return [_chat_choice([choice], "message") for choice in answer["choices"]]


def chats_stream(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    pieces = _by_index(served, "chat/completions", _chat(case, sent), cut)
    return [_chat_choice(choice, "delta") for choice in pieces]


def responses(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    return [_response(_post(served, "responses", _response_body(case, sent)))]


def responses_stream(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    events = [*_events(served, "responses", _response_body(case, sent), cut)]
    told = Counter(event["type"] for event in events)
    deltas = [event.get("delta", "") for event in events if _is_text(event)]
    if cut:
        return [Choice("".join(deltas), "")]
    assert not told["response.failed"], events[-1]
    choice = _response(events[-1]["response"])
    assert choice.text == "".join(deltas), "the deltas are not the text"
    return [choice]


Door = Callable[[Served, Case, Json, int], list[Choice]]
TRITON: dict[str, Door] = {
    "grpc": grpc_whole,
    "grpc stream": grpc_stream,
    "dflash_infer": grpc_infer,
}
OF_TEXTS: dict[str, Door] = {
    "completions": completions,
    "completions stream": completions_stream,
}
OF_CHATS: dict[str, Door] = {"chat": chats, "chat stream": chats_stream}
OF_ONE: dict[str, Door] = {"responses": responses, "responses stream": responses_stream}
DOORS = TRITON | OF_TEXTS | OF_CHATS | OF_ONE


def doors_of(case: Case) -> list[str]:
    """Return the doors that can ask for it."""
    if not case.messages:
        return [*TRITON, *OF_TEXTS]
    # Responses have one choice, and its form, not a whole text, can be told
    has_one = case.options.get("n", 1) == 1
    items = all(message["role"] in ("system", "user") for message in case.messages)
    return [*TRITON, *OF_CHATS, *(OF_ONE if has_one and items else ())]


def _of_triton(case: Case, sent: Json) -> Json:
    return {**sent, "tools": case.tools} if case.tools else dict(sent)


def _of_openai(sent: Json) -> Json:
    body = {"model": "dflash", **sent}
    if "stop_words" in body:
        body["stop"] = body.pop("stop_words")
    if "exclude_input_in_output" in body:
        body["echo"] = not body.pop("exclude_input_in_output")
    return body


def _chat(case: Case, sent: Json) -> Json:
    body = {**_of_openai(sent), "messages": case.messages}
    if case.tools:
        body["tools"] = case.tools
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return body


def _response_body(case: Case, sent: Json) -> Json:
    body = {**_of_openai(sent), "input": case.messages}
    body["max_output_tokens"] = body.pop("max_tokens")
    form = body.pop("response_format", None)
    if form is not None:
        body["text"] = {"format": {"type": form["type"], **form["json_schema"]}}
    if "logprobs" in body:
        body["top_logprobs"] = body.pop("logprobs")
        body["include"] = ["message.output_text.logprobs"]
    if case.tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in case.tools]
    return body


def _post(served: Served, path: str, body: Json) -> Json:
    answer = served.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    told: Json = answer.json()
    return told


def _events(served: Served, path: str, body: Json, cut: int) -> Iterator[Json]:
    body = {**body, "stream": True}
    with served.http.stream("POST", f"/v1/{path}", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        for event in _first(map(json.loads, lines), cut):
            assert "error" not in event or event["error"] is None, event
            yield event


def _by_index(served: Served, path: str, body: Json, cut: int) -> list[list[Json]]:
    pieces: dict[int, list[Json]] = {}
    for event in _events(served, path, body, cut):
        for choice in event["choices"]:
            pieces.setdefault(choice["index"], []).append(choice)
    return [pieces[index] for index in sorted(pieces)]


def _first(pieces: Any, cut: int) -> Iterator[Any]:
    """Yield all pieces, or so many and leave."""
    for count, piece in enumerate(pieces, 1):
        yield piece
        if count == cut:
            break
    if hasattr(pieces, "close"):
        pieces.close()


def _completion(pieces: Sequence[Json]) -> Choice:
    tokens: list[str] | None = None
    for piece in pieces:
        if piece["logprobs"]:
            tokens = (tokens or []) + piece["logprobs"]["tokens"]
    text = "".join(piece["text"] for piece in pieces)
    return Choice(text, pieces[-1]["finish_reason"], tokens=tokens and tuple(tokens))


def _chat_choice(pieces: Sequence[Json], part: str) -> Choice:
    content, thoughts, tokens = "", "", list[str]()
    calls: list[list[str]] = []
    for piece in pieces:
        news = piece[part]
        content += news.get("content") or ""
        thoughts += news.get("reasoning_content") or ""
        tokens += [entry["token"] for entry in (piece["logprobs"] or {}).get("content", [])]
        for delta in news.get("tool_calls") or []:
            if delta.get("id"):
                calls.append([delta["function"]["name"], ""])
            calls[-1][1] += delta["function"].get("arguments") or ""
    reason = str(pieces[-1]["finish_reason"]).replace("tool_calls", "stop")
    written = tuple((name, arguments) for name, arguments in calls)
    return Choice(content, reason, thoughts, written, tuple(tokens) or None)


def _response(response: Json) -> Choice:
    content, thoughts, calls = "", "", []
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
            continue
        if item["type"] == "message":
            content += "".join(part["text"] for part in item["content"])
        else:
            thoughts += "".join(part["text"] for part in item["summary"])
    reason = "stop" if response["status"] == "completed" else "length"
    return Choice(content, reason, thoughts, tuple(calls))


def _is_text(event: Json) -> bool:
    return bool(event["type"] == "response.output_text.delta")


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialect:
    """What a format's answers are made of."""

    sign: str
    call: str  # as the template writes it
    marks: tuple[str, ...]

    @property
    def template(self) -> str:
        return WRITING[self.sign]


def dialect_of(sign: str) -> Dialect:
    render = renderer(WRITING[sign])
    function = call(1)["function"]
    function["arguments"] = json.loads(function["arguments"])
    called = [{**call(1), "id": "abcdefghi", "function": function}]
    message = {**CALL, "content": "", "tool_calls": called}
    before = render(messages=[USER])
    written = HEAD.sub("", render(messages=[USER, message]).removeprefix(before))
    for end in ENDS:
        written = written.removesuffix(end)
    [form] = [each for each in FORMATS if each.sign in written][:1]
    tags = [tag for tags in REASONING_TAGS for tag in (tags.open, tags.close)]
    if "[INST]" in before:
        tags = tags[2:4]
    elif form.name == "gemma4":
        tags = tags[4:]
    else:
        tags = tags[:2]
    return Dialect(sign, written, tuple(dict.fromkeys([*form.markers, *tags])))


def broken(dialect: Dialect, dice: Random) -> list[str]:
    """Return the parts of a call with marks lost, doubled and misplaced; at times as it is."""
    parts = [dialect.call]
    for mark in dialect.marks:
        split = [part.split(mark) for part in parts]
        parts = []
        for pieces in split:
            for piece in pieces[:-1]:
                parts += [piece, mark]
            parts.append(pieces[-1])
    parts = [part for part in parts if part]
    for _ in range(dice.choice([0, 1, 1, 2, 3])):
        at = dice.randrange(len(parts))
        change = dice.choice(["lose", "double", "insert", "cut"])
        if change == "lose" and len(parts) > 1:
            del parts[at]
        elif change == "double":
            parts.insert(at, parts[at])
        elif change == "insert":
            parts.insert(at, dice.choice([*dialect.marks, " ", "\n", "so", '{"a": "']))
        else:
            parts[at] = parts[at][: dice.randrange(len(parts[at])) + 1]
    return parts


def answers_grammar(dialect: Dialect, tokenizer: Tokenizer, dice: Random) -> str:
    """Return a grammar of some broken calls, their marks as tokens or at times spelled."""
    lark = Lark({mark: tokenizer.token_to_id(mark) for mark in dialect.marks})
    spelled = dice.random() < 0.3
    answers = []
    for _ in range(dice.randint(1, 3)):
        parts = broken(dialect, dice)
        is_mark = [part in dialect.marks and not spelled for part in parts]
        written = zip(is_mark, parts, strict=True)
        answers.append(
            " ".join((lark.marker if mark else lark.text)(part) for mark, part in written)
        )
    return lark.grammar(" | ".join(answers))


def make_case(dialect: Dialect, tokenizer: Tokenizer, dice: Random) -> Case:
    options: Json = {**dice.choice(SAMPLING), "max_tokens": dice.randint(1, 40)}
    if options["temperature"]:
        options["seed"] = dice.randrange(2**31)
    if dice.random() < 0.15:
        options["n"] = dice.randint(2, 3)
    if dice.random() < 0.25:
        options["logprobs"] = dice.randint(1, 3)
    _steer(options, dialect, tokenizer, dice)
    if dice.random() < 0.35:
        text = "".join(dice.choices(LETTERS + "xyz\n", k=dice.randint(1, 60)))
        as_ids = dice.random() < 0.3
        if dice.random() < 0.3:
            options["exclude_input_in_output"] = False
        return Case(prompt=tokenizer.encode(text).ids if as_ids else text, options=options)
    question = says("user", "".join(dice.choices(LETTERS, k=dice.randint(1, 30))))
    chat = dice.choice([[], [], [SYSTEM], [USER, ANSWER], [USER, CALL, result(1), ANSWER]])
    tools = [TOOL] if dice.random() < 0.6 or CALL in chat else []
    if "<think>" in dialect.template and dice.random() < 0.5:
        options["chat_template_kwargs"] = {"enable_thinking": False}
    return Case(messages=[*chat, question], tools=tools, options=options)


def _steer(options: Json, dialect: Dialect, tokenizer: Tokenizer, dice: Random) -> None:
    """Add what makes the pair write letters, marks, JSON or an end."""
    ids = [str(tokenizer.encode(letter).ids[0]) for letter in LETTERS]
    marks = [str(tokenizer.token_to_id(mark)) for mark in dialect.marks]
    marks = [mark for mark in marks if mark != "None"]
    kind = dice.choice(["free", "letters", "letters", "marks", "calls", "calls", "calls", "schema"])
    biases: dict[str, float] = {}
    if kind in ("letters", "marks"):
        biases = dict.fromkeys(ids, dice.choice([3.0, 6.0]))
        if dice.random() < 0.6:
            words = ["".join(dice.choices(LETTERS, k=dice.randint(1, 3))) for _ in range(2)]
            options["stop_words"] = [*dict.fromkeys(words)]
    if kind == "marks":
        biases |= dict.fromkeys(marks, 6.0)
    if kind == "calls":
        options["guided_grammar"] = answers_grammar(dialect, tokenizer, dice)
        options["max_tokens"] = dice.choice([200, 200, dice.randint(1, 60)])
    if kind == "schema" and "<|message|>" not in dialect.marks:  # channels have grammars alone
        form = {"name": "it", "schema": SCHEMA}
        options["response_format"] = {"type": "json_schema", "json_schema": form}
        options["max_tokens"] = dice.choice([80, dice.randint(1, 30)])
    if biases and dice.random() < 0.5:
        biases[str(tokenizer.token_to_id("<|end|>"))] = 4.0
    if biases:
        options["logit_bias"] = biases


def ways_of(case: Case, dice: Random) -> list[Way]:
    """Return a way through each door; modes, caches and drafts take turns."""
    ways = []
    turn = dice.randrange(8)
    for place, door in enumerate(doors_of(case)):
        bits = turn + 3 * place
        mode, drafting, warm = MODES[bits & 1], bits & 6 != 2, bool(bits & 4)
        ways.append(Way(door, mode, drafting, warm))
        if "stream" in door and dice.random() < 0.2:
            ways.append(Way(door, mode, drafting, warm, cut=True))
    return ways


# --- the comparison ------------------------------------------------------------------------------


def ask(servers: dict[str, Served], case: Case, way: Way) -> list[Choice]:
    salt = "warm" if way.warm else secrets.token_hex(8)
    sent = {**case.options, "drafting": way.drafting, "cache_salt": salt}
    return DOORS[way.door](servers[way.mode], case, sent, 2 if way.cut else 0)


def difference(expected: Sequence[Choice], got: Sequence[Choice], way: Way) -> str:
    """Return what differs, or ""."""
    if way.cut:
        begun = all(_begins(whole, part) for whole, part in zip(expected, got, strict=False))
        return "" if begun or len(expected) > 1 else f"{got} does not begin {expected}"
    if len(expected) != len(got):
        return f"{len(got)} choices for {len(expected)}"
    for whole, other in zip(expected, got, strict=True):
        unknown = whole.tokens is None or other.tokens is None
        if (whole._replace(tokens=None) if unknown else whole) != (
            other._replace(tokens=None) if unknown else other
        ):
            return f"{other} is not {whole}"
    return ""


def _begins(whole: Choice, part: Choice) -> bool:
    return whole.text.startswith(part.text) and whole.thoughts.startswith(part.thoughts)


@contextmanager
def served_pair(sign: str, directory: Path) -> Iterator[dict[str, Served]]:
    """Serve a taught pair in both modes, with a template that writes calls of this format."""
    pair = make_pair(directory, vocab=VOCABULARY, longest=SIZES["max_seq_len"])
    teach(pair, steps=60)
    _teach_marks(pair, dialect_of(sign))
    with ExitStack() as stack:
        servers = {}
        for mode in MODES:
            config = config_of(directory, engine={"threads": 1}, serving={**SIZES, "mode": mode})
            build(config, directory / mode, quiet)
        with ThreadPoolExecutor(len(MODES)) as pool:
            running = {mode: serve_ports() for mode in MODES}
            starts = [
                pool.submit(stack.enter_context, serving(directory / mode, ports))
                for mode, ports in running.items()
            ]
            for start in starts:
                start.result()
        for mode, ports in running.items():
            servers[mode] = Served(directory / mode, ports)
            stack.callback(servers[mode].close)
        yield servers


def _teach_marks(pair: Pair, dialect: Dialect) -> None:
    """Give a pair a chat template, and its marks as special tokens in place of unused ones."""
    file = pair.target_dir / "tokenizer.json"
    written = json.loads(file.read_text())
    vocabulary = written["model"]["vocab"]
    marks = [mark for mark in dialect.marks if mark not in vocabulary]
    for place, mark in enumerate(marks, 256):
        vocabulary[mark] = vocabulary.pop(f"<|unused{place}|>")
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(file))
    settings = pair.target_dir / "tokenizer_config.json"
    template = {"chat_template": dialect.template}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | template))


def run(sign: str, count: int, seed: int, counts: Counter[str]) -> list[str]:
    """Send so many requests of one format to its servers; return the differences."""
    dice = Random(f"{seed} {sign}")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name, served_pair(sign, Path(name)) as servers:
        tokenizer = servers[PLAIN.mode].tokenizer
        dialect = dialect_of(sign)
        cases = [make_case(dialect, tokenizer, dice) for _ in range(count)]
        expected = [_tried(servers, case, PLAIN) for case in cases]
        ways = [(place, way) for place in range(count) for way in ways_of(cases[place], dice)]
        dice.shuffle(ways)
        with ThreadPoolExecutor(BESIDE) as pool:
            answers = pool.map(lambda each: _tried(servers, cases[each[0]], each[1]), ways)
            for (place, way), answer in zip(ways, answers, strict=True):
                counts[way.door + (", left" if way.cut else "")] += 1
                first = expected[place]
                if isinstance(first, str) or isinstance(answer, str):
                    problem = f"{answer} / {first}"
                else:
                    problem = difference(first, answer, way)
                if problem:
                    report = {"seed": seed, "format": sign, "way": way._asdict()}
                    report |= {"request": asdict(cases[place]), "problem": problem}
                    wrong.append(json.dumps(report, ensure_ascii=False))
        for case, choices in zip(cases, expected, strict=True):
            _count(case, choices, counts)
    return wrong


def _tried(servers: dict[str, Served], case: Case, way: Way) -> list[Choice] | str:
    """Return the choices, or an error in words."""
    try:
        return ask(servers, case, way)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _count(case: Case, choices: list[Choice] | str, counts: Counter[str]) -> None:
    counts["chats" if case.messages else "texts"] += 1
    for choice in choices:
        if isinstance(choice, Choice):
            counts[f"ended by {choice.reason}"] += 1
            counts["with calls"] += bool(choice.calls)
            counts["with thoughts"] += bool(choice.thoughts)


def main(count: int, seed: int) -> int:
    print(f"seed {seed}", flush=True)
    signs = [*WRITING]
    Random(seed).shuffle(signs)
    signs = signs[: max(1, -(-count // A_SERVER))]
    wrong, counts, done = list[str](), Counter[str](), 0
    for place, sign in enumerate(signs):
        share = (count - done) // (len(signs) - place)
        different = run(sign, share, seed, counts)
        wrong += different
        done += share
        print(f"{done} requests, {len(wrong)} different", *different, sep="\n", flush=True)
    print(*(f"{name}: {number}" for name, number in sorted(counts.items())), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(given[0], given[1] if len(given) > 1 else secrets.randbits(31)))
