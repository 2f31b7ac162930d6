"""What clients send, to real servers: a request has one answer, whatever is around it.

`python -m tests.support.traffic COUNT [SEED]` serves a taught pair under chat templates of every
tool format, in both modes, by `dflash-trt serve`. A request is first answered alone, whole, by
plain decoding and with an empty cache. Then it is sent beside 31 others over every door that can
ask for it, whole and streamed, with drafts and without, with a warm cache and a cold one, and cut
by a client that leaves. All answers have to be the first one; what differs is printed as JSON, and
at the end how often each kind of request, way and answer occurred.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import triton_to_np_dtype

from dflash_trt.builder.pipeline import build
from dflash_trt.chat import (
    HARMONY,
    AnswerParser,
    ChatModel,
    begun_answer,
    load_chat_template,
    parse_tools,
    required_tools,
)
from dflash_trt.chat.formats import FORMATS, REASONING_TAGS, ReasoningTags
from dflash_trt.chat.formats.lark import Lark
from dflash_trt.checkpoints import Spell, load_tokenizer, speller
from dflash_trt.errors import RequestError
from dflash_trt.request_schema import TOOL_CHOICES, tensors
from dflash_trt.serving.answer import ON_REQUEST, OUTPUTS, Chunk, from_arrays, join_all
from dflash_trt.serving.client import Client
from dflash_trt.serving.http.answers import ChatReader
from dflash_trt.serving.ports import Ports
from tests.support.builds import config_of, quiet
from tests.support.chats import ANSWER, CALL, SYSTEM, TOOL, USER, call, result, says
from tests.support.commands import program
from tests.support.pairs import Pair, make_pair, teach
from tests.support.request_tools import WAIT, as_tensors
from tests.support.servers import serve_ports, serving
from tests.support.tool_templates import WRITING, renderer

Json = dict[str, Any]
MODES = ("ensemble", "in_process")
BESIDE = 32  # requests at a time
A_SERVER = 250  # requests to one pair of servers, as far as there are formats
SIZES: Json = {"slots": BESIDE, "max_queue": 4096, "max_per_client": 4096, "max_seq_len": 1024}
ALL_KINDS = 100  # requests among which each kind occurs
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
CHANNELS = "<|message|>"  # a mark of harmony
HARMONY_THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
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


class Subject(NamedTuple):
    """What a request is about."""

    kind: str  # chat, text, ids
    steering: str  # see `_steer`


# dealt in turns, so that a hundred requests have all of them
SUBJECTS = [
    *[Subject("chat", "calls")] * 6,
    *[Subject("chat", "required")] * 2,
    *[Subject("chat", "continued")] * 2,
    *[Subject("chat", steering) for steering in ("schema", "letters", "marks", "free")],
    *[Subject("text", steering) for steering in ("letters", "calls", "schema", "free")],
    *[Subject("ids", steering) for steering in ("letters", "marks")],
]


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
        self.url = f"http://127.0.0.1:{ports.http}"
        self.http = httpx.Client(base_url=self.url, timeout=WAIT, limits=limits)
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
        news = self._reader(case).read(chunk)
        calls: dict[int, list[str]] = {}
        for delta in news.calls:
            name, arguments = calls.get(delta.index, ["", ""])
            calls[delta.index] = [name or delta.name, arguments + delta.arguments]
        written = tuple((name, arguments) for name, arguments in calls.values())
        return Choice(news.content, chunk.finish_reason, news.reasoning, written, tokens)

    def _reader(self, case: Case) -> ChatReader:
        options, dialect = case.options, self.chat.dialect
        form = dialect.format if case.tools or dialect.format is HARMONY else None
        tools = parse_tools(case.tools)
        begun = begun_answer(dialect, case.messages) if "continue_final_message" in options else ""

        def new_parser(thinking: bool) -> AnswerParser:
            thinking = thinking and not begun
            return AnswerParser(form, tools, dialect.reasoning_tags, thinking=thinking, begun=begun)

        return ChatReader(
            new_parser,
            one_call=not options.get("parallel_tool_calls", True),
            only_calls=bool(required_tools(tools, options.get("tool_choice", "auto"))),
        )


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


def generate(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    answer = served.http.post("/v2/models/dflash/generate", json=_of_generate(case, sent))
    _check(answer)
    return [served.parsed(case, chunk) for chunk in _chunks(answer.json())]


def generate_stream(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    body = {**_of_generate(case, sent), "stream": True}
    answers = _events(served, "/v2/models/dflash/generate_stream", body, cut)
    chunks = [chunk for answer in answers for chunk in _chunks(answer)]
    return [served.parsed(case, chunk) for chunk in join_all(chunks)]


def completions(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    body = {**_of_openai(sent), "prompt": case.prompt}
    return _read_completions(_post(served, "completions", body))


def completions_stream(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    body = {**_of_openai(sent), "prompt": case.prompt}
    return [_completion(pieces) for pieces in _by_index(served, "completions", body, cut)]


def chats(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    return _read_chats(_post(served, "chat/completions", _chat(case, sent)))


def chats_stream(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    pieces = _by_index(served, "chat/completions", _chat(case, sent), cut)
    return [_chat_choice(choice, "delta") for choice in pieces]


def responses(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    return _read_responses(_post(served, "responses", _response_body(case, sent)))


def responses_stream(served: Served, case: Case, sent: Json, cut: int) -> list[Choice]:
    events = [*_events(served, "/v1/responses", _response_body(case, sent), cut)]
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
    "generate": generate,
    "generate_stream": generate_stream,
}
OF_TEXTS: dict[str, Door] = {
    "completions": completions,
    "completions stream": completions_stream,
}
OF_CHATS: dict[str, Door] = {"chat": chats, "chat stream": chats_stream}
OF_ONE: dict[str, Door] = {"responses": responses, "responses stream": responses_stream}
BATCH = "batch"  # answers many requests by one command
DOORS = TRITON | OF_TEXTS | OF_CHATS | OF_ONE


def doors_of(case: Case) -> list[str]:
    """Return the doors that can ask for it."""
    if not case.messages:
        return [*TRITON, *OF_TEXTS, BATCH]
    has_one = case.options.get("n", 1) == 1
    return [*TRITON, *OF_CHATS, *(OF_ONE if has_one else ()), BATCH]


def _of_triton(case: Case, sent: Json) -> Json:
    return {**sent, "tools": case.tools} if case.tools else dict(sent)


def _of_generate(case: Case, sent: Json) -> Json:
    values = _of_triton(case, sent)
    name = "input_ids" if isinstance(case.prompt, list) else "text_input"
    values["messages" if case.messages else name] = case.input
    return {name: _as_field(name, value) for name, value in values.items()}


def _as_field(name: str, value: Any) -> Any:
    if not tensors()[name].is_json or value in TOOL_CHOICES:
        return value
    return json.dumps(value)


def _chunks(answer: Json) -> list[Chunk]:
    """Return the chunks of an answer of `generate`, without log-probabilities."""
    arrays = {}
    for field_name, output in OUTPUTS.items():
        if field_name in ON_REQUEST:
            continue
        value = answer[output.name]
        values = value if isinstance(value, list) else [value]
        if output.datatype == "BYTES":
            values = [text.encode() for text in values]
        arrays[output.name] = np.array(values, triton_to_np_dtype(output.datatype))
    return from_arrays(arrays, 0.0)


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
    body = {**_of_openai(sent), "input": [*_items(case.messages)]}
    body["max_output_tokens"] = body.pop("max_tokens")
    form = body.pop("response_format", None)
    if form is not None:
        body["text"] = {"format": {"type": form["type"], **form["json_schema"]}}
    if "logprobs" in body:
        body["top_logprobs"] = body.pop("logprobs")
        body["include"] = ["message.output_text.logprobs"]
    if case.tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in case.tools]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        body["tool_choice"] = {"type": "function", **choice["function"]}
    return body


def _items(messages: Sequence[Json]) -> Iterator[Json]:
    for message in messages:
        if "reasoning_content" in message:
            thought = {"type": "summary_text", "text": message["reasoning_content"]}
            yield {"type": "reasoning", "summary": [thought]}
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            yield {"type": "function_call_output", **output}
        elif message.get("content"):
            yield {"role": message["role"], "content": message["content"]}
        for called in message.get("tool_calls", ()):
            yield {"type": "function_call", "call_id": called["id"], **called["function"]}


def _check(answer: httpx.Response) -> None:
    """Raise RequestError for a refusal, and AssertionError for anything but an answer."""
    if answer.status_code == 400:
        raise RequestError(answer.text, "")
    assert answer.status_code == 200, answer.text


def _post(served: Served, path: str, body: Json) -> Json:
    answer = served.http.post(f"/v1/{path}", json=body)
    _check(answer)
    told: Json = answer.json()
    return told


def _events(served: Served, path: str, body: Json, cut: int) -> Iterator[Json]:
    body = {**body, "stream": True}
    with served.http.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            answer.read()
        _check(answer)
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        for event in _first(map(json.loads, lines), cut):
            assert "error" not in event or event["error"] is None, event
            yield event


def _by_index(served: Served, path: str, body: Json, cut: int) -> list[list[Json]]:
    pieces: dict[int, list[Json]] = {}
    for event in _events(served, f"/v1/{path}", body, cut):
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


def _read_completions(answer: Json) -> list[Choice]:
    return [_completion([choice]) for choice in answer["choices"]]


def _read_chats(answer: Json) -> list[Choice]:
    return [_chat_choice([choice], "message") for choice in answer["choices"]]


def _read_responses(answer: Json) -> list[Choice]:
    return [_response(answer)]


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


class Line(NamedTuple):
    """What a line of a batch is made of and read by."""

    url: str
    body: Json
    read: Callable[[Json], list[Choice]]


def _line(case: Case, sent: Json, as_response: bool) -> Line:
    if not case.messages:
        body = {**_of_openai(sent), "prompt": case.prompt}
        return Line("/v1/completions", body, _read_completions)
    if as_response and case.options.get("n", 1) == 1:
        return Line("/v1/responses", _response_body(case, sent), _read_responses)
    return Line("/v1/chat/completions", _chat(case, sent), _read_chats)


def ask_in_a_batch(
    served: Served, cases: Sequence[Case], ways: Sequence[Way]
) -> list[list[Choice] | str]:
    """Return the answers to a file of these requests, or errors in words."""
    lines = [
        _line(case, _sent(case, way), as_response=place % 3 == 0)
        for place, (case, way) in enumerate(zip(cases, ways, strict=True))
    ]
    written = [
        {"custom_id": str(place), "method": "POST", "url": line.url, "body": line.body}
        for place, line in enumerate(lines)
    ]
    with tempfile.TemporaryDirectory() as name:
        requests, answers = Path(name, "requests.jsonl"), Path(name, "answers.jsonl")
        requests.write_text("\n".join(map(json.dumps, written)))
        command = (sys.executable, "-m", "dflash_trt", "batch", requests, answers)
        ran = program(*command, "--url", served.url, timeout=10 * WAIT)
        assert answers.exists(), ran.stderr
        told = {entry["custom_id"]: entry for entry in map(json.loads, answers.open())}
    return [_tried(_read_line, line, told.get(str(place))) for place, line in enumerate(lines)]


def _read_line(line: Line, told: Json | None) -> list[Choice]:
    assert told is not None, "a line has no answer"
    response = told["response"]
    assert response, told
    if response["status_code"] == 400:
        raise RequestError(str(response["body"]), "")
    assert response["status_code"] == 200, response
    return line.read(response["body"])


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialect:
    """What a format's answers are made of."""

    sign: str
    call: str  # as the template writes it
    marks: tuple[str, ...]
    tags: ReasoningTags

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
    thinks, capitals, channel = REASONING_TAGS
    tags = capitals if "[INST]" in before else thinks
    if form.name == "gemma4":
        tags = channel
    return Dialect(
        sign, written, tuple(dict.fromkeys([*form.markers, tags.open, tags.close])), tags
    )


