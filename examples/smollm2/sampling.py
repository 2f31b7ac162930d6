"""Conversations that the target writes: user turns, then its answers, thousands of rows at a time.

Every row is at its own place: a token that is given is fed like one that is sampled, so a row that
ended begins the next conversation while the others go on. All of them begin with the same tokens,
whose keys and values stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from llama import Cache, Llama, step
from prompts import (
    BEGINNINGS,
    CODE_BEGINNINGS,
    chats,
    frame,
    library_functions,
    problem_beginnings,
    solve,
    user_turns,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

LENGTH = 512  # tokens of a conversation at most
QUESTION_TOKENS, ANSWER_TOKENS = 150, 160  # a user turn that is longer is dropped
QUESTION_TEMPERATURE = 0.8
WARM = 0.2  # share of answers sampled at a temperature of 0.3 to 1; the others are greedy
STEPS = 16  # between two looks for rows that ended
# shares of conversations: plain user turns, about code, problems like HumanEval's, the library's
SHARES = (0.45, 0.15, 0.22, 0.18)
PEOPLE = 1 / 3  # share of prompts that people wrote, where there are some


@dataclass
class Conversation:
    """A text whose tokens from `start` on are the answer."""

    ids: Tensor  # int64 [length], on the CPU
    start: int
    number: int  # of the prompt, if it was given whole; otherwise -1
    uses: int = 0  # how often it was learned


@dataclass
class Prompts:
    """Beginnings of conversations: ids, whether the answer follows at once, and a number."""

    plain: list[list[int]]
    code: list[list[int]]
    problems: list[list[int]]
    library: list[list[int]]
    people: list[list[int]]
    waiting: list[tuple[list[int], int]] = field(default_factory=list)  # given whole, greedy

    def draw(self, generator: torch.Generator) -> tuple[list[int], bool, int]:
        if self.waiting:
            ids, number = self.waiting.pop()
            return ids, True, number
        others = 1 - PEOPLE if self.people else 1
        shares = [share * others for share in SHARES] + [1 - others]
        kind = int(torch.multinomial(torch.tensor(shares), 1, generator=generator))
        pool = (self.plain, self.code, self.problems, self.library, self.people)[kind]
        chosen = int(torch.randint(len(pool), (1,), generator=generator))
        is_whole = kind >= 3
        return pool[chosen], is_whole, -1


def begin(tokenizer: PreTrainedTokenizerBase, people: list[str]) -> Prompts:
    """Return what conversations begin with; people: what people asked."""
    functions = library_functions()
    asked = [solve(head) for head in functions] + functions[::3]

    def short_chats(questions: list[str]) -> list[list[int]]:
        return [ids for ids in chats(tokenizer, questions) if len(ids) + ANSWER_TOKENS < LENGTH]

    # half of the plain ones are the target's from the first word
    plain = [*BEGINNINGS, *[""] * len(BEGINNINGS)]
    return Prompts(
        user_turns(tokenizer, plain),
        user_turns(tokenizer, list(CODE_BEGINNINGS)),
        user_turns(tokenizer, problem_beginnings(functions)),
        short_chats(asked),
        short_chats(people),
    )


class Sampler:
    """Rows in flight, all state on the device; a step is a CUDA graph where there is a GPU."""

    def __init__(
        self, llama: Llama, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, rows: int
    ) -> None:
        device = llama.embedding.device
        self.llama, self.prompts = llama, prompts
        self.end = tokenizer.eos_token_id
        self.generator = torch.Generator().manual_seed(0)
        self.cache = Cache(llama, rows, LENGTH)
        counts = {"dtype": torch.long, "device": device}
        self.ids = torch.zeros(rows, LENGTH + 8, **counts)
        self.at = torch.zeros(rows, **counts)  # position of the token that is fed next
        self.given = torch.zeros(rows, **counts)  # tokens that are known without sampling
        self.start = torch.zeros(rows, **counts)  # of the answer; 0: the user still speaks
        self.stop = torch.zeros(rows, **counts)  # the length at which the text is cut
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(rows, 1, device=device)
        self.answer_temperature = torch.zeros(rows, 1, device=device)
        self.numbers = [-1] * rows
        _, after = frame(tokenizer)
        # the first token ends the user's turn, and is sampled
        turn = tokenizer.encode(after, add_special_tokens=False)[1:]
        self.turn = torch.tensor(turn, device=device)
        [bare] = user_turns(tokenizer, [""])
        self.shared = len(bare) - 1  # positions whose keys no conversation changes
        self.fill(list(range(rows)), 0)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.sampled = 0

    def fill(self, rows: list[int], at: int) -> None:
        """Begin new conversations in `rows`, whose first `at` positions are cached."""
        if not rows:
            return
        drawn = [self.prompts.draw(self.generator) for _ in rows]
        count = len(rows)
        ids = torch.zeros(count, self.ids.shape[1], dtype=torch.long)
        for line, (tokens, _, _) in zip(ids, drawn, strict=True):
            line[: len(tokens)] = torch.tensor(tokens)
        given = torch.tensor([len(tokens) for tokens, _, _ in drawn])
        whole = torch.tensor([answer for _, answer, _ in drawn])
        numbers = [number for _, _, number in drawn]
        draws = torch.rand(count, 2, generator=self.generator)
        warm = torch.where(draws[:, 0] < WARM, 0.3 + 0.7 * draws[:, 1], 0.0)
        warm[torch.tensor(numbers) >= 0] = 0.0
        device = self.ids.device
        index = torch.tensor(rows, device=device)
        self.ids[index] = ids.to(device)
        self.given[index] = given.to(device)
        self.at[index] = at
        self.start[index] = torch.where(whole, given, 0).to(device)
        room = torch.where(whole, ANSWER_TOKENS, QUESTION_TOKENS)
        self.stop[index] = (given + room).clamp_max(LENGTH).to(device)
        self.done[index] = False
        self.answer_temperature[index, 0] = warm.to(device)
        self.temperature[index, 0] = torch.where(whole, warm, QUESTION_TEMPERATURE).to(device)
        for row, number in zip(rows, numbers, strict=True):
            self.numbers[row] = number

    def advance(self) -> None:
        """Feed a token of each row, and sample the next where none is given."""
        fed = self.ids.gather(1, self.at[:, None])[:, 0]
        hidden = step(self.llama, self.cache, fed, self.at)
        logits = F.linear(hidden, self.llama.embedding).float()
        noise = torch.empty_like(logits).exponential_().log_()
        chosen = (logits - self.temperature * noise).argmax(-1)
        following = self.at + 1
        open_ = (following >= self.given) & ~self.done
        known = self.ids.gather(1, following[:, None])[:, 0]
        token = torch.where(open_, chosen, known)
        self.ids.scatter_(1, following[:, None], token[:, None])
        ended = open_ & (token == self.end)
        asked = ended & (self.start == 0)
        answered = ended & (self.start > 0)
        turn = following[:, None] + 1 + torch.arange(len(self.turn), device=token.device)
        turn = turn.clamp_max(self.ids.shape[1] - 1)
        before = self.ids.gather(1, turn)
        self.ids.scatter_(1, turn, torch.where(asked[:, None], self.turn, before))
        answer = following + 1 + len(self.turn)
        self.start.copy_(torch.where(asked, answer, self.start))
        self.given.copy_(torch.where(asked, answer, self.given))
        self.stop.copy_(torch.where(asked, (answer + ANSWER_TOKENS).clamp_max(LENGTH), self.stop))
        self.temperature.copy_(
            torch.where(asked[:, None], self.answer_temperature, self.temperature)
        )
        self.done |= answered | (following + 1 >= self.stop)
        self.at.copy_(torch.where(self.done, self.at, following))

    def run(self) -> None:
        """Run STEPS steps."""
        if not self.ids.is_cuda:
            for _ in range(STEPS):
                self.advance()
            return
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.advance()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.advance()
        for _ in range(STEPS):
            self.graph.replay()

    def harvest(self) -> list[Conversation]:
        """Return conversations that ended; each row begins a new one."""
        rows = self.done.nonzero()[:, 0]
        if not len(rows):
            return []
        ids, start = self.ids[rows].cpu(), self.start[rows].tolist()
        # `at` stays at the last token but one of a text
        lengths = (self.at[rows] + 2).clamp_max(LENGTH).tolist()
        numbers = [self.numbers[row] for row in rows.tolist()]
        ended = []
        for line, first, length, number in zip(ids, start, lengths, numbers, strict=True):
            if 0 < first < length - 8 or number >= 0:
                ended.append(Conversation(line[:length].clone(), first, number))
                self.sampled += length - first
        self.fill(rows.tolist(), self.shared)
        return ended
