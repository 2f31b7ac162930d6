"""JSON values and bytes with one thing wrong in them, at random."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

Json = Any

DEEP = "[" * 3000 + "]" * 3000  # stands for "DEEP"
LONG = "9" * 5000  # stands for "LONG", without quotes a number that Python does not read
NUMBERS: tuple[Json, ...] = (
    *(0, 1, -1, 2, 3, 7, 16, 64, 10**9, -(10**9), 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1),
    *(2**64, 10**30, 10**400, True, False),
)
FLOATS = (0.0, 0.5, 1.5, 16.0, -1.0, 1e308, -1e308, 1e-320, *map(float, ("nan", "inf", "-inf")))
TEXTS = (
    *("", "0", "a", "x", "\0", "\ud800", "é🙂" * 300, "x" * 10000, "\x1b[2J", "DEEP", "LONG"),
    *(".", "..", "../a", "/", "/a", "a/b"),
)
LISTS: tuple[Json, ...] = (
    *([], {}, [[]], [None], {"": None}, {"a": {}}, {"a": 1}, [0], [-1], [1.0], ["1"], ["x"]),
    *([1, 2], [2, 1], [0, 0], [0, 64], [64, 0], [10**9], [1] * 2000),
)
JUNK: tuple[Json, ...] = (None, *NUMBERS, *FLOATS, *TEXTS, *LISTS)
NAMES = ("", "a", "\0", "x" * 3000, "\ud800")


def mutate(
    value: Json, chance: random.Random, junk: Sequence[Json] = JUNK, names: Sequence[str] = NAMES
) -> Json:
    """A copy with one place in it replaced, taken out, swapped, wrapped or added.

    junk: what may come in its place; names: of what is added.
    """
    value = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []

    def walk(node: Json) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    how = chance.choice([*["replace"] * 4, "count", "remove", "swap", "wrap", "add", "top"])
    if not places or (how == "top" and chance.random() < 0.5):
        return chance.choice(junk)
    node, key = chance.choice(places)
    if how == "count":
        numbers = [at for at in places if type(at[0][at[1]]) is int]
        node, key = chance.choice(numbers or places)
        node[key] = chance.choice(NUMBERS)
    elif how == "remove":
        del node[key]
    elif how == "swap":
        other, there = chance.choice(places)
        node[key], other[there] = other[there], node[key]
    elif how == "wrap":
        listed = isinstance(node[key], dict)
        node[key] = list(node[key].values()) if listed else chance.choice([[node[key]], str(key)])
    elif how == "add" and isinstance(node, dict):
        node[chance.choice(names)] = chance.choice(junk)
    elif how == "add":
        node.append(chance.choice(junk))
    else:
        node[key] = chance.choice(junk)
    try:
        return json.loads(json.dumps(value))  # junk is not shared
    except (ValueError, RecursionError):  # swapped into itself
        return chance.choice(junk)


def text_of(value: Json) -> bytes:
    return json.dumps(value).replace('"DEEP"', DEEP).replace('"LONG"', LONG).encode()


def spoil(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut off, put in or repeated."""
    at, raw = chance.randrange(len(data) + 1), bytearray(data)
    how = chance.choice(["cut", "flip", "insert", "repeat", "letter"])
    if how == "cut":
        return bytes(raw[:at])
    if how == "flip" and at < len(raw):
        raw[at] ^= 1 << chance.randrange(8)
    elif how == "insert":
        junk = (b"\0", b"\xff", b"\xed\xa0\x80", b"[" * 5000, b'{"a":', b"9" * 5000, b"\n", b'"')
        raw[at:at] = chance.choice(junk)
    elif how == "repeat":
        raw[at:at] = raw[chance.randrange(at + 1) : at]
    elif at < len(raw):
        raw[at] = chance.choice(b'{}[]",:0-9.eE \\ntf')
    return bytes(raw)
