"""The prompts of one request, each a request to Triton: their chunks as one answer."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from dflash_trt.errors import RequestError
from dflash_trt.serving import tracing
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.client import AnyPrompt, AsyncClient
from dflash_trt.serving.http import answers
from dflash_trt.serving.http.fields import ChatFields, Options, TextFields
from dflash_trt.serving.tracing import current

AT_ONCE = 1.0  # seconds until a stream that waits has its headers; errors until then have a status
PAUSE = 15.0  # seconds between two comments


async def merged(
    client: AsyncClient,
    prompts: Sequence[AnyPrompt],
    options: Options,
    fields: ChatFields | TextFields,
) -> AsyncGenerator[Chunk | None, None]:
    """Yield chunks or choices of all prompts as they come, choices numbered across prompts.

    Of a stream that waits also None: after `AT_ONCE` at first, then every `PAUSE` seconds.
    """
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(1)

    async def read(number: int, prompt: AnyPrompt) -> None:
        try:
            if fields.stream:
                async for chunk in client.stream(prompt, **options):
                    await put(number, chunk)
            else:
                for choice in (await client.generate(prompt, **options)).choices:
                    await put(number, choice)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def put(number: int, chunk: Chunk) -> None:
        await queue.put(replace(chunk, index=number * fields.n + chunk.index))

    tasks = [asyncio.create_task(read(number, prompt)) for number, prompt in enumerate(prompts)]
    ended: list[Chunk] = []
    try:
        left = len(tasks)
        pause = AT_ONCE if fields.stream else None
        while left:
            try:
                async with asyncio.timeout(pause):
                    chunk = await queue.get()
            except TimeoutError:
                pause = PAUSE
                yield None
                continue
            pause = PAUSE if fields.stream else None
            if isinstance(chunk, Exception):
                raise chunk
            if chunk is None:
                left -= 1
            else:
                if chunk.finish_reason:
                    ended.append(chunk)
                yield chunk
        _describe_span(fields, ended)
    except RequestError as error:
        raise fields.translate_refusal(error) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _describe_span(fields: ChatFields | TextFields, ended: Sequence[Chunk]) -> None:
    """Add what OpenTelemetry's conventions for generative AI name, and the acceptance."""
    usage = answers.usage(ended, fields.n)
    rounds = sum(chunk.rounds for chunk in ended)
    accepted = sum(chunk.accepted for chunk in ended)
    tracing.describe(
        gen_ai__operation__name="chat" if isinstance(fields, ChatFields) else "text_completion",
        gen_ai__provider__name="dflash-trt",
        gen_ai__request__model=fields.model,
        gen_ai__usage__input_tokens=usage["prompt_tokens"],
        gen_ai__usage__output_tokens=usage["completion_tokens"],
        gen_ai__response__finish_reasons=[chunk.finish_reason for chunk in ended],
        dflash__acceptance_length=1 + accepted / max(1, rounds),
        dflash__request_id=current.get(),
    )
