"""Tau of the drafter on held-out chat prompts and on HumanEval, by z-lab's own decoder, whether its
texts are greedy ones of Transformers, and whether a build decodes the same in the same rounds.

Every prompt's result is a line of `--results`; what is there of the same drafter is not measured
again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash.model
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, dflash_generate
from model import DRAFTS
from safetensors.torch import load_file
from torch import Tensor, nn
from train import HELD_OUT_TOKENS, held_out
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3Config

from dflash_trt.decoding import Proposer, Request, Scheduler, in_process
from dflash_trt.engines import load_engines
from dflash_trt.files import sha256_of_concatenated
from dflash_trt.speculation import Fixed

Text = dict[str, Any]  # its ids, and how many of them each round brought


def load_drafter(folder: Path, target: LlamaForCausalLM) -> DFlash2DraftModel:
    """Load for z-lab's decoder: tokens that the drafter cannot propose have no chance."""
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layer = stored["transformer_layer_config"]
    del layer["model_type"]
    names = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
    own = {name: stored[name] for name in (*names, "block_size", "mask_token_id")}
    own["target_layer_ids"] = [layer - 1 for layer in stored["aux_hidden_state_layer_ids"]]
    drafter = DFlash2DraftModel(Qwen3Config(**layer, dflash_config=own))
    tensors = load_file(folder / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    head = tensors["lm_head.weight"].float()
    names = {name: name.replace("_codebook.weight", "_codebook") for name in drafter.state_dict()}
    drafter.load_state_dict({name: tensors[key] for name, key in names.items()})

    def logits(hidden: Tensor, _: nn.Module) -> Tensor:
        whole = torch.full((*hidden.shape[:-1], target.config.vocab_size), -torch.inf)
        whole[..., ids] = hidden @ head.T
        return whole

    drafter.compute_logits = logits
    return drafter


@torch.inference_mode()
def decode(
    target: LlamaForCausalLM, drafter: DFlashDraftModel, prompt: list[int], end: int
) -> Text:
    """Decode by z-lab's loop to `end` or HELD_OUT_TOKENS tokens.

    greedy: each token is the likeliest by Transformers' logits of all before it.
    """
    dflash.model._cuda_time = time.perf_counter  # dflash 0.1.0 calls CUDA's clock
    output = dflash_generate(
        drafter,
        target,
        torch.tensor([prompt]),
        HELD_OUT_TOKENS,
        [end],
        temperature=0,
        return_stats=True,
    )
    whole = output.output_ids
    ids = whole[0, len(prompt) :].tolist()
    likeliest = target(whole).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    return {"ids": ids, "rounds": output.acceptance_lengths, "greedy": ids == likeliest}


def decoder_of(build: Path, end: int) -> Callable[[list[int]], Text]:
    """Return a decoder on our engines that verifies whole blocks, as z-lab's does."""
    target, drafter = load_engines(build / "engines")
    longest = target.info.max_seq_len
    scheduler = Scheduler(
        in_process(target, drafter),
        slots=1,
        max_seq_len=longest,
        prefill_chunk=longest,
        policy=Fixed(DRAFTS),
        proposer=Proposer(),
    )

    def decode(prompt: list[int]) -> Text:
        sequence = scheduler.submit(Request(prompt, HELD_OUT_TOKENS, stop_ids=frozenset([end])))
        while scheduler.has_work:
            scheduler.step()
        return {"ids": sequence.tokens, "rounds": sequence.committed_per_round}

    return decode


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"prompts": len(results)}
    for decoder in ("z-lab", "build"):
        rounds = [n for each in results if decoder in each for n in each[decoder]["rounds"]]
        if rounds:
            found[f"tau, {decoder}"] = round(sum(rounds) / len(rounds), 3)
    found["greedy by transformers"] = sum(each["z-lab"]["greedy"] for each in results)
    both = [each for each in results if "build" in each]
    for key in ("ids", "rounds"):
        found[f"same {key}"] = sum(each["z-lab"][key] == each["build"][key] for each in both)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--build", type=Path, help="a build of the pair, in float32")
    parser.add_argument("--people", type=Path, help="what people.py wrote: measured, too")
    parser.add_argument("--results", type=Path, default=Path("measured.jsonl"))
    parser.add_argument("--every", type=int, default=1, help="measure every so many prompts")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    end = tokenizer.eos_token_id
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    drafter = load_drafter(options.drafter, target).eval()
    ours = decoder_of(options.build, end) if options.build else None
    digest = sha256_of_concatenated([options.drafter / "model.safetensors"])
    options.results.touch()
    kept = [json.loads(line) for line in options.results.read_text().splitlines()]
    known = {
        (each["set"], each["prompt"]): each
        for each in kept
        if each["drafter"] == digest and (ours is None or "build" in each)
    }
    for name, prompts in held_out(tokenizer, options.people).items():
        results = []
        for i in range(0, len(prompts), options.every):
            found = known.get((name, i))
            if found is None:
                prompt = prompts[i]
                found = {"set": name, "prompt": i, "drafter": digest}
                found["z-lab"] = decode(target, drafter, prompt, end)
                if ours:
                    found["build"] = ours(prompt)
                with options.results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            results.append(found)
        print(json.dumps({name: summary(results)}), flush=True)


if __name__ == "__main__":
    main()