def answer_of(dialect: Dialect, dice: Random) -> str:
    """Return an answer as the format has it: at times a thought, a text, and a call or two."""
    tags = dialect.tags
    thought = f"{tags.open}{tags.label}{{}}{tags.close}"
    if CHANNELS in dialect.marks:
        thought = HARMONY_THOUGHT
    if dice.random() < 0.3:  # the template opened it
        thought = f"{{}}{tags.close}"
    before = dice.choice(["", thought, thought + "\n"]).format(dice.choice(["so", "", "a\nb "]))
    return f"{before}{dice.choice(['', '', 'c'])}{dialect.call * dice.choice([0, 1, 1, 1, 2])}"


def broken(dialect: Dialect, dice: Random) -> list[str]:
    """Return the parts of an answer with marks lost, doubled and misplaced; at times as it is."""
    parts = [answer_of(dialect, dice) or "so"]
    for mark in dialect.marks:
        split = [part.split(mark) for part in parts]
        parts = []
        for pieces in split:
            for piece in pieces[:-1]:
                parts += [piece, mark]
            parts.append(pieces[-1])
    parts = [part for part in parts if part]
    for _ in range(dice.choice([0, 0, 0, 1, 2, 3])):
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


def make_cases(dialect: Dialect, tokenizer: Tokenizer, count: int, dice: Random) -> list[Case]:
    subjects: list[Subject] = []
    while len(subjects) < count:
        subjects += dice.sample(SUBJECTS, len(SUBJECTS))
    return [
        make_case(subjects[place], SAMPLING[place % len(SAMPLING)], dialect, tokenizer, dice)
        for place in range(count)
    ]


