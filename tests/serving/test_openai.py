"""The OpenAI front, called with OpenAI's client, over the real Triton."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from dflash_trt.checkpoints import speller
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports
from tests.support import reference
from tests.support.request_tools import metric

ROOT = Path(__file__).parents[2]
PROMPT = "def main():"
MOST_DRAFTS = 15  # a round verifies 16 tokens of a sequence at most
WAIT = 60.0
GREEDY: dict[str, Any] = {"model": "pycode", "temperature": 0}
USAGE: Any = {"include_usage": True}
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def expected(triton: Ports) -> str:
    """Return the greedy text of 40 tokens after PROMPT, as Triton returns it."""
    with Client(f"127.0.0.1:{triton.grpc}") as client:
        return client.generate(PROMPT, max_tokens=40).text


def test_completions(api: openai.OpenAI, expected: str) -> None:
    for model in ("pycode", "dflash"):
        answer = api.completions.create(model=model, prompt=PROMPT, max_tokens=40, temperature=0)
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason, choice.index) == (expected, "length", 0)
        assert (answer.object, answer.model) == ("text_completion", model)
        assert (answer.system_fingerprint or "").startswith("fp_")
        _check_usage(answer, 40)


def test_completions_stream(api: openai.OpenAI, expected: str) -> None:
    chunks = list(
        api.completions.create(
            prompt=[PROMPT], max_tokens=40, stream=True, stream_options=USAGE, **GREEDY
        )
    )
    *pieces, last = chunks
    assert len(pieces) > 1
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    assert len({chunk.id for chunk in chunks}) == 1
    _check_usage(last, 40)


def test_usage_in_every_chunk(api: openai.OpenAI) -> None:
    options = USAGE | {"continuous_usage_stats": True}
    chunks = list(
        api.completions.create(
            prompt=PROMPT, max_tokens=40, stream=True, stream_options=options, **GREEDY
        )
    )
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == len(chunks) > 2
    assert {usage.prompt_tokens for usage in usages} == {5}
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0] < 40, counts[-2:]) == (True, [40, 40])


def test_a_prompt_is_reused_by_its_salt(api: openai.OpenAI, triton: Ports) -> None:
    prompt = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(8))
    texts, reused = set(), []
    before = sum(metric(triton.metrics, "dflash_cached_prompt_tokens_total").values())
    for salt in ("a", "a", "b", None, None):
        answer = api.completions.create(
            prompt=prompt, max_tokens=20, extra_body={"cache_salt": salt}, **GREEDY
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        texts.add(answer.choices[0].text)
        reused.append(answer.usage.prompt_tokens_details.cached_tokens)
    whole = (answer.usage.prompt_tokens - 1) // 16 * 16
    assert whole > 0
    assert reused == [0, whole, 0, 0, whole]
    assert len(texts) == 1
    for _ in range(20):  # metrics are sent once a second
        found = sum(metric(triton.metrics, "dflash_cached_prompt_tokens_total").values()) - before
        if found == 2 * whole:
            break
        time.sleep(0.5)
    assert found == 2 * whole
    assert sum(metric(triton.metrics, "dflash_prefix_cache_bytes").values()) > 0


def _check_usage(answer: Any, tokens: int) -> None:
    """Check OpenAI's counts, our figures, and what AIPerf checks before it shows its table.

    Rounds differ from run to run, because they follow measured costs.
    """
    usage, details = answer.usage, answer.usage.completion_tokens_details
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, tokens)
    assert usage.total_tokens == 5 + tokens
    assert 1 < usage.rounds < tokens
    assert usage.acceptance_length == pytest.approx((tokens - 1) / usage.rounds, abs=1e-3)
    assert details.accepted_prediction_tokens == usage.accepted > 0
    assert details.rejected_prediction_tokens == usage.drafted - usage.accepted
    figures = answer.metrics["speculative_decoding"]
    histogram = figures["acceptance_histogram"]
    assert len(histogram) == figures["num_spec_tokens"] + 1 == MOST_DRAFTS + 1
    assert sum(histogram) == figures["num_spec_steps"] == usage.rounds
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    assert accepted == figures["num_accepted_draft_tokens"] == usage.accepted
    assert accepted == sum(figures["per_step_accepted"])
    assert figures["num_draft_tokens"] == usage.drafted
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / usage.drafted)
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / usage.rounds)


def test_chat(api: openai.OpenAI, triton: Ports) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages: list[Any] = [
        {"role": "system", "content": "import os"},
        {"role": "user", "content": [{"type": "text", "text": "x = 'é'"}]},
    ]
    for extra, start in (({}, "def "), ({"chat_template_kwargs": {"opening": "class "}}, "class ")):
        with Client(f"127.0.0.1:{triton.grpc}") as client:
            expected = client.generate(f"# f\nimport os\nx = 'é'\n{start}", max_tokens=30).text
        fields = GREEDY | {"messages": messages, "tools": [tool], "extra_body": extra}
        fields |= {"max_completion_tokens": 30}
        assert api.chat.completions.create(**fields).choices[0].message.content == expected != ""
        chunks = list(api.chat.completions.create(**fields, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == "length"


def test_the_raw_stream_is_server_sent_events(url: str) -> None:
    body = {"model": "pycode", "prompt": PROMPT, "max_tokens": 5, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    for event in events:
        assert "usage" not in json.loads(event.removeprefix("data: "))


def test_a_request_beyond_the_context_length_has_its_code(api: openai.OpenAI) -> None:
    for prompt, more, param in (
        (PROMPT, 10**6, "max_tokens"),
        ("def " * 1500, 1, "prompt"),
        ("a" * 100_000, 1, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="pycode", prompt=prompt, max_tokens=more)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="pycode", messages=HI, max_completion_tokens=10**6)
    param = "max_completion_tokens"
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    assert "lower max_completion_tokens" in caught.value.message


def test_several_prompts(api: openai.OpenAI, chat_built: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chat_built / "tokenizer" / "tokenizer.json"))
    texts = [PROMPT, "import os\n", "class "]
    fields = GREEDY | {"max_tokens": 12}
    alone = [api.completions.create(prompt=text, **fields) for text in texts]
    expected = [answer.choices[0].text for answer in alone]
    ids = [tokenizer.encode(text).ids for text in texts]
    assert api.completions.create(prompt=ids[0], **fields).choices[0].text == expected[0]
    for prompt in (texts, ids):
        whole = api.completions.create(prompt=prompt, n=2, **fields)
        assert [choice.index for choice in whole.choices] == list(range(6))
        assert [choice.text for choice in whole.choices] == [t for t in expected for _ in range(2)]
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == sum(map(len, ids))
        assert whole.usage.completion_tokens == 2 * 3 * 12
        got = [""] * 6
        for chunk in api.completions.create(
            prompt=prompt, n=2, stream=True, stream_options=USAGE, **fields
        ):
            for choice in chunk.choices:
                got[choice.index] += choice.text
        assert got == [text for text in expected for _ in range(2)]
        assert chunk.usage is not None
        assert chunk.usage.prompt_tokens == sum(map(len, ids))
    with pytest.raises(openai.BadRequestError, match="prompt"):
        list(api.completions.create(prompt=[PROMPT, ""], stream=True, **fields))


def test_echo(api: openai.OpenAI, chat_built: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chat_built / "tokenizer" / "tokenizer.json"))
    fields = GREEDY | {"max_tokens": 12}
    text = PROMPT + api.completions.create(prompt=PROMPT, **fields).choices[0].text
    for prompt in (PROMPT, tokenizer.encode(PROMPT).ids):
        assert api.completions.create(prompt=prompt, echo=True, **fields).choices[0].text == text
        chunks = api.completions.create(prompt=prompt, echo=True, stream=True, **fields)
        assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_responses(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "pycode", "input": PROMPT, "max_output_tokens": 24}
    whole = api.responses.create(**asked, temperature=0)
    assert (whole.status, whole.usage and whole.usage.output_tokens) == ("incomplete", 24)
    with api.responses.stream(**asked, temperature=0) as stream:
        *_, last = stream
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(**asked, previous_response_id="x")
    assert caught.value.param == "previous_response_id"


def test_echo_with_logprobs(api: openai.OpenAI, chat_built: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chat_built / "tokenizer" / "tokenizer.json"))
    texts = ["import os\nprint(os.getcwd())\n" * 9, "class A:\n    x = 'é'"]
    ids = [tokenizer.encode(text).ids for text in texts]
    fields = GREEDY | {"echo": True, "logprobs": 1}
    for most in (0, 1):
        for prompt in (texts, ids):
            whole = api.completions.create(prompt=prompt, max_tokens=most, seed=1234, **fields)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 2 * most
            for k, choice in enumerate(whole.choices):
                got = choice.logprobs
                assert got is not None
                assert got.tokens is not None
                assert choice.text.startswith(texts[k])
                logits, _ = reference.target_logits_and_taps(
                    ROOT / "examples" / "pycode" / "target",
                    ids[k] + tokenizer.encode(choice.text.removeprefix(texts[k])).ids,
                    [0],
                )
                expected = torch.log_softmax(torch.from_numpy(logits), -1)
                own = expected[torch.arange(len(ids[k]) - 1), ids[k][1:]].tolist()
                assert got.token_logprobs is not None
                assert got.token_logprobs[0] is None
                assert got.token_logprobs[1 : len(ids[k])] == pytest.approx(own, abs=1e-3)
                assert got.top_logprobs is not None
                assert got.top_logprobs[0] is None
                best = [max(top.values()) for top in got.top_logprobs[1:]]
                assert best[: len(own)] == pytest.approx(
                    expected.max(-1).values.tolist()[: len(own)], abs=1e-3
                )
                greedy = (expected.argmax(-1)[: len(own)] == torch.tensor(ids[k][1:])).tolist()
                values = got.token_logprobs[1 : len(ids[k])]
                assert [a == b for a, b in zip(values, best, strict=False)] == greedy
                assert len(got.tokens) == len(got.text_offset or []) == len(ids[k]) + most
                assert (got.text_offset or [])[:2] == [0, len(got.tokens[0])]
    chunks = list(api.completions.create(prompt=texts[0], max_tokens=9, stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith(texts[0])
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    values = [value for piece in pieces if piece for value in piece.token_logprobs or []]
    assert len(values) == len(ids[0]) + 9
    assert [value is None for value in values] == [True] + [False] * (len(values) - 1)
    several = api.completions.create(prompt=texts[1], max_tokens=3, n=2, **fields)
    own, others = ([*each.logprobs.token_logprobs] for each in several.choices)  # type: ignore
    assert own[1:] == pytest.approx(others[1:], abs=1e-4)
    assert len(own) == len(ids[1]) + 3


def test_stop_token_ids(api: openai.OpenAI, triton: Ports) -> None:
    """The text ends before the first of them, with ignore_eos too."""
    with Client(f"127.0.0.1:{triton.grpc}") as client:
        [whole] = client.generate(PROMPT, max_tokens=24).choices
        token = whole.token_ids[6]
        count = whole.token_ids.index(token) + 1
        expected = client.generate(PROMPT, max_tokens=count - 1).text if count > 1 else ""
    more = {"stop_token_ids": [token], "ignore_eos": True}
    answer = api.completions.create(prompt=PROMPT, max_tokens=24, extra_body=more, **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    assert answer.choices[0].stop_reason == token  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == count


def test_a_model_by_its_name(api: openai.OpenAI) -> None:
    found: Any = api.models.retrieve("pycode")
    assert (found.id, found.object) == ("pycode", "model")
    with pytest.raises(openai.BadRequestError, match=f"context length is {found.max_model_len}"):
        api.completions.create(model="pycode", prompt="a", max_tokens=found.max_model_len)
    for ask in (
        lambda: api.models.retrieve("gpt-9"),
        lambda: api.completions.create(model="gpt-9", prompt=PROMPT),
    ):
        with pytest.raises(openai.NotFoundError, match="pycode") as caught:
            ask()
        assert caught.value.code == "model_not_found"


def test_models_health_and_metrics(api: openai.OpenAI, url: str) -> None:
    assert [model.id for model in api.models.list()] == ["pycode"]
    assert api.models.retrieve("dflash").id == "dflash"
    assert httpx.get(f"{url}/health").status_code == 200
    assert 'nv_inference_count{model="dflash"' in httpx.get(f"{url}/metrics").text


def test_spelling_of_every_kind_of_vocabulary(chat_built: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chat_built / "tokenizer" / "tokenizer.json"))
    spell = speller(tokenizer)
    for text in ("def main():\n\treturn 'é🙂'", "<|endoftext|>"):
        assert b"".join(map(spell, tokenizer.encode(text).ids)).decode() == text
    alphabet = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    plain.decoder = decoders.ByteLevel()
    assert {*map(speller(plain), range(256))} == {bytes([byte]) for byte in range(256)}
    vocabulary = {"\u2581def": 0, "<0xE2>": 1, "é": 2}
    fallback = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert [*map(speller(fallback), range(4))] == [b" def", b"\xe2", "é".encode(), b""]


def test_a_tool_loop(api: openai.OpenAI) -> None:
    schema: dict[str, Any] = {
        "properties": {
            "city": {"enum": ["Oslo", "Kraków"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    names = ("get_weather", "get_time")
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in names
    ]
    messages: list[Any] = [{"role": "user", "content": "Two days of weather in Oslo?"}]
    fields: dict[str, Any] = {"model": "pycode", "tools": tools, "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice, called in (("required", set(names)), (named, {"get_time"})):
        asked = fields | {"messages": messages, "tool_choice": choice}
        whole = api.chat.completions.create(**asked, temperature=0).choices[0]
        [call] = whole.message.tool_calls or []
        assert call.function.name in called
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
        with api.chat.completions.stream(**asked, temperature=0) as stream:
            stream.until_done()
            [streamed] = stream.current_completion_snapshot.choices
        [same] = streamed.message.tool_calls or []
        assert same.function.arguments == call.function.arguments
        assert streamed.finish_reason == "tool_calls"
        for each in api.chat.completions.create(**asked, seed=3, n=3).choices:
            [one] = each.message.tool_calls or []
            jsonschema.validate(json.loads(one.function.arguments), schema)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        answer = api.chat.completions.create(
            messages=[*messages, whole.message, result], tool_choice="none", max_tokens=8, **fields
        ).choices[0]
        assert answer.message.content
        assert answer.message.tool_calls is None
    for changed, words in (({"not": {}}, "not"), ({"type": "object", "properties": 3}, "tools")):
        tool = {"type": "function", "function": {"name": "f", "parameters": changed}}
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            api.chat.completions.create(
                model="pycode", messages=messages, tools=[tool], tool_choice="required"
            )
        assert caught.value.param == "tools"
    wanted: dict[str, Any] = {"messages": messages, "tool_choice": "required", **fields}
    [choice] = api.chat.completions.create(
        **wanted, response_format={"type": "json_object"}, temperature=0
    ).choices
    assert choice.message.tool_calls  # the format is for the answer after them
    with pytest.raises(openai.BadRequestError, match="one of them") as caught:
        api.chat.completions.create(**wanted, extra_body={"guided_regex": "x"})
    assert caught.value.param == "tool_choice"
