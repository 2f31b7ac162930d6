"""Time what people run without a server: `python tests/gpu/others.py FOLDER RESULTS`.

transformers' `generate`, eager and with a static cache and `torch.compile`, and z-lab's
`dflash_generate`, on the checkpoints of `sizes.py` (whose weights are 0, which changes no time).
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROMPT, TOKENS = 512, 48


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time of the second run, and its result."""
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def generate_ms(model: Any, **options: Any) -> float:
    """Return milliseconds a token of `generate`, without the prompt's."""
    ids = torch.arange(PROMPT, device="cuda")[None]

    def run(tokens: int) -> float:
        same = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        took, _ = seconds(lambda: model.generate(ids, pad_token_id=0, **same, **options))
        return took

    few = 8
    return 1e3 * (run(TOKENS) - run(few)) / (TOKENS - few)


def dflash_ms(model: Any, directory: Path) -> float:
    """Return milliseconds a round of z-lab's `dflash_generate`."""
    import dflash.model as zlab  # noqa: PLC0415

    drafter = zlab.DFlashDraftModel.from_pretrained(directory, dtype=torch.bfloat16).cuda().eval()
    ids = torch.arange(PROMPT, device="cuda")[None]
    took, stats = seconds(
        lambda: zlab.dflash_generate(
            drafter,
            target=model,
            input_ids=ids,
            max_new_tokens=20 * drafter.block_size,
            stop_token_ids=None,
            return_stats=True,
        )
    )
    return 1e3 * took / len(stats.acceptance_lengths)


@torch.inference_mode()
def main(folder: Path, results: Path) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    load = AutoModelForCausalLM.from_pretrained
    model = load(folder / "target", dtype=torch.bfloat16).cuda().eval()
    model.generation_config.eos_token_id = None
    ways: dict[str, Callable[[], float]] = {
        "transformers, ms a token": lambda: generate_ms(model),
        "z-lab, ms a round": lambda: dflash_ms(model, folder / "drafter"),
        "transformers with a static cache, compiled, ms a token": lambda: generate_ms(
            model, cache_implementation="static"
        ),
    }
    found: dict[str, float | str] = {}
    for name, way in ways.items():
        try:
            found[name] = way()
        except Exception as error:  # another one's program: what it says is the result
            found[name] = repr(error)
        results.write_text(json.dumps(found, indent=1))  # if the next is not done in time


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
