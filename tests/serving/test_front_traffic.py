"""Requests of every kind at once, over a model that counts: each is answered once, whole and right.

Whatever is streamed, held back for stop words, sent in one piece because its client is slow,
cancelled, late, or in a round that fails meanwhile.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.model.engine_loop import ROUND_FAILED
from tests.support.handlers import (
    BEST,
    VOCAB,
    CountingModel,
    FakeReply,
    Response,
    open_front,
    submit,
)

COUNT, AT_ONCE = 250, 30
WHOLE = ("length", "stop")  # how a text ends that lacks nothing


class SlowReply(FakeReply):
    """A reply some of whose parts take long to send, so that later ones are joined."""

    def send(self, chunks: Sequence[Chunk], *, last: bool) -> None:
        time.sleep(random.choice([0.0, 0.0, 0.01]))
        super().send(chunks, last=last)


@dataclass
class Asked:
    """A request and its answers so far, by choice."""

    what: str
    first: int  # the number that its prompt ends with
    tokens: int
    choices: int
    best: int = -1  # alternatives to each token; -1: no log-probabilities
    stop_words: list[str] = field(default_factory=list)
    reply: FakeReply = field(default_factory=SlowReply)
    got: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=Counter)
    reasons: dict[int, str] = field(default_factory=dict)  # why a choice ended

    def end(self) -> str:
        """Compare all that came; return the finish reason."""
        while True:
            part, last = self.reply.next()
            if isinstance(part, str):
                assert part != "INTERNAL" or last == ROUND_FAILED
                return part
            self.take(part)
            if last:
                break
        tokens, written = self.whole()
        assert sorted(self.got) == list(range(self.choices))
        for index, got in self.got.items():
            whole = self.reasons[index] in WHOLE  # the deadline may end one choice alone
            assert got == (tokens if whole else tokens[: len(got)])
            assert self.text[index] == (written if whole else text_of(got))
            assert self.rounds[index] == max(len(got) - 1, 0)
        return min(self.reasons.values(), key=WHOLE.__contains__)

    def take(self, part: Response) -> None:
        at, alone = 0, len(part.index) == 1  # a part of a stream has new tokens, of all so far
        self.rounds[part.index[0]] += sum(part.round_tokens) if alone else 0
        for index, reason in zip(part.index, part.finish_reason, strict=True):
            if reason:
                assert self.reasons.setdefault(index, reason) == reason
        for index, text, count in zip(
            part.index, part.text_output, part.completion_tokens, strict=True
        ):
            got = self.got.setdefault(index, [])
            got += part.token_ids if alone else part.token_ids[at : at + count]
            at += count
            assert len(got) == count
            self.text[index] = self.text.get(index, "") + text
            if not alone:
                self.rounds[index] = max(count - 1, 0)
        asked = part.token_ids if self.best >= 0 else []
        scores = zip(part.token_logprobs, part.top_logprobs, strict=True)
        assert [[own, *others] for own, others in scores] == [
            [-float((token + k) % VOCAB) for k in range(1 + self.best)] for token in asked
        ]

    def whole(self) -> tuple[list[int], str]:
        """Return all tokens, and the text before the first stop word."""
        tokens = [(self.first + 1 + i) % VOCAB for i in range(self.tokens)]
        for count in range(1, self.tokens + 1):
            text = text_of(tokens[:count])
            if places := [text.index(word) for word in self.stop_words if word in text]:
                return tokens[:count], text[: min(places)]
        return tokens, text_of(tokens)


def text_of(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def asked_by(dice: random.Random, front: Any) -> Asked:
    what = dice.choice(["good", "good", "stopped", "held back", "cancelled", "late"])
    asked = Asked(what, dice.randrange(1, 40), dice.randrange(1, 50), dice.choice([1, 1, 2, 3]))
    values: dict[str, Any] = {"stream": dice.random() < 0.6, "n": asked.choices}
    if what == "late":
        asked.tokens = 340
    elif what == "stopped":  # also by several words of one piece
        text, places = asked.whole()[1], [dice.randrange(40) for _ in range(2)]
        asked.stop_words = [text[at : at + dice.randrange(1, 7)] or "w1" for at in places]
    elif what == "held back":  # and never come whole
        asked.stop_words = [f"w{asked.first + asked.tokens - back} x" for back in range(2)]
    if asked.stop_words:
        values["stop_words"] = asked.stop_words
    if dice.random() < 0.4:
        asked.best = values["logprobs"] = dice.randrange(BEST)
    prompt = " ".join(["w1"] * dice.choice([0, 0, 20, 40]) + [f"w{asked.first}"])
    timeout = dice.choice([0.0, 0.002]) if what == "late" else None
    values |= {"max_tokens": asked.tokens, "ignore_eos": True}
    submit(front, asked.reply, prompt, timeout, dice.choice(["", "a", "b"]), **values)
    if what == "cancelled":
        time.sleep(dice.choice([0.0, 0.003]))
        asked.reply.gone.set()
    return asked


@pytest.mark.parametrize("slots", [1, 3, 9])
def test_each_is_answered_once_whole_and_right(slots: int) -> None:
    dice, model, ends = random.Random(slots), CountingModel(), Counter[str]()
    open_, answered = list[Asked](), list[Asked]()
    with open_front(model, slots=slots, max_queue=80, prefix_cache=1) as front:
        for _ in range(COUNT):
            open_.append(asked_by(dice, front))
            if dice.random() < 0.02:
                model.error = RuntimeError("made to fail")
            model.seconds = dice.choice([0.0, 0.0, 0.002])
            while len(open_) >= AT_ONCE:
                answered.append(open_.pop(dice.randrange(len(open_))))
                ends[answered[-1].end()] += 1
        for asked in open_:
            ends[asked.end()] += 1
    assert all(asked.reply.got.empty() for asked in [*answered, *open_])  # nothing after its end
    assert min(ends[how] for how in ("length", "stop", "cancelled", "CANCELLED")) > 0, ends
