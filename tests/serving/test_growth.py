"""What a request costs before it is queued: no field's work grows faster than the field.

Each field is sent at its largest size and at half of it. Twice the size may take up to three times
as long; work that grows with the square takes four times as long, at these sizes for seconds.
"""

import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dflash_trt.chat import ChatModel, parse_tools
from dflash_trt.config.build import Speculation
from dflash_trt.errors import RequestError
from dflash_trt.request_schema import MAX_TOOLS
from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.fields import ChatFields, TextFields, fields_of
from dflash_trt.serving.http.guard import BODY_LIMIT
from dflash_trt.serving.http.responses import ResponseStore, read_request
from dflash_trt.serving.http.triton_body import generate_body, infer_body
from dflash_trt.serving.model.requests import parse_request
from dflash_trt.serving.strict_json import parse_object
from dflash_trt.wire import Settings
from tests.support.request_tools import as_tensors
from tests.support.tool_templates import NO_SYSTEM, WRITING
from tests.unit.test_tool_messages import chat_model

GROWTH = 3.0
AT_ONCE = 0.1  # seconds of work that disturb nobody, and are too short to be compared
TRIES = 2
ATTEMPTS = 3  # others may take the processor's caches during one


def least_seconds(work: Callable[[], object]) -> float:
    """Return the least processor time of some tries, without the garbage collector's."""
    seconds = []
    gc.disable()
    for _ in range(TRIES):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    gc.enable()
    return min(seconds)


