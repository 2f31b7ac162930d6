"""JSON objects of requests, without what no JSON can say again: NaN, 1e999, half a character."""

import math
import re
from typing import Any

from dflash_trt.errors import RequestError
from dflash_trt.files import parse_json

FIX = "Correct it."
PATH = 80  # characters of a value's place
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped, which alone is half a character


class FieldError(RequestError):
    """A value of a body is wrong; `field` is the name of the body's field that it is in."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem, FIX)
        self.field = field


def parse_object(body: bytes, **options: Any) -> dict[str, Any]:
    """Return the JSON object of a body; RequestError for anything that JSON cannot say again.

    options: of `json.loads`.
    """
    floats = _Floats()
    try:
        text = body.decode("utf-8")
        value = parse_json(text, parse_float=floats.read, parse_constant=floats.read, **options)
    except ValueError as error:
        problem = f"The body is not the JSON object of a request: {error}"
        raise RequestError(problem, FIX) from None
    if not isinstance(value, dict):
        raise RequestError("The body is not the JSON object of a request", FIX)
    if not floats.are_finite or SURROGATE.search(text):
        for name, field in value.items():
            _check(name, name, "a name")
            _check(field, name, name)
    return value


class _Floats:
    """Floats of a body; a look at each is cheaper than a search of a long text."""

    def __init__(self) -> None:
        self.are_finite = True

    def read(self, digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            self.are_finite = False
        return value


def _check(value: Any, field: str, path: str) -> None:
    """Raise FieldError, naming the place, for a value that JSON cannot say again."""
    path = path[:PATH]  # a long name above many values would be copied for each of them
    if isinstance(value, str):
        if not _is_whole(value):
            raise FieldError(_printable(field), f"{_printable(path)} holds half a character")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise FieldError(field[:40], f"{path} is {value}, which is no number in JSON")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, field, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check(name, field, f"a name in {path}")
            _check(item, field, f"{path}.{name}")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    return text[:40].encode(errors="replace").decode()
