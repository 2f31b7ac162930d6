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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from dflash_trt.chat.formats.json_text import JsonText

T = TypeVar("T")
Steps = Generator[None, None, T]

# for Mistral's templates
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
LITERAL = re.compile(r"[\w.+-]*")
NAMING = " \t\"'`("  # before a mark that a text only names


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
class ReasoningDelta:
    text: str


@dataclass
class ContentDelta:
    text: str
    spans: list[Span]  # where it was in the text that the parser was given


AnswerPart = ReasoningDelta | ContentDelta | CallDelta


@dataclass
class AnswerDelta:
    """What a piece of text adds to an answer, in the text's order."""

    parts: list[AnswerPart] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningDelta))

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, CallDelta)]


class BrokenError(Exception):
    """The text is not a call, or no longer valid as one."""


class Reader:
    """Unread text, and what was parsed since the last piece."""

    def __init__(self) -> None:
        self.delta = AnswerDelta()
        self.text = ""
        self.taken = 0  # characters of the text before `text`
        self.ended = False  # no more text follows
        self.is_cut = False  # it ended where no more tokens were allowed
        self._tried: str | None = None  # text read of a possible call
        self.calls = 0
        self.numbers = set[int]()  # in the ids of the conversation's calls, where ids have one
        self._calls_before = 0  # which were told before
        self._arguments = JsonText()
        self._space = ""  # trailing space, content only if more follows
        self._space_span = Span(0, 0)
        self._has_thought = False
        self._thought_space = ""
        self._drop_space = False  # after a call or reasoning
        self._line_end = ""  # last character of the content's line, if it holds more than space
        self.is_fresh = True  # no content since the answer's start, a call or reasoning

    def begin_with(self, text: str, news: AnswerDelta) -> None:
        """Count from the end of a text before the answer on; news: what was parsed of it."""
        self.taken -= len(text)
        self._space = ""
        self._thought_space = ""
        self._calls_before = self.calls
        if self.calls and not self.call_is_whole:
            self._calls_before -= 1
            begun = [call for call in news.calls if call.index == self._calls_before]
            self.delta.parts = [replace(call, index=0) for call in begun]

    @property
    def call_is_whole(self) -> bool:
        """Whether the last call's arguments have ended."""
        return self._arguments.is_whole

    @property
    def is_within_call(self) -> bool:
        """Whether a call, or what may be one, has begun and not ended."""
        return bool((self._tried or "").strip()) or (self.calls > 0 and not self.call_is_whole)

    # --- what it makes ----------------------------------------------------------------------------

    def add_content(self, text: str) -> None:
        """Add content that was taken last, without white space next to calls and reasoning."""
        end = self.taken
        if self._drop_space:
            text = text.lstrip()
        if not text:
            return
        self._drop_space = False
        self._note_line(text)
        stripped = text.rstrip()
        if stripped:
            self.is_fresh = False
            self._end_space()
            self._add_content_of(stripped, Span(end - len(text), end - len(text) + len(stripped)))
        space = text[len(stripped) :]
        if space:
            self._space += space
            self._space_span = Span(end - len(self._space), end)

    def _note_line(self, text: str) -> None:
        line = text.rpartition("\n")[2]
        if line != text:
            self._line_end = ""
        if self._line_end or line.strip():
            self._line_end = (self._line_end + line)[-1]

    @property
    def names_mark(self) -> bool:
        """Whether a mark that comes next is named by the text: behind a space or quote."""
        return self._line_end != "" and self._line_end in NAMING

    def _end_space(self) -> None:
        """Add the space that was held back."""
        self._add_content_of(self._space, self._space_span)
        self._space = ""

    def _add_content_of(self, text: str, span: Span) -> None:
        if not text:
            return
        last = self._last_part()
        if isinstance(last, ContentDelta):
            last.text += text
            last.spans.append(span)
        else:
            self.delta.parts.append(ContentDelta(text, [span]))

    def _last_part(self) -> AnswerPart | None:
        return self.delta.parts[-1] if self.delta.parts else None

    def add_reasoning(self, text: str) -> None:
        """Add reasoning, without surrounding white space."""
        if not self._has_thought:
            text = text.lstrip()
        text = self._thought_space + text
        thought = text.rstrip()
        self._thought_space = text[len(thought) :]
        self._has_thought = self._has_thought or bool(thought)
        last = self._last_part()
        if thought and isinstance(last, ReasoningDelta):
            last.text += thought
        elif thought:
            self.delta.parts.append(ReasoningDelta(thought))
        self._begin_afresh()

    def begin_thought(self) -> None:
        """Begin a line of the reasoning, if there is some."""
        if self._has_thought:
            self._thought_space = "\n"

    def _begin_afresh(self) -> None:
        if self.is_fresh and not self._drop_space:  # space that the answer begins with
            self._space = ""
        self._drop_space = True
        self._line_end = ""
        self.is_fresh = True

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a call; its text so far is no longer possible content."""
        new_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
        self.delta.parts.append(CallDelta(self.calls - self._calls_before, call_id or new_id, name))
        self.calls += 1
        self._arguments = JsonText()
        self._tried = None
        self._begin_afresh()

    def begin_empty_call(self, name: str, call_id: str = "") -> None:
        """Begin a call without arguments, which may follow only where the text was cut."""
        self.begin_call(name, call_id)
        self.add_arguments("" if self.ended and self.is_cut and not self.text else "{}")

    def add_arguments(self, piece: str) -> None:
        passed, _ = self._arguments.push(piece)
        self._add_arguments(passed)

    def end_arguments(self) -> None:
        """End what is open in the arguments, unless their text was cut."""
        if not (self.ended and self.is_cut and not self.text):
            self._add_arguments(self._arguments.end())

    def _add_arguments(self, piece: str) -> None:
        if not piece:
            return
        index = self.calls - self._calls_before - 1
        last = self._last_part()
        if isinstance(last, CallDelta) and last.index == index:
            last.arguments += piece
        else:
            self.delta.parts.append(CallDelta(index, arguments=piece))

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

    def put_back(self, text: str) -> None:
        """Undo the taking of what was taken last, within a call that has begun."""
        self.text = text + self.text
        self.taken -= len(text)

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

    def skip_spaced(self, word: str) -> Steps[bool]:
        """Skip a word and the white space before it, both or neither."""
        while True:
            rest = self.text.lstrip()
            if rest.startswith(word):
                self.take(len(self.text) - len(rest) + len(word))
                return True
            if not word.startswith(rest) or not (yield from self.wait_for_more()):
                return False

    def skip_all(self, word: str) -> Steps[bool]:
        """Skip a word as often as it comes, spaced; return whether it came."""
        came = yield from self.skip_spaced(word)
        while came and (yield from self.skip_spaced(word)):
            pass
        return came

    def skip_label(self, label: str) -> Steps[None]:
        """Skip a word that nothing but white space or a mark may follow."""
        while True:
            rest = self.text.lstrip()
            end = rest[len(label) :]
            if rest.startswith(label) and end:
                if not end[0].isalnum():
                    self.take(len(self.text) - len(end))
                return
            if not rest.startswith(label[: len(rest)]):
                return
            if not (yield from self.wait_for_more()):
                if rest == label:
                    self.take(len(self.text))
                return

    def close(self, word: str) -> Steps[None]:
        """Consume the end of a call as often as it comes, or its beginning if it was cut."""
        closed = yield from self.skip_spaced("}" + word)  # one bracket too many
        closed = (yield from self.skip_all(word)) or closed
        yield from self.skip_space()
        if not closed and self.ended and word.startswith(self.text):
            self.take(len(self.text))

    def until(
        self, words: tuple[str, ...], give: Callable[[str], object], *, keep_begun: bool = False
    ) -> Steps[str | None]:
        """Pass on text up to the first of some words, not consumed; return it or None.

        keep_begun: a word that the end of the text cuts is not passed on.
        """
        while True:
            places = [(self.text.find(word), word) for word in words if word in self.text]
            if places:
                place, word = min(places)
                give(self.take(place))
                return word
            held = 0
            if keep_begun or not self.ended:
                held = max(overlap(self.text, word) for word in words)
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
        calls_before = self.calls
        self._tried = ""
        with suppress(BrokenError):
            yield from call
            self._tried = None
        tried = self._tried
        self._tried = None
        begun = self.calls > calls_before
        if begun:
            self.end_arguments()
        self.add_content(tried or "")
        return begun

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
        """Begin a call whose arguments, an object, follow."""
        if not (yield from self.starts_with("{")):
            raise BrokenError
        while not (rest := self.text[1:].lstrip()):
            if not (yield from self.wait_for_more()):
                break
        if rest and rest[0] not in '"}':
            raise BrokenError
        self.begin_call(name, call_id)
        yield from self._json(self._arguments, self._add_arguments)

    def json_value(self) -> Steps[str]:
        """Return the text of a value."""
        while not self.text:
            yield from self.require_more()
        pieces: list[str] = []
        if self.text[0] in "{[":
            yield from self._json(JsonText(), pieces.append)
            return "".join(pieces)
        if self.text[0] == '"':
            return as_json((yield from self.json_string()))
        while (match := LITERAL.match(self.text)) and match.end() == len(self.text):
            yield from self.require_more()
        return self.take(match.end() if match else 0)

    def _json(self, json_text: JsonText, give: Callable[[str], object]) -> Steps[None]:
        while True:
            passed, read = json_text.push(self.text)
            self.take(read)
            give(passed)
            if json_text.is_broken:
                raise BrokenError
            if json_text.is_whole:
                return
            yield from self.require_more()


def json_call(reader: Reader) -> Steps[None]:
    """Parse `{"name": .., "arguments": {..}}`; `parameters` also works.

    Arguments may also be null, or the text of an object.
    """
    yield from reader.expect("{")
    name = ""
    arguments = ""  # before the name
    begun = False
    while True:
        yield from reader.skip_space()
        key = yield from reader.json_string()
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key == "name":
            name = yield from reader.json_string()
        elif key not in ("arguments", "parameters") or begun:
            yield from reader.json_value()
        elif name and (yield from reader.starts_with("{")):
            begun = True
            yield from reader.json_arguments(name)
        else:
            arguments = yield from reader.json_value()
        yield from reader.skip_space()
        if not (yield from reader.skip(",")):
            break
    if not begun:
        arguments = _object_of(arguments)
        if not (name and arguments):
            raise BrokenError
        reader.begin_call(name)
        reader.add_arguments(arguments)
    yield from reader.expect("}")


def _object_of(arguments: str) -> str:
    """Return arguments that are JSON of an object, of its text or of null; "" for others."""
    if arguments == "null":
        return "{}"
    with suppress(ValueError):
        value = json.loads(arguments, strict=False)
        text = value.strip() if isinstance(value, str) else arguments
        json_text = JsonText()
        passed, read = json_text.push(text if text.startswith("{") else "")
        return passed if json_text.is_whole and read == len(text) else ""
    return ""


def overlap(text: str, word: str) -> int:
    """Return how many last characters of `text` begin `word`, short of the whole word."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # as Python's templates write it
