"""Calls and thoughts in OpenAI's chats, streamed and whole, over a stand-in that says the text."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import stand_in
from live import openai_front
from stand_in import Answer, StandIn, part
from tokenizers import Tokenizer, models
from tool_templates import UNKNOWN, WRITING

from dflash_trt.serving.ports import Ports, free_ports

WAIT = 60.0
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {}}}}
    for name in ("f", "g")
]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


@contextmanager
def front(built: Path, directory: Path, template: str, answer: Answer) -> Iterator[Any]:
    """OpenAI's client over a model with this chat template, and the stand-in."""
    (directory / "tokenizer").mkdir()
    shutil.copy(built / "manifest.json", directory)
    words = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    words.save(str(directory / "tokenizer" / "tokenizer.json"))
    config = directory / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template}))
    port = free_ports().http
    with stand_in.stand_in(answer) as server:
        ports = Ports(1, server.port, 1)
        with openai_front(directory, port, ports):
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=WAIT) as api:
                yield api, server


class Text:
    """What the model says to the next request."""

    def __init__(self) -> None:
        self.text, self.reason, self.thinking = "", "stop", 0

    def __call__(self, inputs: Any, call: Any) -> Iterator[Any]:
        size = 3 if inputs["stream"] else len(self.text)
        cut = [self.text[at : at + size] for at in range(0, len(self.text), size)] or [""]
        for at, piece in enumerate(cut):
            reason = self.reason if at == len(cut) - 1 else ""
            yield part(text_output=[piece], finish_reason=[reason], thinking=[self.thinking])


@pytest.fixture(scope="module")
def text() -> Text:
    return Text()


@pytest.fixture(scope="module")
def thinker(
    built: Path, text: Text, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[openai.OpenAI, StandIn]]:
    directory = tmp_path_factory.mktemp("thinker")
    with front(built, directory, WRITING["<tool_call>"], text) as found:
        yield found


def ask(api: openai.OpenAI, *, stream: bool, **fields: Any) -> tuple[Any, str]:
    """The message, put together as OpenAI's client does it, and why it ended."""
    fields = {"model": "dflash", "messages": MESSAGES, **fields}
    if not stream:
        choice = api.chat.completions.create(**fields).choices[0]
        return choice.message, choice.finish_reason
    with api.chat.completions.stream(**fields) as events:
        events.until_done()
        choice = events.current_completion_snapshot.choices[0]
        return choice.message, choice.finish_reason


def calls_of(message: Any) -> list[tuple[str, str]]:
    calls = message.tool_calls or []
    assert all(call.type == "function" for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_text_without_calls_is_text(thinker: Any, text: Text, stream: bool) -> None:
    api, _ = thinker
    text.text, text.thinking, text.reason = CALLS, 0, "stop"
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message, reason = ask(api, stream=stream, **fields)
        assert (message.content, calls_of(message), reason) == (CALLS, [], "stop")
    text.text = "Hi <tool_call> there \n"
    message, reason = ask(api, stream=stream, tools=TOOLS)
    assert (message.content, calls_of(message), reason) == (text.text, [], "stop")


def test_a_model_whose_calls_cannot_be_read_has_no_tools(
    built: Path, text: Text, tmp_path: Path
) -> None:
    text.text, text.thinking, text.reason = "Hi", 0, "stop"
    with front(built, tmp_path, UNKNOWN, text) as (api, _):
        fields: dict[str, Any] = {"model": "dflash", "messages": MESSAGES}
        with pytest.raises(openai.BadRequestError, match="form not known here") as caught:
            api.chat.completions.create(**fields, tools=TOOLS)
        assert caught.value.param == "tools"
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            assert api.chat.completions.create(**fields, **more).choices[0].message.content == "Hi"
