"""`dflash-trt bench engine`: ways of decoding, measured in turns over the same prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

from dflash_trt.bench.passes import Pass, TimedEngine, Way, run_in_turns
from dflash_trt.bench.results import Cell
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import DraftModel, Request, SamplingParams, in_process, rounds_with
from dflash_trt.decoding.speculation.kept_costs import costs_of
from dflash_trt.decoding.speculation.lookup import PromptLookup
from dflash_trt.decoding.speculation.policy import Fixed
from dflash_trt.decoding.speculation.proposals import strategy
from dflash_trt.engines.step import Engine
from dflash_trt.errors import RequestError

METHODS = ("plain", "dflash", "adaptive", "lookup", "draft-model")
WARM_UP_TOKENS = 16
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured: every combination of the lists, `repeats` times."""

    tasks: dict[str, list[list[int]]]  # prompts by task
    max_tokens: int
    staggered: bool = False  # the first texts of a batch end one after another, as users' do
    methods: tuple[str, ...] = ("plain", "dflash", "adaptive")
    draft_tokens: tuple[int | None, ...] = (None,)  # of dflash, lookup and draft-model
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int | None, ...] = (None,)
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 5
    seed: int = 0
    draft_model: Path | None = None  # a build whose target drafts


def measure_engine(
    engines: Path, threads: int, plan: Plan, progress: Progress, take: Callable[[Cell], object]
) -> None:
    """Hand a cell to `take` for each setting; a group's cells come together.

    `engines` holds `target/` and `drafter/`. Where their cache rows are enough for all ways at
    once, these take turns of a few rounds (`passes.run_in_turns`), else of whole passes: noise of
    the machine meets all. RequestError for a plan that these engines cannot run.
    """
    target, drafter = TimedEngine(engines / "target"), TimedEngine(engines / "drafter")
    model = TimedEngine(plan.draft_model / "engines" / "target") if plan.draft_model else None
    check_plan(plan, target, drafter, model)
    groups = list(product(plan.tasks.items(), plan.batches, plan.contexts, plan.temperatures))
    passes = 0
    for (task, prompts), batch, context, temperature in groups:
        requests = [
            Request(
                prompt, tokens_of(plan, batch, i), SamplingParams(temperature, seed=plan.seed + i)
            )
            for i, prompt in enumerate(of_length(prompts, context))
        ]
        ways = [
            _way(cell, engines, target, drafter, model)
            for cell in _cells(plan, task, batch, context, threads, temperature)
        ]
        together = len(ways) * batch <= target.info.slots
        warm_up = [replace(r, max_tokens=min(r.max_tokens, WARM_UP_TOKENS)) for r in requests]
        if together:
            _side_by_side(ways, batch)
        for way in ways:
            Pass(way, target, warm_up[: 2 * batch], batch).run()
        for repeat in range(plan.repeats):
            turn = repeat % len(ways)
            order = ways[turn:] + ways[:turn]
            if together:
                _side_by_side(order, batch)
            for some in [order] if together else [[way] for way in order]:
                run_in_turns([Pass(way, target, requests, batch) for way in some])
                passes += len(some)
                progress(passes, len(groups) * len(ways) * plan.repeats)
        plain = next((way for way in ways if way.cell.method == "plain"), None)
        for way in ways:
            take(_finished(way, plain))


def tokens_of(plan: Plan, batch: int, i: int) -> int:
    """New tokens of the i-th text."""
    if not plan.staggered or i >= batch:
        return plan.max_tokens
    return ceil(plan.max_tokens * (i + 1) / batch)


