"""`dflash-trt bench engine`: methods of decoding, measured in turns over the same prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from dflash_trt.bench.passes import Decoder, Pass, run_in_turns
from dflash_trt.bench.results import Cell, Run, SamplingRule, kept_fractions
from dflash_trt.builder import read_manifest
from dflash_trt.config import Speculation
from dflash_trt.decoding import Proposer, Request, SamplingParams, in_process, measure, strategy
from dflash_trt.engines import Engine, load_engine, read_infos
from dflash_trt.errors import RequestError
from dflash_trt.speculation import CostProfile, Fixed

ADAPTIVE = {"adaptive": Speculation(), "adaptive-no-lookup": Speculation(lookup=False)}
METHODS = ("plain", "dflash", *ADAPTIVE, "lookup")
DRAFTS: dict[str, tuple[int | None, ...]] = {"plain": (0,)} | dict.fromkeys(ADAPTIVE, (None,))
WARM_UP_TOKENS = 16
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings to measure: every combination of the lists, `repeats` times."""

    tasks: dict[str, list[list[int]]]  # by task
    max_tokens: int
    methods: Sequence[str]  # besides plain decoding
    draft_tokens: Sequence[int | None]  # for methods not in `DRAFTS`
    batches: Sequence[int]
    rules: Sequence[SamplingRule]
    repeats: int


def sampling_rules(
    temperatures: Sequence[float], top_ps: Sequence[float], top_ks: Sequence[int]
) -> list[SamplingRule]:
    """Return every combination; of greedy texts one, as nothing else changes them."""
    rules = [SamplingRule(*values) for values in product(temperatures, top_ps, top_ks)]
    return [*dict.fromkeys(rule if rule.temperature else SamplingRule() for rule in rules)]


def run_engine(directory: Path, plan: Plan, progress: Progress) -> Run:
    """Measure `plan` on a built directory, with as many threads as it serves with."""
    from dflash_trt.engines.onnxruntime import use_one_pool  # noqa: PLC0415

    manifest = read_manifest(directory)
    if "drafter" not in manifest:
        raise RequestError(
            f"{directory} has no drafter, beside which methods are compared",
            "Build it with speculation.method dflash, or run `dflash-trt bench matrix`",
        )
    threads = read_infos(directory / "engines")[0].cpu_threads
    use_one_pool(threads)
    return Run(
        name=manifest["name"],
        options={
            "max tokens": plan.max_tokens,
            "prompts": sum(map(len, plan.tasks.values())),
            "repeats": plan.repeats,
            "threads": threads,
        },
        cells=list(measure_engine(directory / "engines", plan, progress)),
    )


def measure_engine(engines: Path, plan: Plan, progress: Progress) -> Iterator[Cell]:
    """Yield a cell for each setting; cells of a group come together.

    `engines` holds `target/` and `drafter/`. If the KV entries suffice for all methods at once,
    methods alternate after a few rounds (`passes.run_in_turns`), otherwise after whole passes, so
    that noise of the machine affects all. Raises RequestError for a plan that these engines cannot
    run.
    """
    target = load_engine(engines / "target")
    drafter = load_engine(engines / "drafter")
    check_plan(plan, target, drafter)
    profile = None
    if any(method in ADAPTIVE for method in plan.methods):
        profile = measure(in_process(target, drafter), target.info)
    groups = list(product(plan.tasks.items(), plan.batches, plan.rules))
    passes = 0
    for (task, prompts), batch, rule in groups:
        requests = [
            Request(prompt, plan.max_tokens, SamplingParams(**asdict(rule), seed=i))
            for i, prompt in enumerate(prompts)
        ]
        decoders = []
        for method in dict.fromkeys(["plain", *plan.methods]):
            for drafts in DRAFTS.get(method, plan.draft_tokens):
                cell = Cell(
                    task=task,
                    method=method,
                    draft_tokens=drafts,
                    batch=batch,
                    rule=rule,
                )
                decoders.append(_decoder(cell, target, drafter, profile))
        together = len(decoders) * batch <= target.info.slots
        warm_up = [
            replace(request, max_tokens=min(plan.max_tokens, WARM_UP_TOKENS))
            for request in requests
        ]
        for repeat in range(plan.repeats):
            shift = repeat % len(decoders)
            order = decoders[shift:] + decoders[:shift]
            for i, decoder in enumerate(order):
                # in varying order: the KV entries used change results by a percent or two
                decoder.first_slot = i * batch if together else 0
                if repeat == 0:
                    Pass(decoder, warm_up[: 2 * batch], batch).run()
            taking_turns = [order] if together else [[decoder] for decoder in order]
            for some in taking_turns:
                run_in_turns([Pass(decoder, requests, batch) for decoder in some])
                passes += len(some)
                progress(passes, len(groups) * len(decoders) * plan.repeats)
        for decoder in decoders:
            yield _with_kept_and_identical(decoder, decoders[0])


def check_plan(plan: Plan, target: Engine, drafter: Engine) -> None:
    """Raise RequestError for a setting that these engines do not support."""
    for method in plan.methods:
        if method not in METHODS:
            raise RequestError(f"there is no method {method}", f"Take {', '.join(METHODS)}")
    slots = target.info.slots
    if max(plan.batches) > slots:
        raise RequestError(
            f"--batch {max(plan.batches)} is more than the engines' {slots} slots",
            "Build with a larger serving.slots",
        )
    longest = drafter.info.block_size - 1
    for drafts in plan.draft_tokens:
        if drafts is not None and not 1 <= drafts <= longest:
            raise RequestError(
                f"--draft-tokens {drafts} is not 1 to {longest}, the block size less the anchor",
                "Give a number in that range, or leave it out",
            )


def _decoder(cell: Cell, target: Engine, drafter: Engine, profile: CostProfile | None) -> Decoder:
    speculation = ADAPTIVE.get(cell.method)
    if speculation is not None:
        policy, proposer = strategy(speculation, target.info, profile)
        return Decoder(cell, in_process(target, drafter), policy, proposer, target.info)
    draft_tokens = cell.draft_tokens
    if draft_tokens is None:
        draft_tokens = drafter.info.block_size - 1
    if cell.method == "dflash":
        rounds = in_process(target, drafter)
        return Decoder(cell, rounds, Fixed(draft_tokens), Proposer(), target.info)
    proposer = Proposer()
    if cell.method == "lookup":
        proposer = Proposer(draft_tokens, lookup=True)
    return Decoder(cell, in_process(target, None), Fixed(draft_tokens), proposer, target.info)


def _with_kept_and_identical(decoder: Decoder, plain: Decoder) -> Cell:
    committed: list[int] = []
    identical = 0
    total = 0
    for sequences, plain_sequences in zip(decoder.passes, plain.passes, strict=True):
        for sequence, plain_sequence in zip(sequences, plain_sequences, strict=True):
            committed += sequence.committed_per_round
            identical += sequence.tokens == plain_sequence.tokens
            total += 1
    return replace(decoder.cell, kept=kept_fractions(committed), identical=(identical, total))