def make_case(
    subject: Subject, sampling: Json, dialect: Dialect, tokenizer: Tokenizer, dice: Random
) -> Case:
    options: Json = {**sampling, "max_tokens": dice.randint(1, 40)}
    if options["temperature"]:
        options["seed"] = dice.randrange(2**31)
    if dice.random() < 0.15:
        options["n"] = dice.randint(2, 3)
    if dice.random() < 0.25:
        options["logprobs"] = dice.randint(1, 3)
    steering = subject.steering
    if steering == "continued":
        steering = dice.choice(["calls", "calls", "letters", "marks"])
    _steer(options, steering, dialect, tokenizer, dice)
    if subject.kind != "chat":
        return _text_case(subject, options, tokenizer, dice)
    question = says("user", "".join(dice.choices(LETTERS, k=dice.randint(1, 30))))
    chat = dice.choice([[], [], [SYSTEM], [USER, ANSWER], [USER, CALL, result(1), ANSWER]])
    chat = [*chat, question]
    if "<think>" in dialect.template and dice.random() < 0.5:
        options["chat_template_kwargs"] = {"enable_thinking": False}
    if subject.steering == "continued":
        chat.append(_begun_message(dialect, dice))
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    if subject.steering == "required":
        name = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
        options["tool_choice"] = dice.choice(["required", name])
    has_calls = any("tool_calls" in message for message in chat)
    wants_tools = subject.steering in ("calls", "required") or dice.random() < 0.6
    tools = [TOOL] if wants_tools or has_calls else []
    if tools and dice.random() < 0.3:
        options["parallel_tool_calls"] = False
    return Case(messages=chat, tools=tools, options=options)


