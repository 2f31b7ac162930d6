"""All answers to a request are the first one: what differs, and what there was."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer

from dflash_trt.builder.pipeline import build
from dflash_trt.errors import RequestError
from tests.support.builds import config_of, quiet
from tests.support.pairs import Pair, make_pair, teach
from tests.support.servers import serve_ports, serving
from tests.support.tool_templates import WRITING
from tests.support.traffic.doors import (
    BATCH,
    BESIDE,
    DOORS,
    MODES,
    PLAIN,
    Answer,
    Choice,
    Served,
    Way,
    answer_or_error,
    ask,
    ask_in_a_batch,
    doors_of,
)
from tests.support.traffic.requests import Case, Dialect, Json, dialect_of, make_cases

A_SERVER = 250  # requests to one pair of servers, as far as there are formats
SIZES: Json = {"slots": BESIDE, "max_queue": 4096, "max_per_client": 4096, "max_seq_len": 1024}
ALL_KINDS = 100  # requests among which each kind occurs
VOCABULARY = 320
REFUSED = RequestError.__name__


def ways_of(case: Case, dice: Random) -> list[Way]:
    """Return a way through each door; modes, caches and drafts take turns."""
    ways = []
    turn = dice.randrange(8)
    for place, door in enumerate(doors_of(case)):
        bits = turn + 3 * place
        mode, drafting, warm = MODES[bits & 1], bits & 6 != 2, bool(bits & 4)
        ways.append(Way(door, mode, drafting, warm))
        if "stream" in door and dice.random() < 0.2:
            ways.append(Way(door, mode, drafting, warm, cut=True))
    return ways


def difference(expected: Sequence[Choice], got: Sequence[Choice], way: Way) -> str:
    """Return what differs, or ""."""
    if way.cut:
        begun = all(_begins(whole, part) for whole, part in zip(expected, got, strict=False))
        return "" if begun or len(expected) > 1 else f"{got} does not begin {expected}"
    if len(expected) != len(got):
        return f"{len(got)} choices for {len(expected)}"
    for whole, other in zip(expected, got, strict=True):
        unknown = whole.tokens is None or other.tokens is None
        if (whole._replace(tokens=None) if unknown else whole) != (
            other._replace(tokens=None) if unknown else other
        ):
            return f"{other} is not {whole}"
    return ""


def _begins(whole: Choice, part: Choice) -> bool:
    return whole.text.startswith(part.text) and whole.thoughts.startswith(part.thoughts)


@contextmanager
def served_pair(sign: str, directory: Path) -> Iterator[dict[str, Served]]:
    """Serve a taught pair in both modes, with a template that writes calls of this format."""
    pair = make_pair(directory, vocab=VOCABULARY, longest=SIZES["max_seq_len"])
    teach(pair, steps=60)
    teach_marks(pair, dialect_of(sign))
    with ExitStack() as stack:
        servers = {}
        for mode in MODES:
            config = config_of(directory, engine={"threads": 1}, serving={**SIZES, "mode": mode})
            build(config, directory / mode, quiet)
        with ThreadPoolExecutor(len(MODES)) as pool:
            running = {mode: serve_ports() for mode in MODES}
            starts = [
                pool.submit(stack.enter_context, serving(directory / mode, ports))
                for mode, ports in running.items()
            ]
            for start in starts:
                start.result()
        for mode, ports in running.items():
            servers[mode] = Served(directory / mode, ports)
            stack.callback(servers[mode].close)
        yield servers


def teach_marks(pair: Pair, dialect: Dialect) -> None:
    """Give a pair a chat template, and its marks as special tokens in place of unused ones."""
    file = pair.target_dir / "tokenizer.json"
    written = json.loads(file.read_text())
    vocabulary = written["model"]["vocab"]
    marks = [mark for mark in dialect.marks if mark not in vocabulary]
    for place, mark in enumerate(marks, 256):
        vocabulary[mark] = vocabulary.pop(f"<|unused{place}|>")
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(file))
    settings = pair.target_dir / "tokenizer_config.json"
    template = {"chat_template": dialect.template}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | template))


def run(sign: str, count: int, seed: int, counts: Counter[str]) -> list[str]:
    """Send so many requests of one format to its servers; return the differences."""
    dice = Random(f"{seed} {sign}")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name, served_pair(sign, Path(name)) as servers:
        tokenizer = servers[PLAIN.mode].tokenizer
        dialect = dialect_of(sign)
        cases = make_cases(dialect, tokenizer, count, dice)
        expected = [answer_or_error(ask, servers, case, PLAIN) for case in cases]
        questions = [
            Question(place, way) for place in range(count) for way in ways_of(cases[place], dice)
        ]
        dice.shuffle(questions)
        for question, answer in _ask_all(servers, cases, questions):
            counts.update(names_of(question.way))
            problem = _problem(expected[question.case], answer, question.way)
            if problem:
                report = {"seed": seed, "format": sign, "way": question.way._asdict()}
                report |= {"request": asdict(cases[question.case]), "problem": problem}
                wrong.append(json.dumps(report, ensure_ascii=False))
        for case, choices in zip(cases, expected, strict=True):
            counts.update(name for name, is_one in KINDS.items() if is_one(case))
            _count_answers(choices, counts)
    return wrong


class Question(NamedTuple):
    case: int
    way: Way


def _ask_all(
    servers: Mapping[str, Served], cases: Sequence[Case], questions: Sequence[Question]
) -> Iterator[tuple[Question, Answer]]:
    """Yield the answers to questions that are asked beside each other."""
    singles = [question for question in questions if question.way.door != BATCH]
    batches = {
        mode: [one for one in questions if one.way.door == BATCH and one.way.mode == mode]
        for mode in MODES
    }
    with ThreadPoolExecutor(BESIDE + len(batches)) as pool:
        files = {
            mode: pool.submit(
                ask_in_a_batch,
                servers[mode],
                [cases[question.case] for question in batch],
                [question.way for question in batch],
            )
            for mode, batch in batches.items()
            if batch
        }
        answers = pool.map(
            lambda one: answer_or_error(ask, servers, cases[one.case], one.way), singles
        )
        yield from zip(singles, answers, strict=True)
        for mode, file in files.items():
            yield from zip(batches[mode], file.result(), strict=True)


def _problem(expected: Answer, answer: Answer, way: Way) -> str:
    if not isinstance(expected, str) and not isinstance(answer, str):
        return difference(expected, answer, way)
    if str(expected).startswith(REFUSED) and str(answer).startswith(REFUSED):
        return ""
    return f"{answer} / {expected}"


# --- what there was ------------------------------------------------------------------------------

CUTS = {"top_p", "top_k", "min_p"}  # of the likeliest tokens
KINDS: dict[str, Callable[[Case], bool]] = {
    "chats without tools": lambda case: bool(case.messages) and not case.tools,
    "chats with tools": lambda case: bool(case.tools),
    "calls required": lambda case: "tool_choice" in case.options,
    "one call at most": lambda case: "parallel_tool_calls" in case.options,
    "answers continued": lambda case: "continue_final_message" in case.options,
    "texts": lambda case: isinstance(case.prompt, str) and not case.messages,
    "texts as ids": lambda case: isinstance(case.prompt, list),
    "echoed prompts": lambda case: "exclude_input_in_output" in case.options,
    "greedy": lambda case: not case.options["temperature"],
    "T 1": lambda case: case.options["temperature"] == 1 and not case.options.keys() & CUTS,
    "top_p": lambda case: "top_p" in case.options and "top_k" not in case.options,
    "top_k with top_p": lambda case: "top_k" in case.options,
    "penalties": lambda case: any("penalty" in name for name in case.options),
    "bias": lambda case: "logit_bias" in case.options,
    "JSON schemas": lambda case: (
        "response_format" in case.options or "%json" in case.options.get("guided_grammar", "")
    ),
    "answers with marks": lambda case: "guided_grammar" in case.options,
    "stop strings": lambda case: "stop_words" in case.options,
    "n": lambda case: "n" in case.options,
    "log-probabilities": lambda case: "logprobs" in case.options,
}
ANSWERS = ("cut by max_tokens", "ended by themselves", "with calls", "with thoughts")
WAYS = (*DOORS, BATCH, *MODES, "drafting", "plain", "warm", "cold", "cancelled")


def names_of(way: Way) -> list[str]:
    names = [way.door, way.mode, "drafting" if way.drafting else "plain"]
    names.append("warm" if way.warm else "cold")
    return [*names, "cancelled"] if way.cut else names


def _count_answers(answer: Answer, counts: Counter[str]) -> None:
    if isinstance(answer, str):
        counts["refused"] += 1
        return
    for choice in answer:
        counts["cut by max_tokens"] += choice.reason == "length"
        counts["ended by themselves"] += choice.reason == "stop"
        counts["with calls"] += bool(choice.calls)
        counts["with thoughts"] += bool(choice.thoughts)


def table(counts: Counter[str]) -> str:
    """Return how often each kind occurred, those that did not too."""
    parts = {"requests": tuple(KINDS), "ways": WAYS, "answers": (*ANSWERS, "refused")}
    lines = []
    for part, names in parts.items():
        lines.append(f"{part}:")
        lines += [f"  {name:<20}{counts[name]:>6}" for name in names]
    return "\n".join(lines)


def missing(counts: Counter[str]) -> list[str]:
    return [name for name in (*KINDS, *WAYS, *ANSWERS) if not counts[name]]


def main(count: int, seed: int) -> int:
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)  # a busy machine's other threads would be waited for
    signs = [*WRITING]
    Random(seed).shuffle(signs)
    signs = signs[: max(1, -(-count // A_SERVER))]
    wrong, counts, done = list[str](), Counter[str](), 0
    for place, sign in enumerate(signs):
        share = (count - done) // (len(signs) - place)
        different = run(sign, share, seed, counts)
        wrong += different
        done += share
        print(f"{done} requests, {len(wrong)} different", *different, sep="\n", flush=True)
    print(table(counts))
    lacking = missing(counts) if count >= ALL_KINDS else []
    if lacking:
        print("did not occur:", ", ".join(lacking))
    return int(bool(wrong or lacking))
