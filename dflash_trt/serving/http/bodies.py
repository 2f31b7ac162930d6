"""JSON bodies of requests: parsed strictly, and large ones away from the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from dflash_trt.errors import RequestError
from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.strict_json import FieldError, parse_object

LARGE = 100_000  # bytes that take longer than other requests should wait
# threads share one interpreter: several at once would keep the event loop from its turn
ONE_LARGE = asyncio.Semaphore(1)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


async def read_off_the_loop(
    size: int,
    read: Callable[Parameters, Result],
    *args: Parameters.args,
    **options: Parameters.kwargs,
) -> Result:
    """Return `read(*args, **options)`; that of a large body runs in a thread, one by one."""
    if size <= LARGE:
        return read(*args, **options)
    async with ONE_LARGE:
        return await asyncio.to_thread(read, *args, **options)


async def read_body(request: Request, read: Callable[[dict[str, Any]], Result]) -> Result:
    """Return `read` of the request's JSON object. Raises Failure if it is none."""

    def parse_and_read(body: bytes) -> Result:
        try:
            value = parse_object(body)
        except FieldError as error:
            raise Failure(400, str(error), error.field) from None
        except RequestError as error:
            raise Failure(400, str(error)) from None
        return read(value)

    body = await request.body()
    return await read_off_the_loop(len(body), parse_and_read, body)
