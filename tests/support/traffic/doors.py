"""Doors: each sends a request and returns its choices. `cut`: after so many pieces."""

import json
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import triton_to_np_dtype

from dflash_trt.chat import (
    HARMONY,
    AnswerParser,
    ChatModel,
    begun_answer,
    load_chat_template,
    parse_tools,
    required_tools,
)
from dflash_trt.checkpoints import Spell, load_tokenizer, speller
from dflash_trt.errors import RequestError
from dflash_trt.request_schema import TOOL_CHOICES, tensors
from dflash_trt.serving.answer import ON_REQUEST, OUTPUTS, Chunk, from_arrays, join_all
from dflash_trt.serving.client import Client
from dflash_trt.serving.http.answers import ChatReader
from dflash_trt.serving.ports import Ports
from tests.support.commands import program
from tests.support.request_tools import WAIT, as_tensors
from tests.support.traffic.requests import Case, Json

MODES = ("ensemble", "in_process")
BESIDE = 32  # requests at a time


class Choice(NamedTuple):
    text: str
    reason: str  # "stop" or "length"
    thoughts: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments
    tokens: tuple[str, ...] | None = None  # with log-probabilities; None: the door has none


Answer = list[Choice] | str  # the choices, or an error in words


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
    kinds = Counter(event["type"] for event in events)
    deltas = [event.get("delta", "") for event in events if _is_text(event)]
    if cut:
        return [Choice("".join(deltas), "")]
    assert not kinds["response.failed"], events[-1]
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
    body = answer.json()
    assert isinstance(body, dict)
    return body


def _events(served: Served, path: str, body: Json, cut: int) -> Iterator[Json]:
    body = {**body, "stream": True}
    with served.http.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            answer.read()
        _check(answer)
        lines = (line[6:] for line in _lines(answer) if line.startswith(b"data: {"))
        for event in _first(map(json.loads, lines), cut):
            assert "error" not in event or event["error"] is None, event
            yield event


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """Yield the lines of a stream; httpx would also split at U+0085, which JSON may hold."""
    rest = b""
    for piece in answer.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


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
    return Choice(
        text, pieces[-1]["finish_reason"], tokens=None if tokens is None else tuple(tokens)
    )


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
        by_id = {entry["custom_id"]: entry for entry in map(json.loads, answers.open())}
    return [
        answer_or_error(_read_line, line, by_id.get(str(place))) for place, line in enumerate(lines)
    ]


def _read_line(line: Line, entry: Json | None) -> list[Choice]:
    assert entry is not None, "a line has no answer"
    response = entry["response"]
    assert response, entry
    if response["status_code"] == 400:
        raise RequestError(str(response["body"]), "")
    assert response["status_code"] == 200, response
    return line.read(response["body"])


def ask(servers: Mapping[str, Served], case: Case, way: Way) -> list[Choice]:
    return DOORS[way.door](servers[way.mode], case, _sent(case, way), 2 if way.cut else 0)


def _sent(case: Case, way: Way) -> Json:
    salt = "warm" if way.warm else secrets.token_hex(8)
    return {**case.options, "drafting": way.drafting, "cache_salt": salt}


def answer_or_error(function: Callable[..., list[Choice]], *arguments: Any) -> Answer:
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
