"""Answers and structured output with pydantic-ai, over both APIs; called with URL PROMPT TEXT."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=sys.argv[1], api_key="-")
SETTINGS = {"temperature": 0, "max_tokens": 24}


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=5)


async def main():
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("pycode", provider=PROVIDER)
        agent = Agent(model, instructions="import os", model_settings=SETTINGS)
        answer = await agent.run("x = 1")
        assert answer.output
        assert answer.usage.output_tokens == 24
        async with agent.run_stream("x = 1") as stream:
            assert await stream.get_output() == answer.output
        # a call of its own is how it has an answer follow a schema
        structured = Agent(model, output_type=Weather, model_settings={"temperature": 0})
        found = await structured.run("Two days of weather in Oslo?")
        assert isinstance(found.output, Weather)


asyncio.run(main())
