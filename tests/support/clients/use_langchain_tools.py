"""A tool loop with LangChain; called with URL PROMPT TEXT IDS."""

import asyncio
import sys
from typing import Literal

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL = sys.argv[1]
asked = []


@tool
def get_weather(city: Literal["Oslo", "Rome"], sunny: bool) -> str:
    """The weather in a city."""
    asked.append((city, sunny))
    return f"fine in {city}"


@tool
def get_time() -> str:
    """What time it is."""
    asked.append(None)
    return "noon"


TOOLS = {each.name: each for each in (get_weather, get_time)}
chat = ChatOpenAI(model="pycode", base_url=URL, api_key="-", temperature=0, max_tokens=200)


def bound(choice):
    return chat.bind_tools([*TOOLS.values()], tool_choice=choice, parallel_tool_calls=False)


def loop(answer):
    """Run the calls of a message; return the model's answer to the results."""
    assert answer.response_metadata["finish_reason"] == "tool_calls", answer
    assert not answer.invalid_tool_calls
    [call] = answer.tool_calls
    result = TOOLS[call["name"]].invoke(call)
    assert isinstance(result, ToolMessage)
    end = bound("none").invoke([HumanMessage("Weather?"), answer, result])
    assert end.content
    assert not end.tool_calls
    return call["name"], call["args"], end.content


whole = loop(bound("any").invoke("Weather?"))
chunks = list(bound("any").stream("Weather?"))
assert len(chunks) > 2
streamed = sum(chunks[1:], chunks[0])
assert isinstance(streamed, AIMessageChunk)
assert loop(streamed) == whole
name, arguments, _ = loop(bound("get_weather").invoke("Weather?"))
assert name == "get_weather"
assert arguments == {"city": asked[-1][0], "sunny": asked[-1][1]}
assert loop(bound("get_time").invoke("Time?"))[:2] == ("get_time", {})
assert bound("auto").invoke("Weather?").content is not None


async def main():
    assert [loop(each) for each in await bound("any").abatch(["Weather?"] * 4)] == [whole] * 4
    pieces = [chunk async for chunk in bound("any").astream("Weather?")]
    assert loop(sum(pieces[1:], pieces[0])) == whole


asyncio.run(main())
