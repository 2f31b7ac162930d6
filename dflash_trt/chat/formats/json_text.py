"""JSON of a call's arguments as a model writes it: passed on such that it can always be ended."""

import json
import re

SPACE = re.compile(r"[ \t\n\r]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # within a string
LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
ESCAPE = re.compile(rf'{HIGH}{LOW}|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}})')
HALF = re.compile(rf"{HIGH}|{LOW}")  # of a character
NO_CHARACTER = "\\ufffd"
BEGUN_ESCAPE = re.compile(
    rf"(?:{HIGH})?\\(?:u[0-9a-fA-F]{{0,3}})?|{HIGH}(?:\\u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?"
)
WORD = re.compile(r"[\w.+-]+")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
CONSTANTS = {"true": "true", "false": "false", "null": "null"}
CONSTANTS |= {"True": "true", "False": "false", "None": "null"}  # Python's
CONSTANTS |= dict.fromkeys(("NaN", "Infinity", "-Infinity"), "null")  # as JavaScript writes them
ENDS = {"{": "}", "[": "]"}


class JsonText:
    """An object or list, read piece by piece.

    What was passed on, and what `end` returns, are JSON: commas, keys and numbers wait for what
    makes them whole, and escapes and line breaks that JSON does not have are written as it has
    them.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.is_broken = False
        self._rest = ""  # read, but not whole yet
        self._waiting = ""  # whole, passed on with the next value
        self._open: list[str] = []
        self._next = "value"  # or "key", "colon", "comma"
        self._may_end = False  # a bracket may close before the next key or value
        self._in_string = False
        self._key: str | None = None  # so far, escapes as JSON has them
        self._out: list[str] = []

    def push(self, text: str) -> tuple[str, int]:
        """Return what is passed on, and how many characters of `text` are part of the value."""
        self._rest += text
        while self._rest and not (self.is_whole or self.is_broken):
            before = self._rest
            if self._in_string:
                self._read_string()
            else:
                self._read_syntax()
            if self._rest == before:
                break
        passed = "".join(self._out)
        self._out.clear()
        left = ""
        if self.is_whole or self.is_broken:
            left = self._rest
            self._rest = ""
        return passed, len(text) - len(left)

    def end(self) -> str:
        """Return what ends the value here; nothing if it is whole."""
        if self.is_whole:
            return ""
        result = ""
        if self._in_string and self._key is None:
            result = '"'
        elif not self._in_string and self._next == "value" and not self.is_broken:
            word = _constant(self._rest)
            result = self._waiting + word if word else ""
        self.is_whole = True
        return result + "".join(ENDS[bracket] for bracket in reversed(self._open))

    def _read_string(self) -> None:
        rest = self._rest
        if plain := PLAIN.match(rest):
            self._add_to_string(plain[0], plain.end())
        elif rest[0] == '"':
            self._end_string()
        elif rest[0] != "\\":
            self._add_to_string(json.dumps(rest[0])[1:-1], 1)
        elif escape := ESCAPE.match(rest):
            self._add_to_string(escape[0], escape.end())
        elif BEGUN_ESCAPE.fullmatch(rest):
            return
        elif half := HALF.match(rest):
            self._add_to_string(NO_CHARACTER, half.end())
        else:
            self._add_to_string("\\\\", 1)

    def _add_to_string(self, text: str, read: int) -> None:
        self._rest = self._rest[read:]
        if self._key is None:
            self._out.append(text)
        else:
            self._key += text

    def _end_string(self) -> None:
        self._rest = self._rest[1:]
        self._in_string = False
        if self._key is None:
            self._out.append('"')
            self._end_value()
            return
        self._waiting += f'{self._key}"'
        self._key = None
        self._next = "colon"

    def _end_value(self) -> None:
        self._next = "comma"
        self._may_end = True
        self.is_whole = not self._open

    def _pass(self, text: str) -> None:
        self._out.append(self._waiting + text)
        self._waiting = ""

    def _read_syntax(self) -> None:
        space = SPACE.match(self._rest)
        if space and space.end():
            self._waiting += space[0]
            self._rest = self._rest[space.end() :]
            return
        sign = self._rest[0]
        if self._open and self._may_end and sign == ENDS[self._open[-1]]:
            self._rest = self._rest[1:]
            self._waiting = self._waiting if self._waiting.isspace() else ""
            self._pass(sign)
            self._open.pop()
            self._end_value()
        elif self._next == "comma" or self._next == "colon":
            self._read_separator(sign)
        elif sign == '"':
            self._rest = self._rest[1:]
            self._in_string = True
            if self._next == "key":
                self._key = '"'
            else:
                self._pass(sign)
        elif self._next == "key":
            self.is_broken = True
        elif sign in ENDS:
            self._rest = self._rest[1:]
            self._pass(sign)
            self._open.append(sign)
            self._next = "key" if sign == "{" else "value"
            self._may_end = True
        else:
            self._read_word()

    def _read_separator(self, sign: str) -> None:
        if sign != {"comma": ",", "colon": ":"}[self._next]:
            self.is_broken = True
            return
        self._rest = self._rest[1:]
        self._waiting += sign
        is_key = sign == "," and self._open[-1] == "{"
        self._next = "key" if is_key else "value"
        self._may_end = sign == ","  # a comma before the end is left out

    def _read_word(self) -> None:
        word = WORD.match(self._rest)
        if word is None:
            self.is_broken = True
            return
        if word.end() == len(self._rest):
            return  # more of it may come
        self._rest = self._rest[word.end() :]
        constant = _constant(word[0])
        if not constant:
            self.is_broken = True
            return
        self._pass(constant)
        self._end_value()


def _constant(word: str) -> str:
    return word if NUMBER.fullmatch(word) else CONSTANTS.get(word, "")
