"""Kept answers of `/v1/responses`: in memory, for an hour, up to a number of bytes."""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
LIFETIME = 3600.0  # seconds


@dataclass(frozen=True)
class Conversation:
    """A response, and all items up to its end: its whole input, then its output."""

    response: Json
    items: Sequence[Json]


@dataclass(frozen=True)
class _Kept:
    conversation: Conversation
    owner: str
    expires: float
    size: int  # bytes as JSON


@dataclass
class ResponseStore:
    """Conversations by the response's random id, for the owner of the key that asked.

    The oldest make room for new ones. limit: bytes of all; 0: nothing is kept.
    """

    limit: int
    clock: Callable[[], float] = time.monotonic
    _kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)  # oldest first
    _response_of: dict[str, str] = field(default_factory=dict)  # by an item's id
    _size: int = 0

    def keep(self, owner: str, conversation: Conversation) -> bool:
        """Keep a conversation, and return whether there is room for it at all."""
        size = len(json.dumps([conversation.response, list(conversation.items)]))
        if size > self.limit:
            return False
        self._drop_expired()
        while self._size + size > self.limit:
            self._drop(next(iter(self._kept)))
        name = conversation.response["id"]
        self._kept[name] = _Kept(conversation, owner, self.clock() + LIFETIME, size)
        self._size += size
        for item in conversation.response["output"]:
            self._response_of[item["id"]] = name
        return True

    def conversation(self, owner: str, name: str) -> Conversation | None:
        self._drop_expired()
        entry = self._kept.get(name)
        if entry is None or entry.owner != owner:
            return None
        return entry.conversation

    def item(self, owner: str, name: str) -> Json | None:
        """Return an item that a kept response gave out."""
        conversation = self.conversation(owner, self._response_of.get(name, ""))
        if conversation is None:
            return None
        output = conversation.response["output"]
        return next((item for item in output if item["id"] == name), None)

    def delete(self, owner: str, name: str) -> bool:
        if self.conversation(owner, name) is None:
            return False
        self._drop(name)
        return True

    def _drop_expired(self) -> None:
        now = self.clock()
        while self._kept and next(iter(self._kept.values())).expires <= now:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        entry = self._kept.pop(name)
        self._size -= entry.size
        for item in entry.conversation.response["output"]:
            self._response_of.pop(item["id"], None)
