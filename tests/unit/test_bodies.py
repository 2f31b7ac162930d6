"""Bodies of requests: which are read where, and what is refused of them."""

import asyncio
import threading

import pytest

from dflash_trt.errors import RequestError
from dflash_trt.serving.http.bodies import LARGE, read_off_the_loop
from dflash_trt.serving.strict_json import parse_object


def test_large_bodies_are_read_one_by_one_and_small_ones_at_once() -> None:
    """Several threads that parse would keep the event loop waiting."""
    first_may_end = threading.Event()
    order = list[str]()

    def read(name: str) -> str:
        order.append(f"{name} begins")
        if name == "first":
            assert first_may_end.wait(30)
        order.append(f"{name} ends")
        return threading.current_thread().name

    async def ask() -> list[str]:
        large = [
            asyncio.create_task(read_off_the_loop(LARGE + 1, read, name))
            for name in ("first", "second")
        ]
        while not order:
            await asyncio.sleep(0)
        small = await read_off_the_loop(LARGE, read, "small")
        first_may_end.set()
        return [small, *await asyncio.gather(*large)]

    small, *large = asyncio.run(ask())
    assert small == threading.current_thread().name
    assert small not in large
    assert order == [
        "first begins",
        "small begins",
        "small ends",
        "first ends",
        "second begins",
        "second ends",
    ]


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", "9" * 310 + ".0", r'"\ud83d"', r'["x", {"\uDE00": 1}]'],
)
def test_what_json_cannot_say_again_is_refused_by_name(value: str) -> None:
    with pytest.raises(RequestError, match="place"):
        parse_object(f'{{"place": {value}}}'.encode())


def test_words_and_numbers_that_look_like_it_are_taken() -> None:
    body = r'{"text": "NaN 1e999 \ud83d\ude00", "large": 1e300, "count": ' + "9" * 310 + "}"
    value = parse_object(body.encode())
    assert value["text"] == "NaN 1e999 \U0001f600"
    assert value["large"] == 1e300
    assert len(str(value["count"])) == 310
