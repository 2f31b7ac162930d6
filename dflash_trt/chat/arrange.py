"""Which rewrites a chat needs, learned of a template once: a row for each kind of messages.

A template refuses some chats and silently leaves out parts of others. When it is loaded, a chat of
each kind below is tried with more and more rewrites until all of it is shown. A client's chat is
sent as it is where the template shows all of it; otherwise with the rewrites that its kinds need.
Only a mixture of kinds that needs still others is tried as those were. Where nothing shows all,
the rewrites that lose least are used, and only an instruction or a question that would be lost is
refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from dflash_trt.chat.messages import Message
from dflash_trt.chat.rewrites import INSTRUCTIONS, Rewrite, rewritten
from dflash_trt.chat.specimen import (
    NOTHING_LOST,
    Loss,
    loss_of,
    lost_marks,
    refused_messages,
    specimen_call,
    specimen_of,
)
from dflash_trt.errors import RequestError

MAX_REWRITES = 3  # of one kind
Show = Callable[[list[Message]], str]  # renders a chat; RequestError if the template refuses it
Needs = Mapping[str, tuple[Rewrite, ...]]  # rewrites by kind

SYSTEM: Message = {"role": "system", "content": "text"}
DEVELOPER: Message = {"role": "developer", "content": "text"}
USER: Message = {"role": "user", "content": "text"}
ANSWER: Message = {"role": "assistant", "content": "text"}
CALL: Message = {"role": "assistant", "content": "", "tool_calls": [specimen_call(0)]}
TEXT_AND_CALL: Message = {**CALL, "content": "text"}
TWO_CALLS: Message = {**CALL, "tool_calls": [specimen_call(0, 0), specimen_call(0, 1)]}
RESULT: Message = {"role": "tool", "content": "text", "tool_call_id": specimen_call(0)["id"]}
SECOND_RESULT: Message = {**RESULT, "tool_call_id": specimen_call(0, 1)["id"]}

# the chats that a template is tried with, by kind
PROBES: dict[str, list[Message]] = {
    "system": [SYSTEM, USER],
    "developer": [DEVELOPER, USER],
    "system and developer": [SYSTEM, DEVELOPER, USER],
    "system later on": [SYSTEM, USER, ANSWER, SYSTEM, USER],
    "user twice": [USER, USER],
    "call": [USER, CALL, RESULT, ANSWER, USER],
    "user after a result": [USER, CALL, RESULT, USER],
    "system and call": [SYSTEM, USER, CALL, RESULT],
    "text and call": [USER, TEXT_AND_CALL, RESULT],
    "text and call, answered": [USER, TEXT_AND_CALL, RESULT, ANSWER, USER],
    "text and call, then a user": [USER, TEXT_AND_CALL, RESULT, USER],
    "two calls": [USER, TWO_CALLS, RESULT, SECOND_RESULT],
}


def is_call(message: Message) -> bool:
    return "tool_calls" in message


def has_calls(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "tool" or is_call(message) for message in messages)


def kinds_of(messages: Sequence[Message]) -> set[str]:
    """Return the kinds of `PROBES` that a chat has messages of."""
    roles = [message["role"] for message in messages]
    instructions = [index for index, role in enumerate(roles) if role in INSTRUCTIONS]
    calling = [message for message in messages if is_call(message)]
    texts = [n for n, message in enumerate(messages) if message["content"] and is_call(message)]
    present = {
        "system": "system" in roles,
        "developer": "developer" in roles,
        "system and developer": len(instructions) > 1,
        "system later on": instructions != [*range(len(instructions))],
        "user twice": any(role == after != "tool" for role, after in pairwise(roles)),
        "call": has_calls(messages),
        "user after a result": ("tool", "user") in pairwise(roles),
        "system and call": bool(instructions) and has_calls(messages),
        "text and call": bool(texts),
        "text and call, answered": bool(texts) and "assistant" in roles[texts[0] + 1 :],
        "text and call, then a user": bool(texts) and ("tool", "user") in pairwise(roles),
        "two calls": any(len(message["tool_calls"]) > 1 for message in calling),
    }
    return {kind for kind, is_present in present.items() if is_present}


@dataclass(frozen=True)
class Arrangement:
    """The rewrites of a chat, and the numbers of the messages that it must not lose."""

    rewrites: tuple[Rewrite, ...] = ()
    refused: tuple[int, ...] = ()  # messages that would be lost


@dataclass(frozen=True)
class Trial:
    """A specimen with rewrites, as a template shows it."""

    rewrites: tuple[Rewrite, ...]
    loss: Loss
    refused: tuple[int, ...]


def learn_needs(show: Show, rewrites: Sequence[Rewrite]) -> Needs:
    """Return the fewest rewrites with which a template shows most of each kind of chat."""
    needs = {}
    for kind, chat in PROBES.items():
        trial = _find(specimen_of(chat), show, rewrites)
        needs[kind] = () if trial is None else trial.rewrites
    return needs


def arrange(
    specimen: list[Message], show: Show, needs: Needs, rewrites: Sequence[Rewrite]
) -> Arrangement:
    """Return the rewrites for a chat, none if the template refuses it with and without them."""
    needed = {rewrite for kind in kinds_of(specimen) for rewrite in needs[kind]}
    for chosen in ((), tuple(rewrite for rewrite in rewrites if rewrite in needed)):
        trial = _try(specimen, chosen, show)
        if trial is not None and trial.loss == NOTHING_LOST:
            return Arrangement(trial.rewrites)
    best = _find(specimen, show, rewrites)
    return Arrangement() if best is None else Arrangement(best.rewrites, best.refused)


def _find(specimen: list[Message], show: Show, rewrites: Sequence[Rewrite]) -> Trial | None:
    """Return the fewest rewrites that show most; None if the template refuses all."""
    best: Trial | None = None
    for count in range(MAX_REWRITES + 1):
        for chosen in combinations(rewrites, count):
            trial = _try(specimen, chosen, show)
            if trial is not None and (best is None or trial.loss < best.loss):
                best = trial
            if best is not None and best.loss == NOTHING_LOST:
                return best
    return best


def _try(specimen: list[Message], rewrites: tuple[Rewrite, ...], show: Show) -> Trial | None:
    """Return what a template shows of a specimen; None if it refuses it."""
    try:
        text = show(rewritten(specimen, rewrites))
    except RequestError:
        return None
    lost = lost_marks(specimen, text)
    return Trial(rewrites, loss_of(specimen, lost), refused_messages(specimen, lost))