def _text_case(subject: Subject, options: Json, tokenizer: Tokenizer, dice: Random) -> Case:
    text = "".join(dice.choices(LETTERS + "xyz\n", k=dice.randint(1, 60)))
    if dice.random() < 0.3:
        options["exclude_input_in_output"] = False
    prompt = tokenizer.encode(text).ids if subject.kind == "ids" else text
    return Case(prompt=prompt, options=options)


def _begun_message(dialect: Dialect, dice: Random) -> Json:
    """Return an answer that is to go on: in a thought, in a text, or behind a call."""
    if CHANNELS in dialect.marks or dice.random() < 0.4:
        return says("assistant", "answer-1" + dice.choice(["", " ", "\n", "é"]))
    if dice.random() < 0.6:
        return says("assistant", f"{dialect.tags.open}{dialect.tags.label}thought-1")
    return dict(CALL)


def _steer(options: Json, kind: str, dialect: Dialect, tokenizer: Tokenizer, dice: Random) -> None:
    """Add what makes the pair write letters, marks, an answer with calls, JSON or an end."""
    ids = [str(tokenizer.encode(letter).ids[0]) for letter in LETTERS]
    marks = [str(tokenizer.token_to_id(mark)) for mark in dialect.marks]
    marks = [mark for mark in marks if mark != "None"]
    biases: dict[str, float] = {}
    words: list[str] = []
    if kind in ("letters", "marks"):
        biases = dict.fromkeys(ids, dice.choice([3.0, 6.0]))
        if dice.random() < 0.6:
            words += ["".join(dice.choices(LETTERS, k=dice.randint(1, 3))) for _ in range(2)]
    if kind == "marks":
        biases |= dict.fromkeys(marks, 6.0)
    if kind == "calls":
        options["guided_grammar"] = answers_grammar(dialect, tokenizer, dice)
    if kind in ("calls", "required"):
        options["max_tokens"] = dice.choice([200, 200, 200, dice.randint(1, 60)])
    if kind == "marks" or (kind == "calls" and dice.random() < 0.2):
        mark = dice.choice(dialect.marks)
        words.append(mark[dice.randrange(len(mark)) :])
    if kind == "schema":
        options["max_tokens"] = dice.choice([80, dice.randint(1, 30)])
    if kind == "schema" and CHANNELS in dialect.marks:  # channels have grammars alone
        options["guided_grammar"] = f"start: %json {json.dumps(SCHEMA)}"
    elif kind == "schema":
        form = {"name": "it", "schema": SCHEMA}
        options["response_format"] = {"type": "json_schema", "json_schema": form}
    if biases and dice.random() < 0.5:
        biases[str(tokenizer.token_to_id("<|end|>"))] = 4.0
    if biases:
        options["logit_bias"] = biases
    if words:
        options["stop_words"] = [*dict.fromkeys(words)]


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


