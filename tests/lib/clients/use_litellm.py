"""What people do with LiteLLM; called as use_openai.py."""

import asyncio
import sys

import litellm

URL, PROMPT, TEXT, _ = sys.argv[1:]
litellm.telemetry, litellm.suppress_debug_info = False, True
FIELDS = {"api_base": URL, "api_key": "-", "temperature": 0, "max_tokens": 24, "num_retries": 0}
MESSAGES = [{"role": "user", "content": PROMPT}]

said = set()
for provider in ("openai", "hosted_vllm"):
    fields = {**FIELDS, "model": f"{provider}/pycode"}
    answer = litellm.completion(messages=MESSAGES, **fields)
    assert answer.usage.completion_tokens == 24
    said.add(answer.choices[0].message.content)
    chunks = list(
        litellm.completion(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **fields
        )
    )
    said.add("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.usage.completion_tokens == 24
    more = {"top_p": 0.5, "n": 2, "seed": 3, "stop": ["@"], "user": "me", "logprobs": True}
    more |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "top_logprobs": 2}
    answer = litellm.completion(messages=MESSAGES, **fields, **more, extra_body={"top_k": 5})
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs.content
assert len(said) == 1, said

for provider in ("text-completion-openai", "openai"):
    fields = {**FIELDS, "model": f"{provider}/pycode"}
    assert litellm.text_completion(prompt=PROMPT, **fields).choices[0].text == TEXT
    chunks = litellm.text_completion(prompt=PROMPT, stream=True, **fields)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == TEXT
several = litellm.text_completion(
    model="text-completion-openai/pycode", prompt=[PROMPT] * 3, **FIELDS
)
assert [choice.text for choice in several.choices] == [TEXT] * 3

fields = {**FIELDS, "model": "openai/pycode", "messages": MESSAGES}
for change, kind in (
    ({"max_tokens": 10**6}, litellm.ContextWindowExceededError),
    ({"top_p": 7}, litellm.BadRequestError),
    ({"model": "openai/gpt-9"}, litellm.NotFoundError),
):
    try:
        litellm.completion(**{**fields, **change})
    except kind:
        continue
    raise AssertionError(change)

found = litellm.get_valid_models(
    check_provider_endpoint=True, custom_llm_provider="openai", api_base=URL, api_key="-"
)
assert {name.removeprefix("openai/") for name in found} >= {"pycode", "dflash"}, found


async def main():
    answers = await asyncio.gather(*(litellm.acompletion(**fields) for _ in range(6)))
    assert {answer.choices[0].message.content for answer in answers} == said
    pieces = [
        chunk.choices[0].delta.content or ""
        async for chunk in await litellm.acompletion(stream=True, **fields)
    ]
    assert {"".join(pieces)} == said


asyncio.run(main())
