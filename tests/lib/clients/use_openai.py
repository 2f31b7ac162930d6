"""What people do with OpenAI's client: `python use_openai.py URL PROMPT TEXT IDS`.

TEXT is what follows PROMPT, greedily, in 24 tokens; IDS are the prompt's tokens, as JSON.
"""

import asyncio
import json
import sys

import openai

URL, PROMPT, TEXT, IDS = sys.argv[1:]
FIELDS = {"model": "pycode", "max_tokens": 24, "temperature": 0}
MESSAGES = [{"role": "user", "content": PROMPT}]
api = openai.OpenAI(base_url=URL, api_key="-", max_retries=0, timeout=120)


def refused(kind, create=api.completions.create, **fields):
    try:
        create(**({**FIELDS, "prompt": PROMPT} | fields))
    except kind as error:
        return error
    raise AssertionError(f"{fields} was accepted")


# completions
whole = api.completions.create(prompt=PROMPT, **FIELDS)
assert whole.choices[0].text == TEXT, whole
assert whole.usage.completion_tokens == 24
chunks = list(
    api.completions.create(
        prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **FIELDS
    )
)
assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT
assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
ids = json.loads(IDS)
for prompt, count in ((ids, 1), ([PROMPT] * 3, 3), ([ids, ids], 2)):
    choices = api.completions.create(prompt=prompt, **FIELDS).choices
    assert [choice.text for choice in choices] == [TEXT] * count
echoed = api.completions.create(prompt=PROMPT, echo=True, logprobs=2, **FIELDS).choices[0]
assert echoed.text == PROMPT + TEXT
assert len(echoed.logprobs.token_logprobs) == len(ids) + 24
drawn = api.completions.create(prompt=PROMPT, n=3, seed=1, **{**FIELDS, "temperature": 1})
assert [choice.index for choice in drawn.choices] == [0, 1, 2]
stop = TEXT[8:11]
cut = api.completions.create(prompt=PROMPT, stop=stop, **FIELDS).choices[0]
assert (cut.text, cut.finish_reason) == (TEXT[: TEXT.index(stop)], "stop")

# chat
chat = api.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **FIELDS)
said = chat.choices[0].message.content
assert said == "".join(each.token for each in chat.choices[0].logprobs.content)
with api.chat.completions.stream(messages=MESSAGES, **FIELDS) as stream:
    stream.until_done()
    assert stream.current_completion_snapshot.choices[0].message.content == said
several = api.chat.completions.create(messages=MESSAGES, n=2, **FIELDS)
assert [choice.message.content for choice in several.choices] == [said] * 2
raw = api.chat.completions.with_raw_response.create(messages=MESSAGES, **FIELDS)
assert raw.parse().choices[0].message.content == said

# responses
asked = {"model": "pycode", "input": PROMPT, "max_output_tokens": 24, "temperature": 0}
response = api.responses.create(**asked)
assert response.output_text == said
assert (response.status, response.usage.output_tokens) == ("incomplete", 24)
with api.responses.stream(**asked) as stream:
    kinds = [event.type for event in stream]
assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
assert api.responses.create(**asked, store=True).store is False
try:
    api.responses.create(**asked, previous_response_id="x")
except openai.BadRequestError as error:
    param = error.param
assert param == "previous_response_id"

# models
assert [model.id for model in api.models.list()] == ["pycode"]
assert api.models.retrieve("pycode").max_model_len > 24

# errors
error = refused(openai.BadRequestError, top_p=7)
assert (error.param, error.type) == ("top_p", "invalid_request_error")
assert refused(openai.BadRequestError, max_tokens=10**6).code == "context_length_exceeded"
assert refused(openai.NotFoundError, model="gpt-9").code == "model_not_found"
assert refused(openai.BadRequestError, extra_body={"nonsense": 1}).code == "unknown_parameter"
long = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
refused(openai.APITimeoutError, api.with_options(timeout=0.01).completions.create, **long)
late = refused(openai.APIStatusError, **long | {"extra_body": {"timeout": 0.01}})
assert late.status_code == 504
nobody = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="-", max_retries=0)
refused(openai.APIConnectionError, nobody.completions.create)


async def main():
    async with openai.AsyncOpenAI(base_url=URL, api_key="-", timeout=120) as many:
        answers = await asyncio.gather(
            *(many.completions.create(prompt=PROMPT, **FIELDS) for _ in range(8))
        )
        assert {answer.choices[0].text for answer in answers} == {TEXT}
        async with await many.chat.completions.create(
            messages=MESSAGES, stream=True, **FIELDS
        ) as stream:
            assert (await anext(stream)).choices  # and goes away


asyncio.run(main())
assert api.completions.create(prompt=PROMPT, **FIELDS).choices[0].text == TEXT
