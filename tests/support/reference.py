"""What the tests hold our engine against: `transformers` and z-lab's `dflash`, fp32 on the CPU."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dflash.model as zlab
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.pairs import zlab_drafter

# return_stats=True would call torch.cuda.synchronize()
zlab._cuda_time = time.perf_counter


@dataclass(frozen=True)
class Generated:
    """One prompt's new tokens and, with speculation, the tokens each round committed."""

    tokens: list[int]
    acceptance_lengths: list[int]


@functools.lru_cache(maxsize=4)
def load_target(target_dir: Path) -> PreTrainedModel:
    """Load the target in float32; an end-of-text token never ends a text."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@functools.lru_cache(maxsize=4)
def load_drafter(drafter_dir: Path) -> zlab.DFlashDraftModel:
    return zlab_drafter(drafter_dir).eval()


@torch.inference_mode()
def greedy(target_dir: Path, prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
    """Run `transformers` greedy `generate`, batching prompts of one length: no padding."""
    model = load_target(target_dir)
    texts: list[list[int]] = [[] for _ in prompts]
    for length in {len(prompt) for prompt in prompts}:
        same = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([list(prompts[i]) for i in same])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new,
            min_new_tokens=max_new,
            pad_token_id=0,
        )
        for i, row in zip(same, output[:, length:].tolist(), strict=True):
            assert len(row) == max_new
            texts[i] = row
    return texts


def dflash_generate(
    target_dir: Path, drafter_dir: Path, prompts: Sequence[Sequence[int]], max_new: int
) -> list[Generated]:
    """Run z-lab's own greedy loop prompt by prompt; acceptance lengths count the bonus token."""
    target, drafter = load_target(target_dir), load_drafter(drafter_dir)
    results = []
    for prompt in prompts:
        stats = zlab.dflash_generate(
            drafter,
            target=target,
            input_ids=torch.tensor([list(prompt)]),
            max_new_tokens=max_new,
            stop_token_ids=None,
            return_stats=True,
        )
        tokens = stats.output_ids[0, len(prompt) :].tolist()
        assert len(tokens) == 1 + sum(stats.acceptance_lengths)
        results.append(Generated(tokens, list(stats.acceptance_lengths)))
    return results


@torch.inference_mode()
def target_logits_and_taps(
    target_dir: Path, tokens: Sequence[int], taps: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 logits `[N, vocab]` and taps `[N, n * hidden]` of one text, no cache."""
    output = load_target(target_dir)(torch.tensor([list(tokens)]), output_hidden_states=True)
    features = zlab.extract_context_feature(output.hidden_states, list(taps))
    return output.logits[0].numpy(), features[0].numpy()


@torch.inference_mode()
def drafter_logits(
    target_dir: Path,
    drafter_dir: Path,
    tokens: Sequence[int],
    starts: Sequence[int],
    block_size: int | None = None,
    first: int = 1,
) -> list[np.ndarray]:
    """Return z-lab's draft logits, float32 `[B - 1, vocab]`, after each anchor of `starts`.

    first: the block row of the first draft (0: speculators' sample_from_anchor).
    """
    drafter, head = load_drafter(drafter_dir), zlab._output_head(load_target(target_dir))
    states = drafter_states(target_dir, drafter_dir, tokens, starts, block_size, first)
    return [drafter.compute_logits(each, head).numpy() for each in states]


@torch.inference_mode()
def drafter_states(
    target_dir: Path,
    drafter_dir: Path,
    tokens: Sequence[int],
    starts: Sequence[int],
    block_size: int | None = None,
    first: int = 1,
) -> list[torch.Tensor]:
    """Return the hidden states, float32 `[B - 1, hidden]`, that give `drafter_logits`.

    The drafter's cache grows as in generation: features between two anchors are injected at the
    second one, and the block's own rows are removed.
    """
    target, drafter = load_target(target_dir), load_drafter(drafter_dir)
    width = drafter.block_size if block_size is None else block_size
    text = torch.tensor([list(tokens)])
    hidden = target(text, output_hidden_states=True).hidden_states
    features = zlab.extract_context_feature(hidden, drafter.target_layer_ids)
    cache = zlab._make_cache(drafter.config)
    positions = torch.arange(len(tokens) + width)[None]
    scale = float(zlab._draft_value(drafter.config, "input_embedding_scale", 1.0))
    found, seen = [], 0
    for start in starts:
        block = torch.full((1, width), drafter.mask_token_id)
        block[0, 0] = text[0, start]
        states = drafter(
            target_hidden=features[:, seen:start],
            noise_embedding=zlab._raw_input_embeddings(target, block, scale),
            position_ids=positions[:, seen : start + width],
            past_key_values=cache,
            use_cache=True,
        )
        zlab._crop_to(cache, start)
        seen = start
        found.append(states[0, first:])
    return found


@torch.inference_mode()
def selector_probs(
    target_dir: Path, drafter_dir: Path, states: torch.Tensor, before: Sequence[int]
) -> np.ndarray:
    """Return what DFlash 2's selector draws from, float32 `[N, vocab]`, for states `[N, hidden]`.

    before: the token before each of them.
    """
    drafter, head = load_drafter(drafter_dir), zlab._output_head(load_target(target_dir))
    logits = drafter.compute_logits(states, head)
    _, candidates, probs = drafter.candidate_selector.select(
        states[:, None], logits[:, None], torch.tensor(before), 1.0
    )
    return torch.zeros_like(logits).scatter(-1, candidates[:, 0], probs[:, 0]).numpy()


def round_lengths(
    target_dir: Path,
    drafter_dir: Path,
    prompt: Sequence[int],
    greedy_text: Sequence[int],
    drafts: int,
    first: int = 1,
    tokens: Sequence[int] | None = None,
) -> list[int]:
    """Return the tokens of each round if `drafts` of z-lab's block are kept.

    first: see `drafter_logits`; tokens: the only ones that can be drafted, by default all.
    greedy_text: the target's continuation of `prompt`. As in z-lab's loop the last blocks are cut
    to the tokens still wanted.
    """
    text = [*prompt, *greedy_text]
    block_size = load_drafter(drafter_dir).block_size
    lengths, start = [], len(prompt)
    while start + 1 < len(text):
        width = min(block_size, len(text) - start - 1 + first)
        (logits,) = drafter_logits(
            target_dir, drafter_dir, text[: start + 1], [start], width, first
        )
        drafted = np.arange(logits.shape[-1]) if tokens is None else np.array(tokens)
        best = drafted[logits[:, drafted].argmax(-1)]
        pairs = zip(best[:drafts], text[start + 1 :], strict=False)
        same = [draft == token for draft, token in pairs]
        accepted = same.index(False) if False in same else len(same)
        lengths.append(min(accepted + 1, len(text) - 1 - start))
        start += lengths[-1]
    return lengths
