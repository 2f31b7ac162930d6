"""Measure a saved pair in real generation, against the target's own greedy text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from torch import Tensor
from transformers import Qwen3ForCausalLM

Track = Callable[[Iterable[Any], str], Iterable[Any]]


@dataclass
class Generation:
    """New ids of every prompt and the tokens committed in every round."""

    ids: list[Tensor]
    rounds: list[int]
    seconds: float

    @property
    def tau(self) -> float:
        return sum(self.rounds) / len(self.rounds)


def speculative(
    target: Qwen3ForCausalLM,
    drafter: DFlashDraftModel,
    prompts: Iterable[Tensor],
    new_tokens: int,
    temperature: float = 0.0,
    block: int | None = None,
) -> Generation:
    """Run the reference decoder past end tokens. A round commits 1 to `block` tokens."""
    if target.device.type == "cpu":
        # The statistics of dflash 0.1.0 call CUDA's clock.
        dflash.model._cuda_time = time.perf_counter
    result = Generation([], [], 0.0)
    began = time.perf_counter()
    for prompt in prompts:
        output = dflash_generate(
            drafter,
            target,
            prompt[None].to(target.device),
            new_tokens,
            None,
            temperature=temperature,
            block_size=block,
            return_stats=True,
        )
        result.ids.append(output.output_ids[0, len(prompt) :].cpu())
        result.rounds += output.acceptance_lengths
    result.seconds = time.perf_counter() - began
    return result


@torch.inference_mode()
def autoregressive(
    target: Qwen3ForCausalLM, prompts: Iterable[Tensor], new_tokens: int
) -> Generation:
    """Run greedy `generate` of Transformers past end tokens."""
    target.generation_config.eos_token_id = None
    result = Generation([], [], 0.0)
    began = time.perf_counter()
    for prompt in prompts:
        ids = prompt[None].to(target.device)
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        result.ids.append(output[0, len(prompt) :].cpu())
        result.rounds += [1] * new_tokens
    result.seconds = time.perf_counter() - began
    return result


def distinct(ids: Tensor, width: int = 8) -> float:
    """Return the share of distinct `width`-grams: 1 is text that never repeats itself."""
    grams = [tuple(gram) for gram in ids.unfold(0, width, 1).tolist()]
    return len(set(grams)) / len(grams)


def shares(rounds: list[int], block: int) -> list[float]:
    """Return the share of rounds that committed 1 to `block` tokens."""
    counts = Counter(rounds)
    return [round(counts[length] / len(rounds), 4) for length in range(1, block + 1)]


def tau_where(generation: Generation, new_tokens: int, keep: list[bool]) -> float | None:
    """Return tau over the prompts in `keep`; rounds are cut at a prompt's token limit."""
    kept: list[int] = []
    rounds = iter(generation.rounds)
    for wanted in keep:
        # The first token of a prompt comes from prefill, not from a round.
        left = new_tokens - 1
        while left > 0:
            length = next(rounds)
            left -= length
            if wanted:
                kept.append(length)
    return round(sum(kept) / len(kept), 3) if kept else None


def measure(
    target: Qwen3ForCausalLM,
    drafter: DFlashDraftModel,
    prompts: list[Tensor],
    new_tokens: int,
    track: Track,
) -> dict[str, Any]:
    block = drafter.block_size
    plain = autoregressive(target, track(prompts, "greedy, target alone"), new_tokens)
    fast = speculative(target, drafter, track(prompts, "greedy, pair"), new_tokens)
    torch.manual_seed(0)
    warm = speculative(target, drafter, track(prompts, "temperature 0.8"), new_tokens, 0.8)
    same = [bool(torch.equal(a, b)) for a, b in zip(plain.ids, fast.ids, strict=True)]
    variety = [distinct(ids) for ids in plain.ids]
    by_block = {}
    for width in range(2, block):
        label = f"greedy, block {width}"
        cut = speculative(target, drafter, track(prompts, label), new_tokens, block=width)
        by_block[width] = round(cut.tau, 3)
    return {
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "tau": round(fast.tau, 3),
        "tau_temperature_0.8": round(warm.tau, 3),
        "identical_to_greedy": sum(same),
        "rounds": len(fast.rounds),
        "share_of_rounds_by_length": shares(fast.rounds, block),
        "tau_by_block": by_block | {block: round(fast.tau, 3)},
        "distinct_8_grams_mean": round(sum(variety) / len(variety), 3),
        "prompts_without_loops": sum(value > 0.8 for value in variety),
        "tau_without_loops": tau_where(fast, new_tokens, [value > 0.8 for value in variety]),
        "seconds_target_alone": round(plain.seconds, 1),
        "seconds_pair": round(fast.seconds, 1),
    }
