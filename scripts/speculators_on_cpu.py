"""Train a drafter for the pycode target with `speculators`, on a CPU and in small.

    python scripts/speculators_on_cpu.py WORK [--texts 2000] [--epochs 6]

Run it in an environment of its own with `speculators` 0.9.0. It goes the way of
docs/models.md: texts that the target wrote, `speculators prepare-data`, hidden states,
`speculators train`. Two steps need a GPU and stand here as what they do: vLLM's hidden states come
from transformers, in the files that vLLM's connector writes, and the trainer's device is the CPU.
The drafter is in WORK/drafter.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import load_from_disk
from safetensors.torch import save_file
from speculators.train import trainer
from speculators.train.cli import main as train
from speculators.train.config import TrainConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PYCODE = Path(__file__).parents[1] / "examples/pycode"
sys.path.insert(0, str(PYCODE))
from corpus import PROMPT, is_held_out, read_files  # noqa: E402

TAPS = (2, 4, 6, 7)  # speculators counts the layers that came before: 2 is after the second
MASK_ID = 1
NEW_TOKENS = 192
WINDOW = 400  # characters, mostly more than PROMPT tokens
BATCH = 100
SEQUENCE = PROMPT + NEW_TOKENS


def prompts(count: int) -> Tensor:
    """Return ids `[count, PROMPT]` from files that no held-out prompt comes from."""
    tokenizer = AutoTokenizer.from_pretrained(PYCODE / "target")
    texts = [text for name, text in read_files().items() if not is_held_out(name)]
    draw = random.Random(0)
    windows = [draw.choice(texts) for _ in range(2 * count)]
    starts = [draw.randrange(max(1, len(text) - WINDOW)) for text in windows]
    parts = [text[start : start + WINDOW] for text, start in zip(windows, starts, strict=True)]
    rows = [tokenizer(part).input_ids[:PROMPT] for part in parts]
    return torch.tensor([row for row in rows if len(row) == PROMPT][:count])


def write_texts(target: PreTrainedModel, count: int, path: Path) -> None:
    """Write rows of `input_ids` and `loss_mask`: prompts, and how the target goes on."""
    with path.open("w", encoding="utf-8") as file:
        for batch in prompts(count).split(BATCH):
            whole = target.generate(
                batch, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
            )
            for row in whole.tolist():
                loss_mask = [0] * PROMPT + [1] * (len(row) - PROMPT)
                print(json.dumps({"input_ids": row, "loss_mask": loss_mask}), file=file)


def write_hidden_states(target: PreTrainedModel, data: Path) -> None:
    """Write `hs_N.safetensors`: states `[tokens, taps + 1, hidden]`, the last before the norm."""
    last: list[Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    folder = data / "hidden_states"
    folder.mkdir()
    number = 0
    for ids in batches(data):
        last.clear()
        states = target(ids, output_hidden_states=True).hidden_states
        stacked = torch.stack([*(states[tap] for tap in TAPS), last[0]], dim=2)
        for row, row_ids in zip(stacked, ids, strict=True):
            content = {"hidden_states": row.contiguous(), "token_ids": row_ids.contiguous()}
            save_file(content, folder / f"hs_{number}.safetensors")
            number += 1


def batches(data: Path) -> Iterator[Tensor]:
    rows = load_from_disk(data).with_format("torch")["input_ids"]
    for start in range(0, len(rows), BATCH):
        yield torch.stack(list(rows[start : start + BATCH]))


def train_on_cpu(data: Path, checkpoints: Path, epochs: int) -> None:
    trainer.get_local_rank = lambda: torch.device("cpu")  # the trainer's device
    trainer.torch.accelerator.synchronize = lambda: None
    options = f"""
        --verifier-name-or-path {PYCODE / "target"} --data-path {data} --save-path {checkpoints}
        --speculator-type dflash --num-layers 3 --block-size 8 --mask-token-id {MASK_ID}
        --target-layer-ids {" ".join(map(str, TAPS))} --full-attention-indices 0 1 2
        --max-anchors 256 --total-seq-len {8 * SEQUENCE} --hidden-states-dtype float32
        --optimizer muon --lr 1e-3 --muon-lr 0.02 --epochs {epochs} --scheduler-type cosine
        --draft-attn-impl sdpa --on-missing raise --num-workers 0 --log-freq 20
        --loss-implementation eager
    """
    sys.argv = ["speculators", *options.split()]
    train(TrainConfig.resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    texts, data = options.work / "texts.jsonl", options.work / "data"
    target = AutoModelForCausalLM.from_pretrained(PYCODE / "target", dtype=torch.float32)
    with torch.inference_mode():
        write_texts(target, options.texts, texts)
        prepare = [Path(sys.executable).with_name("speculators"), "prepare-data"]
        prepare += ["--model", PYCODE / "target", "--data", texts, "--output", data]
        prepare += ["--seq-length", str(SEQUENCE), "--num-preprocessing-workers", "1"]
        subprocess.run(prepare, check=True)
        write_hidden_states(target, data)
    train_on_cpu(data, options.work / "checkpoints", options.epochs)
    shutil.copytree(
        options.work / "checkpoints" / "checkpoint_best",
        options.work / "drafter",
        dirs_exist_ok=True,
    )


if __name__ == "__main__":
    main()
