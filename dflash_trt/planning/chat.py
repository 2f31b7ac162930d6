"""What each turn of a chat waits for its first token, with and without prefix reuse."""

from collections.abc import Iterator
from typing import Any

from dflash_trt.planning.curves import Deployment
from dflash_trt.roofline import Constants, Runtime, prefill_time
from dflash_trt.tensorrt_llm import LlmArgs, layout_of, recompute_tail

# tokens: a system prompt, and what a turn adds to it
SYSTEM, QUESTION, ANSWER = 2000, 100, 400
TURNS = (1, 2, 3, 5, 10, 20)


def chat(deployment: Deployment, args: LlmArgs) -> dict[str, Any]:
    """One chat alone in the layout that `build` takes; seconds to the first token by turn.

    "on" says whether the build reuses prompts; where it does not, what it would bring.
    """
    tail = args.value("speculative_config.context_recompute_tail") or recompute_tail(
        deployment.drafter
    )
    return {
        "system": SYSTEM,
        "question": QUESTION,
        "answer": ANSWER,
        "layout": str(layout_of(args.model_dump())),
        "on": args.kv_cache_config.enable_block_reuse,
        "tail": tail,
        "turns": list(_turns(deployment, args, tail)),
    }


def _turns(deployment: Deployment, args: LlmArgs, tail: int) -> Iterator[dict[str, Any]]:
    layout = layout_of(args.model_dump())
    runtime = Runtime(
        deployment.machine.gpu, layout, Constants.fitted(), kv_bytes=deployment.kv_bytes
    )
    chunk, block = args.max_num_tokens or 8192, args.kv_cache_config.tokens_per_block

    def seconds(prompt: int, cached: int) -> float:
        found = prefill_time(
            deployment.target, deployment.drafter, runtime, prompt - cached, cached, chunk
        )
        return found.seconds

    for turn in TURNS:
        prompt = SYSTEM + (turn - 1) * (QUESTION + ANSWER) + QUESTION
        if args.max_seq_len is not None and prompt + ANSWER > args.max_seq_len:
            return
        # whole blocks, of which upstream claims none that the tail begins in
        known = prompt - QUESTION if turn > 1 else 0
        cached = max(0, min(known, prompt - tail)) // block * block
        yield {
            "turn": turn,
            "prompt": prompt,
            "computed": prompt - cached,
            "without_reuse": seconds(prompt, 0),
            "with_reuse": seconds(prompt, cached),
        }