def check_plan(plan: Plan, target: Engine, drafter: Engine, model: Engine | None) -> None:
    """RequestError naming what these engines cannot do."""
    info, longest = target.info, drafter.info.block_size - 1
    if max(plan.batches) > info.slots:
        raise RequestError(
            f"--batch {max(plan.batches)} is more than the engines' {info.slots} slots",
            "Build with a larger serving.slots",
        )
    for drafts in plan.draft_tokens:
        if drafts is not None and not 1 <= drafts <= longest:
            raise RequestError(
                f"--draft-tokens {drafts} is not 1 to {longest}, the block size less the anchor",
                "Give a number in that range, or auto",
            )
    prompts = [prompt for each in plan.tasks.values() for prompt in each]
    room = info.max_seq_len - plan.max_tokens
    for context in (*plan.contexts, max(map(len, prompts), default=0)):
        if context is not None and context > room:
            raise RequestError(
                f"a prompt of {context} tokens and {plan.max_tokens} more exceed the engines' "
                f"{info.max_seq_len}",
                "Shorten them, or build with a larger serving.max_seq_len",
            )
    if "draft-model" not in plan.methods:
        return
    if model is None:
        raise RequestError("the method draft-model needs a model", "Give --draft-model BUILD")
    for name in ("vocab_size", "slots", "max_seq_len"):
        own, its = getattr(info, name), getattr(model.info, name)
        if its != own:
            raise RequestError(
                f"the draft model's {name} is {its}, the target's is {own}",
                "Build it with the same serving section, for a target with the same tokenizer",
            )


def _cells(
    plan: Plan, task: str, batch: int, context: int | None, threads: int, temperature: float
) -> Iterator[Cell]:
    for method in plan.methods:
        unlike = method not in ("plain", "adaptive")
        for drafts in plan.draft_tokens if unlike else (0,) if method == "plain" else (None,):
            yield Cell(
                task=task,
                method=method,
                draft_tokens=drafts,
                batch=batch,
                context=context,
                threads=threads,
                temperature=temperature,
            )


def _way(
    cell: Cell,
    engines: Path,
    target: TimedEngine,
    drafter: TimedEngine,
    model: TimedEngine | None,
) -> Way:
    rounds, used = in_process(target, None), [target]
    if cell.method in ("dflash", "adaptive"):
        rounds, used = in_process(target, drafter), [target, drafter]
    elif cell.method == "lookup":
        rounds = rounds_with(target, PromptLookup())
    elif cell.method == "draft-model":
        assert model is not None
        rounds, used = rounds_with(target, DraftModel(model)), [target, model]
    block_size = drafter.info.block_size
    if cell.method == "adaptive":
        costs = costs_of(engines, "in_process", rounds, cell.threads)
        return Way(cell, rounds, *strategy(Speculation(), target.info, costs), used)
    drafts = 0 if cell.method == "plain" else cell.draft_tokens or block_size - 1
    return Way(cell, rounds, Fixed(drafts), None, used)


def _side_by_side(order: Sequence[Way], batch: int) -> None:
    """Cache rows for each; in another order others, since where they lie makes a percent or two."""
    for i, way in enumerate(order):
        way.first_row = i * batch


def _finished(way: Way, plain: Way | None) -> Cell:
    """The cell with what its texts say: how far rounds got, and how many are plain decoding's."""
    committed = [n for each in way.passes for text in each for n in text.committed_per_round]
    kept = [
        sum(count > i for count in committed) / len(committed)
        for i in range(1, max(committed, default=1))
    ]
    if plain is None:
        return replace(way.cell, kept=kept)
    pairs = [
        (own.tokens, its.tokens)
        for ours, theirs in zip(way.passes, plain.passes, strict=True)
        for own, its in zip(ours, theirs, strict=True)
    ]
    return replace(way.cell, kept=kept, identical=(sum(a == b for a, b in pairs), len(pairs)))


def of_length(prompts: Sequence[list[int]], context: int | None) -> list[list[int]]:
    """The prompts as they are, or of `context` tokens each: cut, or with the next ones behind."""
    if context is None:
        return list(prompts)
    doubled = [*prompts, *prompts]
    made: list[list[int]] = []
    for i in range(len(prompts)):
        tokens: list[int] = []
        following: Any = iter(doubled[i:])
        while len(tokens) < context:
            tokens += next(following, prompts[0])
        made.append(tokens[:context])
    return made
