"""Requests of every kind, good and hostile, to a front over a model that counts: each is answered
once, whole and right, whatever is cancelled, expires or fails meanwhile.
"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fronts import VOCAB, CountingModel, FakeReply, open_front, submit
from malformed import DOCUMENTS, INPUTS, NUMBERS
from mutations import TEXTS

from dflash_trt.serving.front.engine_loop import ROUND_FAILED
from dflash_trt.serving.front.request_handler import RequestHandler
from dflash_trt.serving.front.request_output import RequestOutput

AT_ONCE = 40
TOKENS = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
LISTS = ("stop_words", "bad_words", "input_ids", "stop_token_ids")
FAILING = 0.02  # share of the requests with which a round fails
ENOUGH = 3  # findings: each may have been waited for


@dataclass
class Asked:
    """A request, and what may come of it."""

    what: str
    reply: FakeReply
    first: int = 0  # the number that its prompt ends with
    tokens: int = 0
    choices: int = 1
    got: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)

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
        for index, text, count in zip(
            part.index, part.text_output, part.completion_tokens, strict=True
        ):
            share = part.token_ids if alone else part.token_ids[at : at + count]
            at += count
            self.got.setdefault(index, []).extend(share)
            self.text[index] = self.text.get(index, "") + text

    def _end(self, part: RequestOutput) -> str:
        if self.what == "hostile":
            return "answered"
        (reason, *_) = sorted({*part.finish_reason}, key="length".__eq__)
        assert sorted(self.got) == list(range(self.choices)), (self.what, self.got)
        for index, got in self.got.items():
            whole = [(self.first + 1 + i) % VOCAB for i in range(self.tokens)]
            assert got == (whole if reason == "length" else whole[: len(got)]), (self.what, got)
            written = " ".join(f"w{token}" for token in got)
            assert self.text[index] == written, (self.what, self.text[index], written)
        return reason


def run(seed: int, count: int) -> tuple[int, list[str], Counter[str]]:
    chance, model = random.Random(seed), CountingModel()
    counts, wrong, asked = Counter[str](), list[str](), list[Asked]()
    with open_front(model, slots=chance.choice([1, 3, 9]), max_queue=80, prefix_cache=1) as front:
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
    for each in asked:  # the front has ended: nothing more comes
        if not each.reply.got.empty():
            wrong.append(f"{each.what}: {each.reply.got.get()} after its end")
    if not counts["expires: cancelled"]:
        wrong.append("no deadline was kept")
    return len(asked), wrong, counts


def _ask(front: RequestHandler, chance: random.Random) -> Asked:
    if chance.random() < 0.3:
        return _ask_hostile(front, chance)
    what = chance.choice(["good", "good", "stopped short", "cancelled", "expires"])
    first, tokens = chance.randrange(1, 40), chance.randrange(1, 50)
    choices = chance.choice([1, 1, 1, 2, 3])
    values: dict[str, Any] = {"stream": chance.random() < 0.5, "n": choices, "ignore_eos": True}
    if what == "expires":
        tokens = 340
    if what == "stopped short":  # words that are held back, and never come whole
        values["stop_words"] = [f"w{first + tokens - back} x" for back in range(2)]
    prompt = " ".join(["w1"] * chance.choice([0, 0, 20, 40]) + [f"w{first}"])
    asked = Asked(what, FakeReply(), first, tokens, choices)
    timeout = chance.choice([0.0, 0.002]) if what == "expires" else None
    client = chance.choice(["", "a", "b"])
    submit(front, asked.reply, prompt, timeout, client, max_tokens=tokens, **values)
    if what == "cancelled":
        time.sleep(chance.choice([0.0, 0.003]))
        asked.reply.gone.set()
    return asked


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
