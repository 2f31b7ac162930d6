"""`dflash-trt bench engine`: methods of decoding, measured in turns over the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from math import ceil
from pathlib import Path

from dflash_trt.bench.passes import Decoder, Pass, TimedEngine, run_in_turns
from dflash_trt.bench.results import Cell, kept
from dflash_trt.config import Speculation
from dflash_trt.decoding import DraftModel, Request, SamplingParams, in_process, rounds_with
from dflash_trt.decoding.speculation import Fixed, Proposer, profile_of, strategy
from dflash_trt.engines import Engine
from dflash_trt.errors import RequestError

ADAPTIVE = {
    "adaptive": Speculation(),
    "adaptive-no-lookup": Speculation(lookup=False),
}
METHODS = ("plain", "dflash", *ADAPTIVE, "lookup", "draft-model")
DRAFTS: dict[str, tuple[int | None, ...]] = {"plain": (0,)} | dict.fromkeys(ADAPTIVE, (None,))
WARM_UP_TOKENS = 16
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure: every combination of the lists, `repeats` times."""

    tasks: dict[str, list[list[int]]]  # prompts by task
    max_tokens: int
    staggered: bool = (
        False  # the first texts of a batch end one after another, as those of users do
    )
    methods: tuple[str, ...] = ("plain", "dflash", "adaptive")
    draft_tokens: tuple[int | None, ...] = (None,)  # for methods not in `DRAFTS`
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

    `engines` holds `target/` and `drafter/`. Where their cache rows are enough for all methods at
    once, these take turns of a few rounds (`passes.run_in_turns`), otherwise of whole passes: noise
    of the machine meets all. RequestError for a plan that these engines cannot run.
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
        decoders = [
            _decoder(
                Cell(
                    task=task,
                    method=method,
                    draft_tokens=drafts,
                    batch=batch,
                    context=context,
                    threads=threads,
                    temperature=temperature,
                ),
                *(engines, target, drafter, model),
            )
            for method in plan.methods
            for drafts in DRAFTS.get(method, plan.draft_tokens)
        ]
        together = len(decoders) * batch <= target.info.slots
        warm_up = [replace(r, max_tokens=min(r.max_tokens, WARM_UP_TOKENS)) for r in requests]
        for repeat in range(plan.repeats):
            turn = repeat % len(decoders)
            order = decoders[turn:] + decoders[:turn]
            for i, decoder in enumerate(order):
                # the order changes too: which rows a method has makes a percent or two
                decoder.first_row = i * batch if together else 0
                if repeat == 0:
                    Pass(decoder, warm_up[: 2 * batch], batch).run()
            for some in [order] if together else [[decoder] for decoder in order]:
                run_in_turns([Pass(decoder, requests, batch) for decoder in some])
                passes += len(some)
                progress(passes, len(groups) * len(decoders) * plan.repeats)
        plain = next((each for each in decoders if each.cell.method == "plain"), None)
        for decoder in decoders:
            take(_finished(decoder, plain))


def tokens_of(plan: Plan, batch: int, i: int) -> int:
    """How many tokens the i-th text gets."""
    if not plan.staggered or i >= batch:
        return plan.max_tokens
    return ceil(plan.max_tokens * (i + 1) / batch)


def check_plan(plan: Plan, target: Engine, drafter: Engine, model: Engine | None) -> None:
    """Raise RequestError, naming it, for what these engines cannot do."""
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


def _decoder(
    cell: Cell, engines: Path, target: TimedEngine, drafter: TimedEngine, model: TimedEngine | None
) -> Decoder:
    rounds, used = in_process(target, None), [target]
    if cell.method in ("dflash", *ADAPTIVE):
        rounds, used = in_process(target, drafter), [target, drafter]
    elif model is not None and cell.method == "draft-model":
        rounds, used = rounds_with(target, DraftModel(model)), [target, model]
    if speculation := ADAPTIVE.get(cell.method):
        profile = profile_of(engines, "in_process", rounds, cell.threads)
        return Decoder(cell, rounds, *strategy(speculation, target.info, profile), used)
    drafts = drafter.info.block_size - 1 if cell.draft_tokens is None else cell.draft_tokens
    proposer = Proposer(drafts, lookup=True) if cell.method == "lookup" else Proposer()
    return Decoder(cell, rounds, Fixed(drafts), proposer, used)


def _finished(decoder: Decoder, plain: Decoder | None) -> Cell:
    """The cell with its acceptance by position, and how many texts equal plain decoding's."""
    committed = [n for each in decoder.passes for text in each for n in text.committed_per_round]
    if plain is None:
        return replace(decoder.cell, kept=kept(committed))
    same = [
        own.tokens == its.tokens
        for ours, theirs in zip(decoder.passes, plain.passes, strict=True)
        for own, its in zip(ours, theirs, strict=True)
    ]
    return replace(decoder.cell, kept=kept(committed), identical=(sum(same), len(same)))


def of_length(prompts: Sequence[list[int]], context: int | None) -> list[list[int]]:
    """The prompts, cut or continued with the next ones to `context` tokens; None: as they are."""
    if context is None:
        return list(prompts)
    made: list[list[int]] = []
    for i in range(len(prompts)):
        following = cycle([*prompts[i:], *prompts[:i]])
        tokens: list[int] = []
        while len(tokens) < context:
            tokens = tokens + next(following)
        made.append(tokens[:context])
    return made
