"""LiteLLM over OpenAI's APIs and over Triton's own; called with URL PROMPT TEXT IDS."""

import json
import sys

import litellm

URL, PROMPT, TEXT, _ = sys.argv[1:]
FIELDS = {"model": "openai/pycode", "api_base": URL, "api_key": "-", "temperature": 0}
MESSAGES = [{"role": "user", "content": PROMPT}]
schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
tool = {"type": "function", "function": {"name": "f", "parameters": schema}}

said = litellm.completion(messages=MESSAGES, max_tokens=24, **FIELDS).choices[0].message.content
chunks = litellm.completion(messages=MESSAGES, max_tokens=24, stream=True, **FIELDS)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said != ""
forced = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", **FIELDS}
[call, *_] = litellm.completion(**forced).choices[0].message.tool_calls
assert json.loads(call.function.arguments).keys() <= {"city"}
deltas = [chunk.choices[0].delta for chunk in litellm.completion(stream=True, **forced)]
pieces = [each for delta in deltas for each in delta.tool_calls or [] if each.index == 0]
assert "".join(each.function.arguments for each in pieces) == call.function.arguments
answer = litellm.responses(input=PROMPT, max_output_tokens=24, **FIELDS)
assert answer.output[0].content[0].text == said
assert litellm.text_completion(prompt=PROMPT, max_tokens=24, **FIELDS).choices[0].text == TEXT
for path in ("dflash/generate", "dflash_infer/infer"):
    base = f"{URL.removesuffix('/v1')}/v2/models/{path}"
    model = f"triton/{path.split('/')[0]}"
    triton = litellm.completion(model=model, messages=MESSAGES, api_base=base, max_tokens=24)
    assert triton.choices[0].message.content