def ask(servers: Mapping[str, Served], case: Case, way: Way) -> list[Choice]:
    return DOORS[way.door](servers[way.mode], case, _sent(case, way), 2 if way.cut else 0)


def _sent(case: Case, way: Way) -> Json:
    salt = "warm" if way.warm else secrets.token_hex(8)
    return {**case.options, "drafting": way.drafting, "cache_salt": salt}


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
        cases = make_cases(dialect, tokenizer, count, dice)
        expected = [_tried(ask, servers, case, PLAIN) for case in cases]
        questions = [
            Question(place, way) for place in range(count) for way in ways_of(cases[place], dice)
        ]
        dice.shuffle(questions)
        for question, answer in _ask_all(servers, cases, questions):
            counts.update(names_of(question.way))
            problem = _problem(expected[question.case], answer, question.way)
            if problem:
                report = {"seed": seed, "format": sign, "way": question.way._asdict()}
                report |= {"request": asdict(cases[question.case]), "problem": problem}
                wrong.append(json.dumps(report, ensure_ascii=False))
        for case, choices in zip(cases, expected, strict=True):
            counts.update(name for name, is_one in KINDS.items() if is_one(case))
            _count_answers(choices, counts)
    return wrong


class Question(NamedTuple):
    case: int
    way: Way


Answer = list[Choice] | str  # the choices, or an error in words
REFUSED = RequestError.__name__


def _ask_all(
    servers: Mapping[str, Served], cases: Sequence[Case], questions: Sequence[Question]
) -> Iterator[tuple[Question, Answer]]:
    """Yield the answers to questions that are asked beside each other."""
    singles = [question for question in questions if question.way.door != BATCH]
    batches = {
        mode: [one for one in questions if one.way.door == BATCH and one.way.mode == mode]
        for mode in MODES
    }
    with ThreadPoolExecutor(BESIDE + len(batches)) as pool:
        files = {
            mode: pool.submit(
                ask_in_a_batch,
                servers[mode],
                [cases[question.case] for question in batch],
                [question.way for question in batch],
            )
            for mode, batch in batches.items()
            if batch
        }
        answers = pool.map(lambda one: _tried(ask, servers, cases[one.case], one.way), singles)
        yield from zip(singles, answers, strict=True)
        for mode, file in files.items():
            yield from zip(batches[mode], file.result(), strict=True)


