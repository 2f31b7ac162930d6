"""What people do with LangChain; called with URL PROMPT TEXT IDS."""

import asyncio
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

URL, PROMPT, TEXT, _ = sys.argv[1:]
FIELDS = {"model": "pycode", "base_url": URL, "api_key": "-", "temperature": 0, "max_tokens": 24}

chat = ChatOpenAI(**FIELDS)
answer = chat.invoke(PROMPT)
assert answer.content, answer
assert answer.usage_metadata["output_tokens"] == 24
assert answer.response_metadata["finish_reason"] == "length"
chunks = list(chat.stream(PROMPT, stream_usage=True))
assert "".join(chunk.content for chunk in chunks) == answer.content
assert len(chunks) > 2
assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 24
assert [each.content for each in chat.batch([PROMPT] * 5)] == [answer.content] * 5
talk = [SystemMessage("import os"), HumanMessage("x"), AIMessage("y"), HumanMessage("z")]
assert chat.invoke(talk).usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
chain = ChatPromptTemplate.from_messages([("user", "{text}")]) | chat | StrOutputParser()
assert chain.invoke({"text": PROMPT}) == answer.content
assert "".join(chain.stream({"text": PROMPT})) == answer.content
scored = chat.bind(logprobs=True, top_logprobs=2).invoke(PROMPT)
assert len(scored.response_metadata["logprobs"]["content"]) == 24
stop = answer.content[6:9]
assert chat.invoke(PROMPT, stop=[stop]).content == answer.content[: answer.content.index(stop)]
drawn = ChatOpenAI(**{**FIELDS, "temperature": 1}, seed=3, top_p=0.9, n=2, presence_penalty=0.1)
assert len(drawn.generate([[HumanMessage(PROMPT)]]).generations[0]) == 2

text = OpenAI(**FIELDS)
assert text.invoke(PROMPT) == TEXT
assert "".join(text.stream(PROMPT)) == TEXT
assert text.batch([PROMPT] * 3) == [TEXT] * 3
assert [each[0].text for each in text.generate([PROMPT] * 3).generations] == [TEXT] * 3
two = OpenAI(**FIELDS, n=2, best_of=2).generate([PROMPT, PROMPT])
assert [[each.text for each in both] for both in two.generations] == [[TEXT] * 2] * 2


newer = ChatOpenAI(**FIELDS, use_responses_api=True)
assert newer.invoke(PROMPT).text == answer.content
assert "".join(chunk.text for chunk in newer.stream(PROMPT)) == answer.content


async def main():
    assert (await chat.ainvoke(PROMPT)).content == answer.content
    assert "".join([chunk.content async for chunk in chat.astream(PROMPT)]) == answer.content
    assert [each.content for each in await chat.abatch([PROMPT] * 5)] == [answer.content] * 5
    assert await text.ainvoke(PROMPT) == TEXT
    assert "".join([piece async for piece in text.astream(PROMPT)]) == TEXT
    assert await text.abatch([PROMPT] * 3) == [TEXT] * 3


asyncio.run(main())
