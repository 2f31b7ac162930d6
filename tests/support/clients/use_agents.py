"""A tool loop with OpenAI's agents; called with URL PROMPT TEXT IDS."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL = sys.argv[1]
set_tracing_disabled(True)
asked = []


@function_tool
def get_weather(city: Literal["Oslo", "Rome"], sunny: bool) -> str:
    """The weather in a city."""
    asked.append((city, sunny))
    return f"fine in {city}"


@function_tool
def get_time() -> str:
    """What time it is."""
    asked.append(None)
    return "noon"


client = AsyncOpenAI(base_url=URL, api_key="-", max_retries=0, timeout=120)


def agent(choice, model):
    """Return an agent that may answer after its first call: `reset_tool_choice`."""
    settings = ModelSettings(
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
        # an answer that is cut is a failure to it: this model's end of text comes after six tokens
        extra_body={"logit_bias": {"0": 100}, "min_tokens": 6},
    )
    return Agent(
        name="helper",
        instructions="Use tools.",
        model=model(model="pycode", openai_client=client),
        tools=[get_weather, get_time],
        model_settings=settings,
    )


async def main(model):
    for choice in ("required", "get_weather", "get_time"):
        whole = await Runner.run(agent(choice, model), "Weather?", max_turns=4)
        assert len(asked) == 1, asked
        assert whole.final_output
        names = [item.raw_item.name for item in whole.new_items if item.type == "tool_call_item"]
        assert len(names) == 1
        assert choice in ("required", names[0])
        assert (asked[0] is None) == (names[0] == "get_time")
        stream = Runner.run_streamed(agent(choice, model), "Weather?", max_turns=4)
        assert "raw_response_event" in [event.type async for event in stream.stream_events()]
        assert stream.final_output == whole.final_output
        assert asked == asked[:1] * 2
        asked.clear()
    found = await asyncio.gather(
        *(Runner.run(agent("required", model), "Weather?", max_turns=4) for _ in range(4))
    )
    assert len({each.final_output for each in found}) == 1


async def with_each_model():
    for each in (OpenAIChatCompletionsModel, OpenAIResponsesModel):  # the latter is its default
        asked.clear()
        await main(each)


asyncio.run(with_each_model())
