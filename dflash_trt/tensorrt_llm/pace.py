"""How fast each draft length is at each batch size, by the model of `plan`: unmeasured."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import MODELOPT_FILE, read_json
from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.errors import CheckpointError
from dflash_trt.roofline import (
    PLAIN,
    Constants,
    Layout,
    Method,
    ModelSize,
    Runtime,
    Values,
    dflash,
    drafter_size,
    expected_acceptance,
    fastest,
    round_time,
    section,
    target_size,
)
from dflash_trt.tensorrt_llm.case import Case

CONTEXT = 4096  # tokens of a sequence, its prompt included
GAIN = 1.05  # that fewer drafts must bring: the model is no better than that


@dataclass(frozen=True)
class Pace:
    """Rounds of one instance; `method` with all of its drafts."""

    target: ModelSize
    method: Method
    runtime: Runtime
    context: int

    def seconds(self, rows: int, drafts: int) -> float:
        """Of a round of `rows` sequences; 0 drafts: of plain decoding."""
        method = self.method.shortened(drafts) if drafts else PLAIN
        return round_time(self.target, method, self.runtime, rows, self.context).seconds

    def rate(self, rows: int, drafts: int) -> float:
        """Tokens/s of each sequence."""
        return self.method.shortened(drafts).acceptance / self.seconds(rows, drafts)

    def best(self, rows: int) -> int:
        """Drafts of the fastest rounds."""
        return fastest(self.target, self.method, self.runtime, rows, self.context)[0].draft_tokens


def pace(case: Case, chosen: Mapping[str, Any]) -> Pace:
    """Of what is chosen; NotKnown where a config.json does not state the sizes."""
    drafts = chosen["speculative_config.max_draft_len"]
    values = target_values(case.target.directory, case.target.values)
    try:
        target = target_size(values)
        drafter = drafter_size(case.drafter.values, target)
    except CheckpointError as error:
        raise NotKnown(str(error)) from None
    tau, _ = expected_acceptance(case.config.drafter.hub or "", drafts)
    return Pace(
        target,
        dflash(drafter, tau, drafts),
        Runtime(
            case.gpu,
            layout_of(chosen),
            Constants.fitted(),
            kv_bytes=kv_bytes(values, chosen["kv_cache_config.dtype"]),
        ),
        min(CONTEXT, chosen["max_seq_len"] or CONTEXT),
    )


def schedule(rounds: Pace, largest: int) -> dict[int, int]:
    """Draft lengths by the batch size that they go up to: all drafts at first, then falling.

    A small batch gets as many as any larger one wants: lengths must fall upstream.
    """
    sizes = _sizes(largest)
    best = [rounds.best(rows) for rows in sizes]
    found, drafts = {}, rounds.method.draft_tokens
    for i, rows in enumerate(sizes):
        fewer = max(best[i:])
        if i and rounds.rate(rows, fewer) > GAIN * rounds.rate(rows, drafts):
            drafts = fewer
        found[drafts] = rows
    return {rows: drafts for drafts, rows in found.items()}


def pays_from(rounds: Pace, largest: int) -> float:
    """The share of drafts to accept with which rounds gain on plain decoding at some batch size.

    1 + share * drafts tokens a round are worth seconds(drafts) / seconds(0) plain ones.
    """
    drafts = rounds.method.draft_tokens
    ratios = [rounds.seconds(n, drafts) / rounds.seconds(n, 0) for n in _sizes(largest)]
    return (min(ratios) - 1) / drafts


def _sizes(largest: int) -> list[int]:
    """1, 2, 4, .. and the largest."""
    return [1 << n for n in range((largest - 1).bit_length())] + [largest]


def target_values(directory: Path, values: Values) -> Values:
    """config.json, with what ModelOpt writes beside it about the quantisation."""
    if not (file := directory / MODELOPT_FILE).is_file():
        return values
    more = section(read_json(file), "quantization")
    return {**values, "quantization_config": more | section(values, "quantization_config")}


def kv_bytes(values: Values, dtype: object) -> float:
    """Bytes of a number in the target's KV cache; dtype: of kv_cache_config."""
    if dtype == "auto":
        dtype = section(values, "quantization_config").get("kv_cache_quant_algo")
    return {"fp8": 1.0, "nvfp4": 0.5 + 1 / 16}.get(str(dtype).lower(), 2.0)


def layout_of(args: Mapping[str, Any]) -> Layout:
    return Layout(
        args["tensor_parallel_size"],
        attention_dp=bool(args["enable_attention_dp"]),
        experts_parallel=(args["moe_expert_parallel_size"] or 1) > 1,
    )