def _tried(function: Callable[..., list[Choice]], *arguments: Any) -> Answer:
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _problem(expected: Answer, answer: Answer, way: Way) -> str:
    if not isinstance(expected, str) and not isinstance(answer, str):
        return difference(expected, answer, way)
    refused = [str(told).startswith(REFUSED) for told in (expected, answer)]
    return "" if all(refused) else f"{answer} / {expected}"


# --- what there was ------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Case], bool]] = {
    "chats without tools": lambda case: bool(case.messages) and not case.tools,
    "chats with tools": lambda case: bool(case.tools),
    "calls required": lambda case: "tool_choice" in case.options,
    "one call at most": lambda case: "parallel_tool_calls" in case.options,
    "answers continued": lambda case: "continue_final_message" in case.options,
    "texts": lambda case: isinstance(case.prompt, str) and not case.messages,
    "texts as ids": lambda case: isinstance(case.prompt, list),
    "echoed prompts": lambda case: "exclude_input_in_output" in case.options,
    "greedy": lambda case: not case.options["temperature"],
    "T 1": lambda case: case.options["temperature"] == 1 and not case.options.keys() & CUTS,
    "top_p": lambda case: "top_p" in case.options and "top_k" not in case.options,
    "top_k with top_p": lambda case: "top_k" in case.options,
    "penalties": lambda case: any("penalty" in name for name in case.options),
    "bias": lambda case: "logit_bias" in case.options,
    "JSON schemas": lambda case: (
        "response_format" in case.options or "%json" in case.options.get("guided_grammar", "")
    ),
    "answers with marks": lambda case: "guided_grammar" in case.options,
    "stop strings": lambda case: "stop_words" in case.options,
    "n": lambda case: "n" in case.options,
    "log-probabilities": lambda case: "logprobs" in case.options,
}
CUTS = {"top_p", "top_k", "min_p"}
ANSWERS = ("cut by max_tokens", "ended by themselves", "with calls", "with thoughts")
WAYS = (*DOORS, BATCH, *MODES, "drafting", "plain", "warm", "cold", "cancelled")


def names_of(way: Way) -> list[str]:
    names = [way.door, way.mode, "drafting" if way.drafting else "plain"]
    names.append("warm" if way.warm else "cold")
    return [*names, "cancelled"] if way.cut else names


def _count_answers(answer: Answer, counts: Counter[str]) -> None:
    if isinstance(answer, str):
        counts["refused"] += 1
        return
    for choice in answer:
        counts["cut by max_tokens"] += choice.reason == "length"
        counts["ended by themselves"] += choice.reason == "stop"
        counts["with calls"] += bool(choice.calls)
        counts["with thoughts"] += bool(choice.thoughts)


def table(counts: Counter[str]) -> str:
    """Return how often each kind occurred, those that did not too."""
    parts = {"requests": tuple(KINDS), "ways": WAYS, "answers": (*ANSWERS, "refused")}
    lines = []
    for part, names in parts.items():
        lines.append(f"{part}:")
        lines += [f"  {name:<20}{counts[name]:>6}" for name in names]
    return "\n".join(lines)


def missing(counts: Counter[str]) -> list[str]:
    return [name for name in (*KINDS, *WAYS, *ANSWERS) if not counts[name]]


def main(count: int, seed: int) -> int:
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)  # a busy machine's other threads would be waited for
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
    print(table(counts))
    lacking = missing(counts) if count >= ALL_KINDS else []
    if lacking:
        print("did not occur:", ", ".join(lacking))
    return int(bool(wrong or lacking))


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(given[0], given[1] if len(given) > 1 else secrets.randbits(31)))
