"""A bundle with Kimi's template and calls, over the stand-in: every door tells the same answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from dflash_trt.builder.pipeline import build
from tests.support.builds import config_of, quiet
from tests.support.llm_build import standins
from tests.support.pairs import make_pair
from tests.support.servers import serve_ports, serving
from tests.support.traffic.campaign import teach_marks
from tests.support.traffic.doors import BATCH, DOORS, Choice, Served, doors_of
from tests.support.traffic.requests import NAMED, Case, dialect_of

LENGTH = 1024
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rom"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "the weather?"}
CALL = {
    "id": "functions.get_weather:0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
}
TURN = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": "warm"},
]
NO_THOUGHT = {"chat_template_kwargs": {"thinking": False}}
OPTIONS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0}
REQUIRED = {**OPTIONS, **NO_THOUGHT, "tool_choice": "required", "max_tokens": 120}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("kimi")
    teach_marks(make_pair(directory, vocab=300, longest=LENGTH), dialect_of(NAMED))
    args = {"max_batch_size": 2, "max_seq_len": LENGTH, "guided_decoding_backend": "llguidance"}
    engine = {"kind": "tensorrt_llm", "gpus": 1, "args": args}
    build(config_of(directory, engine=engine), directory / "built", quiet)
    with standins(), serving(directory / "built", ports := serve_ports()):
        connected = Served(directory / "built", ports)
        yield connected
        connected.close()


def answer_of(served: Served, case: Case) -> Choice:
    """Return the answer, which all doors tell alike."""
    answers = {
        door: DOORS[door](served, case, case.options, 0) for door in doors_of(case) if door != BATCH
    }
    [expected] = answers["grpc"]
    for door, answer in answers.items():
        assert answer == [expected], door
    return expected


def test_an_answer_without_a_thought(served: Served) -> None:
    answer = answer_of(served, Case(messages=[USER], options={**OPTIONS, **NO_THOUGHT}))
    assert answer.text
    assert not answer.thoughts


def test_a_thought(served: Served) -> None:
    answer = answer_of(served, Case(messages=[USER], options=OPTIONS))
    assert answer.thoughts
    assert not answer.text


def test_a_required_call(served: Served) -> None:
    answer = answer_of(served, Case(messages=[USER], tools=[TOOL], options=REQUIRED))
    assert answer.calls
    assert {name for name, _ in answer.calls} == {"get_weather"}


def test_what_follows_a_result(served: Served) -> None:
    """The pair was not taught: it may open another thought first, and not end it."""
    answer = answer_of(served, Case(messages=TURN, tools=[TOOL], options=REQUIRED))
    assert answer.calls or answer.thoughts
    assert not answer.text
