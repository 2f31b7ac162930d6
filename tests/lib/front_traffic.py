"""Requests of every kind, good and hostile, to a front over a model that counts: each is answered
once, whole and right, whatever is cancelled, expires or fails meanwhile.
"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from fronts import BEST, VOCAB, CountingModel, FakeReply, open_front, submit
from malformed import DOCUMENTS, INPUTS, NUMBERS
from mutations import TEXTS

from dflash_trt.serving.front.engine_loop import ROUND_FAILED
from dflash_trt.serving.front.request_handler import RequestHandler
from dflash_trt.serving.front.request_output import RequestOutput

AT_ONCE = 40
TOKENS = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
LISTS = ("stop_words", "bad_words", "input_ids", "stop_token_ids")
FAILING = 0.02  # share of the requests with which a round fails
WHOLE = ("length", "stop")  # how a text ends that lacks nothing
ENOUGH = 3  # findings: each may have been waited for


@dataclass
class Asked:
    """A request, and what may come of it."""

    what: str
    reply: FakeReply
    first: int = 0  # the number that its prompt ends with
    tokens: int = 0
    choices: int = 1
    stop_words: list[str] = field(default_factory=list)
    best: int = -1  # alternatives to each token; -1: no log-probabilities
    got: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    rounds: dict[int, list[int]] = field(default_factory=dict)

    def wait(self) -> str:
        """How it ended; AssertionError for what should not have come."""
        while True:
            try:
                answer = self.reply.next()
            except queue.Empty:
                raise AssertionError(f"{self.what}: no answer") from None
            if isinstance(answer[0], str):
                code, message = answer
                assert code != "INTERNAL" or message == ROUND_FAILED, (self.what, message)
                assert not {"Traceback", ".py"} & {*message.split()}, message
                return str(code)
            part, last = answer
            if self.what != "hostile":
                self._take(part)
            if last:
                return self._end(part)

    def _take(self, part: RequestOutput) -> None:
        at, alone = 0, len(part.index) == 1  # a part of a stream has new tokens, of all so far
        of_rounds = iter(part.round_tokens)
        for index, text, count, rounds in zip(
            part.index, part.text_output, part.completion_tokens, part.rounds, strict=True
        ):
            share = part.token_ids if alone else part.token_ids[at : at + count]
            at += count
            got, committed = self.got.setdefault(index, []), self.rounds.setdefault(index, [])
            got += share
            committed += islice(of_rounds, rounds - len(committed))
            assert (len(got), len(committed)) == (count, rounds), (self.what, part)
            self.text[index] = self.text.get(index, "") + text
        assert not [*of_rounds], (self.what, part)
        best = zip(part.token_logprobs, part.top_logprobs, strict=True)
        scores = [[own, *others] for own, others in best]
        asked = part.token_ids if self.best >= 0 else []
        assert scores == [
            [-float((token + k) % VOCAB) for k in range(1 + self.best)] for token in asked
        ], (self.what, part)

    def _end(self, part: RequestOutput) -> str:
        if self.what == "hostile":
            return "answered"
        (reason, *_) = sorted({*part.finish_reason}, key=WHOLE.__contains__)
        assert sorted(self.got) == list(range(self.choices)), (self.what, self.got)
        whole, written = self.answer()
        for index, got in self.got.items():
            assert got == (whole if reason in WHOLE else whole[: len(got)]), (self.what, got)
            if reason not in WHOLE:
                written = _text(got)
            assert self.text[index] == written, (self.what, self.text[index], written)
            assert sum(self.rounds[index]) == max(len(got) - 1, 0), (self.what, self.rounds)
        return reason

    def answer(self) -> tuple[list[int], str]:
        """All tokens, and the text before the first stop word that comes."""
        tokens = [(self.first + 1 + i) % VOCAB for i in range(self.tokens)]
        for count in range(1, self.tokens + 1):
            text = _text(tokens[:count])
            if places := [text.index(word) for word in self.stop_words if word in text]:
                return tokens[:count], text[: min(places)]
        return tokens, _text(tokens)


def _text(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def run(seed: int, count: int) -> tuple[int, list[str], Counter[str]]:
    chance, model = random.Random(seed), CountingModel()
    counts, wrong, asked = Counter[str](), list[str](), list[Asked]()
    slots = chance.choice([1, 3, 9])
    with open_front(model, slots=slots, max_queue=80, prefix_cache=1) as front:
        open_ = list[Asked]()
        for number in range(count):
            if len(wrong) >= ENOUGH:
                break
            open_.append(_ask(front, chance))
            if chance.random() < FAILING:
                model.error = RuntimeError("made to fail")
            model.seconds = chance.choice([0.0, 0.0, 0.002])
            while len(open_) >= AT_ONCE or (open_ and number == count - 1):
                asked.append(open_.pop(chance.randrange(len(open_))))
                try:
                    counts[f"{asked[-1].what}: {asked[-1].wait()}"] += 1
                except AssertionError as error:
                    wrong.append(str(error))
        wrong += _expires_waiting(front, model, slots)
    for each in asked:  # the front has ended: nothing more comes
        if not each.reply.got.empty():
            wrong.append(f"{each.what}: {each.reply.got.get()} after its end")
    if not counts["expires: cancelled"]:
        wrong.append("no deadline was kept")
    return len(asked), wrong, counts


def _ask(front: RequestHandler, chance: random.Random) -> Asked:
    if chance.random() < 0.3:
        return _ask_hostile(front, chance)
    what = chance.choice(["good", "good", "stopped", "stopped short", "cancelled", "expires"])
    first, tokens = chance.randrange(1, 40), chance.randrange(1, 50)
    asked = Asked(what, FakeReply(), first, tokens, chance.choice([1, 1, 1, 2, 3]))
    values: dict[str, Any] = {"stream": chance.random() < 0.5, "n": asked.choices}
    if what == "expires":
        asked.tokens = 340
    elif what == "stopped":  # also by several words of one piece
        text, places = asked.answer()[1], [chance.randrange(40) for _ in range(2)]
        asked.stop_words = [text[at : at + chance.randrange(1, 7)] or "w1" for at in places]
    elif what == "stopped short":  # words that are held back, and never come whole
        asked.stop_words = [f"w{first + tokens - back} x" for back in range(2)]
    if asked.stop_words:
        values["stop_words"] = asked.stop_words
    if chance.random() < 0.3:
        asked.best = values["logprobs"] = chance.randrange(BEST)
    prompt = " ".join(["w1"] * chance.choice([0, 0, 20, 40]) + [f"w{first}"])
    timeout = chance.choice([0.0, 0.002]) if what == "expires" else None
    client = chance.choice(["", "a", "b"])
    values |= {"max_tokens": asked.tokens, "ignore_eos": True}
    submit(front, asked.reply, prompt, timeout, client, **values)
    if what == "cancelled":
        time.sleep(chance.choice([0.0, 0.003]))
        asked.reply.gone.set()
    return asked


def _expires_waiting(front: RequestHandler, model: CountingModel, slots: int) -> list[str]:
    """Whether a deadline is kept while every slot is taken, for seconds."""
    model.error, model.seconds = None, 0.05
    running, late = [FakeReply() for _ in range(slots)], Asked("late", FakeReply(), 1, 340)
    for reply in (*running, late.reply):
        timeout = 0.01 if reply is late.reply else None
        submit(front, reply, "w1", timeout, max_tokens=late.tokens, ignore_eos=True)
    ended, before = late.wait(), all(reply.got.empty() for reply in running)
    for reply in running:
        reply.gone.set()
    return [] if (ended, before) == ("cancelled", True) else [f"late: {ended}, {before}"]


def _ask_hostile(front: RequestHandler, chance: random.Random) -> Asked:
    """A sound request with inputs at the edge of what there is, or beyond, in place of its own."""
    inputs = {"text_input": np.array([b"w1"], object), "max_tokens": np.array([3], np.int32)}
    for name in chance.sample(sorted(INPUTS), chance.choice([1, 1, 2, 4])):
        if INPUTS[name] == "STRING":
            edges = [*DOCUMENTS, *(each.encode("utf-8", "surrogatepass") for each in TEXTS)]
            values = np.array([chance.choice(edges)], object)
        else:
            edges = [*NUMBERS[INPUTS[name]][1]]
            values = np.array([chance.choice(edges)]).astype(TOKENS[INPUTS[name]])
        inputs[name] = np.resize(values, chance.choice([1, 3, 70])) if name in LISTS else values
    asked = Asked("hostile", FakeReply())
    front.submit(inputs, asked.reply, None, "")
    return asked