def assert_grows_no_faster(work: Callable[[int], Callable[[], object]], largest: int) -> None:
    for _ in range(ATTEMPTS):
        whole = least_seconds(work(largest))
        half = least_seconds(work(largest // 2))
        if whole < max(AT_ONCE, GROWTH * half):
            return
    raise AssertionError(f"{half:.2f} s for half the size, {whole:.2f} s for all of it")


def ignoring_refusals(read: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with suppress(Failure, RequestError):
            read()

    return run


# --- in the public model --------------------------------------------------------------------------

USER = {"role": "user", "content": "question"}


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": {}}}


def call(number: int, name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "tool_0", "arguments": "{}"}}


def calls(count: int, id_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return a message of many calls, and their results."""
    calling = {"role": "assistant", "tool_calls": [call(n, id_of(n)) for n in range(count)]}
    results = [{"role": "tool", "tool_call_id": id_of(n), "content": "r"} for n in range(count)]
    return [USER, calling, *results]


# by the kind of request: its tensors for a number, and the largest one
SENT: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "tools": (lambda n: {"messages": [USER], "tools": [tool(i) for i in range(n)]}, MAX_TOOLS),
    "messages": (lambda n: {"messages": [USER] * n}, 20_000),
    "one long message": (lambda n: {"messages": [{**USER, "content": "a " * n}]}, 1_000_000),
    "parts": (
        lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * n}]},
        50_000,
    ),
    "turns": (
        lambda n: {"messages": [USER, {"role": "assistant", "content": "answer"}] * n},
        10_000,
    ),
    "instructions": (
        lambda n: {"messages": [*[{"role": "system", "content": "rule"}] * n, USER]},
        20_000,
    ),
    "results in a row": (lambda n: {"messages": calls(n, str), "tools": [tool(0)]}, 10_000),
    "calls of one id": (
        lambda n: {"messages": calls(n, lambda _: "same"), "tools": [tool(0)]},
        10_000,
    ),
    "calls without ids": (lambda n: {"messages": calls(n, lambda _: "")}, 10_000),
    "text": (lambda n: {"text_input": "word " * n}, 400_000),
    "token ids": (lambda n: {"input_ids": [1] * n}, 90_000),
    "template values": (
        lambda n: {"messages": [USER], "chat_template_kwargs": {str(i): i for i in range(n)}},
        50_000,
    ),
    "biases": (
        lambda n: {"text_input": "a", "logit_bias": {str(i): 1 for i in range(n)}},
        1024,
    ),
    "bad words": (lambda n: {"text_input": "a", "bad_words": ["w" * 256] * n}, 64),
    "stop words": (lambda n: {"text_input": "a", "stop_words": ["w" * 256] * n}, 64),
    "choices": (lambda n: {"text_input": "a", "guided_choice": ["w" * 60] * n}, 256),
    "a schema": (
        lambda n: {
            "text_input": "a",
            "guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(n)}},
        },
        2000,
    ),
    "a regular expression": (lambda n: {"text_input": "a", "guided_regex": "[a-z]" * n}, 10_000),
}
SETTINGS = Settings(
    tokenizer="",
    engines="",
    mode="ensemble",
    eos_token_ids=frozenset({1}),
    slots=2,
    max_queue=1,
    max_seq_len=2_000_000,
    prefill_chunk=8,
    block_size=4,
    speculation=Speculation(draft_tokens=3),
)
TEMPLATES = {"no system": NO_SYSTEM, "tools": WRITING["<tool_call>"]}


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest) -> ChatModel:
    return chat_model(TEMPLATES[request.param])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = {"<unk>": 0, "word": 1} | {f"w{n}": n for n in range(2, 2000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize("kind", SENT)
def test_a_field_of_the_model(kind: str, model: ChatModel, tokenizer: Tokenizer) -> None:
    make, largest = SENT[kind]

    def work(size: int) -> Callable[[], object]:
        tensors = as_tensors(make(size))

        def parse() -> None:
            parse_request(tensors, tokenizer, model, SETTINGS)

        return ignoring_refusals(parse)

    assert_grows_no_faster(work, largest)


def test_tools_themselves() -> None:
    """Their number is limited before; this is what 32,000 of them took 24 s for."""
    assert_grows_no_faster(lambda n: lambda: parse_tools([tool(i) for i in range(n)]), 20_000)


# --- in the application ---------------------------------------------------------------------------


def body(values: dict[str, Any]) -> bytes:
    content = json.dumps({"model": "m", **values}).encode()
    assert len(content) <= BODY_LIMIT
    return content


BODIES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "messages": (lambda n: {"messages": [USER] * n}, 40_000),
    "tools": (lambda n: {"messages": [USER], "tools": [tool(i) for i in range(n)]}, 20_000),
    "unknown fields": (lambda n: {"messages": [USER], **{f"f{i}": 1 for i in range(n)}}, 150_000),
    "a long name": (
        lambda n: {"messages": [USER], "logit_bias": {"n" * 500_000: [float("nan")] * n}},
        100_000,
    ),
    "nested": (lambda n: {"messages": [{"role": "user", "x": [[[]]] * n}]}, 200_000),
    "stop": (lambda n: {"messages": [USER], "stop": ["s"] * n}, 300_000),
    "calls": (lambda n: {"messages": calls(n, str)}, 10_000),
}
INPUTS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "items": (lambda n: {"input": [USER] * n}, 40_000),
    "calls": (
        lambda n: {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            ]
            * n
        },
        20_000,
    ),
    "reasoning": (
        lambda n: {"input": [{"type": "reasoning", "summary": [{"text": "t"}] * n}]},
        100_000,
    ),
    "tools": (
        lambda n: {
            "input": "x",
            "tools": [{"type": "function", "name": f"f{i}"} for i in range(n)],
        },
        30_000,
    ),
    "metadata": (lambda n: {"input": "x", "metadata": {str(i): "" for i in range(n)}}, 100_000),
    "include": (lambda n: {"input": "x", "include": ["x"] * n}, 300_000),
    "references": (
        lambda n: {"input": [{"type": "item_reference", "id": "x"}] * n},
        40_000,
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_of_chat_completions(kind: str) -> None:
    make, largest = BODIES[kind]

    def work(size: int) -> Callable[[], object]:
        content = body(make(size))
        return ignoring_refusals(
            lambda: fields_of(ChatFields, parse_object(content)).prompts_and_options()
        )

    assert_grows_no_faster(work, largest)


@pytest.mark.parametrize("prompt", ["prompts", "ids", "text"])
def test_a_body_of_completions(prompt: str) -> None:
    prompts: dict[str, Callable[[int], Any]] = {
        "prompts": lambda n: ["a"] * n,
        "ids": lambda n: [1] * n,
        "text": lambda n: "a" * n,
    }

    def work(size: int) -> Callable[[], object]:
        content = body({"prompt": prompts[prompt](size)})
        return ignoring_refusals(
            lambda: fields_of(TextFields, parse_object(content)).prompts_and_options()
        )

    assert_grows_no_faster(work, 350_000)


@pytest.mark.parametrize("kind", INPUTS)
def test_a_body_of_responses(kind: str) -> None:
    make, largest = INPUTS[kind]

    def work(size: int) -> Callable[[], object]:
        content = body(make(size))
        return ignoring_refusals(
            lambda: read_request(parse_object(content), ResponseStore(10**6), "")
        )

    assert_grows_no_faster(work, largest)


TRITON: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "unknown fields": (lambda n: {f"f{i}": 1 for i in range(n)}, 150_000),
    "inputs": (lambda n: {"inputs": [{"name": "a", "shape": [1]}] * n}, 50_000),
    "outputs": (lambda n: {"outputs": [{"name": "a"}] * n}, 100_000),
    "parameters": (lambda n: {"parameters": {f"f{i}": 1 for i in range(n)}}, 150_000),
    "a shape": (lambda n: {"inputs": [{"name": "a", "shape": [1] * n}]}, 500_000),
    "data": (lambda n: {"inputs": [{"name": "a", "shape": [n], "data": [1] * n}]}, 500_000),
}


@pytest.mark.parametrize("kind", TRITON)
def test_a_body_of_triton(kind: str) -> None:
    make, largest = TRITON[kind]

    def work(size: int) -> Callable[[], object]:
        content = json.dumps(make(size)).encode()
        assert len(content) <= BODY_LIMIT

        def read() -> None:
            ignoring_refusals(lambda: infer_body(content, len(content)))()
            ignoring_refusals(lambda: generate_body(content, {}))()

        return read

    assert_grows_no_faster(work, largest)
