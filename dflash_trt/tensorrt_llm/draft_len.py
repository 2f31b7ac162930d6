"""How fast each draft length is at each batch size, by the model of `plan`: unmeasured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.planning import (
    PLAIN,
    Constants,
    Layout,
    Method,
    ModelSize,
    Runtime,
    Values,
    dflash,
    expected_acceptance,
    fastest,
    round_time,
    section,
)
from dflash_trt.tensorrt_llm.context import Context

CONTEXT = 4096  # tokens of a sequence, its prompt included
GAIN = 1.05  # that fewer drafts must bring: the model is no better than that


@dataclass(frozen=True)
class Rounds:
    """Rounds of one instance; `method` with all of its drafts."""

    target: ModelSize
    method: Method
    runtime: Runtime
    context: int  # tokens of each sequence

    def seconds(self, rows: int, drafts: int) -> float:
        """Seconds of a round of `rows` sequences; 0 drafts: of plain decoding."""
        method = self.method.shortened(drafts) if drafts else PLAIN
        return round_time(self.target, method, self.runtime, rows, self.context).seconds

    def rate(self, rows: int, drafts: int) -> float:
        """Tokens/s of each sequence."""
        return self.method.shortened(drafts).acceptance / self.seconds(rows, drafts)


def rounds_of(context: Context, chosen: Mapping[str, Any]) -> Rounds:
    """The rounds of what is chosen; NotKnown where a config.json does not state the sizes."""
    drafts = chosen["speculative_config.max_draft_len"]
    target, drafter = context.sizes
    drafter_at = context.config.drafter
    tau, _ = expected_acceptance((drafter_at and drafter_at.hub) or "", drafts)
    cached = kv_bytes(context.target_values, chosen["kv_cache_config.dtype"])
    return Rounds(
        target,
        dflash(drafter, tau, drafts),
        Runtime(context.gpu, layout_of(chosen), Constants.fitted(), kv_bytes=cached),
        min(CONTEXT, chosen["max_seq_len"] or CONTEXT),
    )


def schedule(rounds: Rounds, max_batch_size: int) -> dict[int, int]:
    """Draft lengths by the batch size that they go up to: all drafts at first, then falling.

    A small batch gets as many as any larger one wants: lengths must fall upstream.
    """
    sizes = _batch_sizes(max_batch_size)
    best = [
        fastest(rounds.target, rounds.method, rounds.runtime, rows, rounds.context)[0].draft_tokens
        for rows in sizes
    ]
    found, drafts = {}, rounds.method.draft_tokens
    for i, rows in enumerate(sizes):
        fewer = max(best[i:])
        if i and rounds.rate(rows, fewer) > GAIN * rounds.rate(rows, drafts):
            drafts = fewer
        found[drafts] = rows
    return {rows: drafts for drafts, rows in found.items()}


def pays_from(rounds: Rounds, max_batch_size: int) -> float:
    """The share of drafts to accept with which rounds gain on plain decoding at some batch size.

    1 + share * drafts tokens a round are worth seconds(drafts) / seconds(0) plain ones.
    """
    drafts = rounds.method.draft_tokens
    sizes = _batch_sizes(max_batch_size)
    return (min(rounds.seconds(n, drafts) / rounds.seconds(n, 0) for n in sizes) - 1) / drafts


def _batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, .. and the largest."""
    return [1 << n for n in range((largest - 1).bit_length())] + [largest]


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
