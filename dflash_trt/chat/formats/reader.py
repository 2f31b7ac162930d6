"""Incremental parser of answers, whose pieces may end anywhere.

A format is a generator over a `Reader` that yields to get more text, so it reads top to bottom like
the format itself. A malformed call becomes content, as written.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

# for Mistral's templates
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
LITERAL = re.compile(r"[\w.+-]*")
QUOTED = re.compile(r'\\.|"', re.DOTALL)
SYNTAX = re.compile(r'["{}\[\]]|[^\s:,\d+\-.eEtrufalsn]')  # allowed only in JSON strings


@dataclass
class CallDelta:
    """An update of one call: id and name first, then pieces of its arguments, a JSON text."""

    index: int  # shared by the pieces of a call
    id: str = ""
    name: str = ""
    arguments: str = ""


class Span(NamedTuple):
    """Characters of the text that a parser was given, from `start` to before `end`."""

    start: int
    end: int


@dataclass
class AnswerDelta:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    content_spans: list[Span] = field(default_factory=list)  # where the content was in the text


class BrokenError(Exception):
    """The text is not a call, or no longer valid as one."""


class Reader:
    """Unread text, and what was parsed since the last piece."""

    def __init__(self) -> None:
        self.delta = AnswerDelta()
        self.text = ""
        self.taken = 0  # characters of the text before `text`
        self.ended = False  # no more text follows
        self._tried: str | None = None  # text read of a possible call
        self._calls = 0
        self._space = ""  # trailing space, content only if more follows
        self._space_span = Span(0, 0)
        self._has_thought = False
        self._thought_space = ""
        self._drop_space = False  # after a call or reasoning

    # --- what it makes ----------------------------------------------------------------------------

    def add_content(self, text: str) -> None:
        """Add content that was taken last, without white space next to calls and reasoning."""
        end = self.taken
        if self._drop_space:
            text = text.lstrip()
        if not text:
            return
        self._drop_space = False
        stripped = text.rstrip()
        if stripped:
            self._end_space()
            self._add_content_of(stripped, Span(end - len(text), end - len(text) + len(stripped)))
        space = text[len(stripped) :]
        if space:
            self._space += space
            self._space_span = Span(end - len(self._space), end)

    def _end_space(self) -> None:
        """Add the space that was held back."""
        self._add_content_of(self._space, self._space_span)
        self._space = ""

    def _add_content_of(self, text: str, span: Span) -> None:
        if text:
            self.delta.content += text
            self.delta.content_spans.append(span)

    def add_reasoning(self, text: str) -> None:
        """Add reasoning, without surrounding white space."""
        if not self._has_thought:
            text = text.lstrip()
        text = self._thought_space + text
        thought = text.rstrip()
        self._thought_space = text[len(thought) :]
        self._has_thought = self._has_thought or bool(thought)
        self.delta.reasoning += thought
        self._drop_space = True

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a call; its text so far is no longer possible content."""
        new_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
        self.delta.calls.append(CallDelta(self._calls, call_id or new_id, name))
        self._calls += 1
        self._tried = None
        self._drop_space = True

    def add_arguments(self, piece: str) -> None:
        calls = self.delta.calls
        index = self._calls - 1
        if not calls or calls[-1].index != index:
            calls.append(CallDelta(index))
        calls[-1].arguments += piece

    # --- reading ----------------------------------------------------------------------------------

    def wait_for_more(self) -> Steps[bool]:
        if self.ended:
            return False
        yield
        return True

    def require_more(self) -> Steps[None]:
        if not (yield from self.wait_for_more()):
            raise BrokenError

    def take(self, count: int) -> str:
        taken = self.text[:count]
        self.text = self.text[count:]
        self.taken += len(taken)
        if self._tried is not None:
            self._tried += taken
        return taken

    def starts_with(self, word: str) -> Steps[bool]:
        while len(self.text) < len(word) and word.startswith(self.text):
            if not (yield from self.wait_for_more()):
                return False
        return self.text.startswith(word)

    def skip(self, word: str) -> Steps[bool]:
        is_next = yield from self.starts_with(word)
        if is_next:
            self.take(len(word))
        return is_next

    def expect(self, word: str) -> Steps[None]:
        if not (yield from self.skip(word)):
            raise BrokenError

    def skip_space(self) -> Steps[None]:
        while True:
            self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or not (yield from self.wait_for_more()):
                return

    def close(self, word: str) -> Steps[None]:
        """Consume the end of a call, or its beginning if the text was truncated."""
        yield from self.skip_space()
        if not (yield from self.skip(word)) and self.ended and word.startswith(self.text):
            self.take(len(self.text))

    def until(self, words: tuple[str, ...], give: Callable[[str], object]) -> Steps[str | None]:
        """Pass on text up to the first of some words, not consumed; return it or None."""
        while True:
            places = [(self.text.find(word), word) for word in words if word in self.text]
            if places:
                place, word = min(places)
                give(self.take(place))
                return word
            held = 0 if self.ended else max(overlap(self.text, word) for word in words)
            give(self.take(len(self.text) - held))
            if not (yield from self.wait_for_more()):
                return None

    def add_rest(self) -> Steps[None]:
        while True:
            self.add_content(self.take(len(self.text)))
            if not (yield from self.wait_for_more()):
                if not self._drop_space:
                    self._end_space()
                return

    def collect_until(self, *words: str) -> Steps[str]:
        pieces: list[str] = []
        if (yield from self.until(words, pieces.append)) is None:
            raise BrokenError
        return "".join(pieces)

    def restore(self, text: str) -> None:
        """Count text consumed earlier as part of the call."""
        self._tried = text + (self._tried or "")

    def attempt(self, call: Steps[None]) -> Steps[bool]:
        """Parse a call, falling back to content; return whether one was begun."""
        calls_before = self._calls
        self._tried = ""
        with suppress(BrokenError):
            yield from call
            self._tried = None
        tried = self._tried
        self._tried = None
        self.add_content(tried or "")
        return self._calls > calls_before

    # --- JSON -------------------------------------------------------------------------------------

    def json_string(self) -> Steps[str]:
        if not (yield from self.starts_with('"')):
            raise BrokenError
        while not (match := STRING.match(self.text)):
            yield from self.require_more()
        try:
            value = str(json.loads(self.take(match.end()), strict=False))
            value.encode()
        except ValueError:  # includes half a surrogate pair
            raise BrokenError from None
        return value

    def json_arguments(self, name: str, call_id: str = "") -> Steps[None]:
        """Begin a call whose arguments, an object, follow; pass on their text unchanged."""
        if not (yield from self.starts_with("{")):
            raise BrokenError
        self.begin_call(name, call_id)
        yield from self._brackets(self.add_arguments)

    def json_value(self) -> Steps[None]:
        while not self.text:
            yield from self.require_more()
        if self.text[0] == '"':
            yield from self.json_string()
        elif self.text[0] in "{[":
            yield from self._brackets(len)
        else:
            while (match := LITERAL.match(self.text)) and match.end() == len(self.text):
                yield from self.require_more()
            self.take(match.end() if match else 0)

    def _brackets(self, give: Callable[[str], object]) -> Steps[None]:
        depth = 0
        quoted = False
        while True:
            read = 0
            while match := (QUOTED if quoted else SYNTAX).search(self.text, read):
                sign = match[0]
                read = match.end()
                if sign == '"':
                    quoted = not quoted
                elif not quoted and sign in "{}[]":
                    depth += 1 if sign in "{[" else -1
                    if not depth:
                        give(self.take(read))
                        return
                elif not quoted:
                    give(self.take(match.start()))
                    raise BrokenError
            half = self.text.endswith("\\", read)  # of an escape
            give(self.take(len(self.text) - half))
            yield from self.require_more()


def json_call(reader: Reader) -> Steps[None]:
    """Parse `{"name": .., "arguments": {..}}`; `parameters` also works."""
    yield from reader.expect("{")
    name = ""
    begun = False
    while True:
        yield from reader.skip_space()
        key = yield from reader.json_string()
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key == "name":
            name = yield from reader.json_string()
        elif key in ("arguments", "parameters") and name and not begun:
            begun = True
            yield from reader.json_arguments(name)
        else:
            yield from reader.json_value()
        yield from reader.skip_space()
        if not (yield from reader.skip(",")):
            break
    yield from reader.expect("}")
    if not begun:
        raise BrokenError


def overlap(text: str, word: str) -> int:
    """Return how many last characters of `text` begin `word`, short of the whole word."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # as Python's templates write it
