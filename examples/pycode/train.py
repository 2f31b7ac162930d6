"""Train the demo pair from nothing: tokenizer, target, rollouts, drafter, evaluation.

Every stage leaves a file in the work folder and is skipped when that file exists, so an
interrupted run goes on where it stopped. Steps are counted, not minutes: one seed, one result.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import measure
import torch
from dflash.model import DFlashDraftModel
from drafter import draft_config, draft_loss, grow, save_drafter, start_from_target
from muon import Optimizer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rollout import roll_out
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

console = Console()


@dataclass
class Cycle:
    """One cosine cycle of drafter training; the next one starts from its result."""

    steps: int
    layers: int
    aware: float  # share of the loss weights that follows the expected number of rounds


@dataclass
class Settings:
    """Everything a run depends on."""

    work: Path
    output: Path
    device: str
    seed: int = 1
    vocab_size: int = 512
    hidden: int = 192
    layers: int = 8
    feed_forward: int = 512
    taps: list[int] = field(default_factory=lambda: [1, 3, 5, 6])
    block_size: int = 8
    batch_tokens: int = 5120
    target_steps: int = 1200
    rollouts: int = 8192
    rollout_batch: int = 256
    new_tokens: int = 192
    draft_cycles: list[Cycle] = field(
        default_factory=lambda: [Cycle(3600, layers=2, aware=0.0), Cycle(1200, layers=3, aware=0.5)]
    )
    draft_batch: int = 16
    anchors: int = 32


def progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        refresh_per_second=1,
    )


def seeded(settings: Settings, stage: int) -> torch.Generator:
    """Return a new generator per stage, so that a resumed run draws the same numbers."""
    torch.manual_seed(settings.seed + stage)
    return torch.Generator().manual_seed(settings.seed + stage)


def on_device(model: Qwen3ForCausalLM, settings: Settings) -> Qwen3ForCausalLM:
    # Moves in place. The method of Transformers' own class is decorated and loses its type.
    torch.nn.Module.to(model, settings.device)
    return model


def build_tokenizer(settings: Settings) -> None:
    files = corpus.read_files()
    train = [text for name, text in files.items() if not corpus.is_held_out(name)]
    held_out = [text for name, text in files.items() if corpus.is_held_out(name)]
    tokenizer = corpus.train_tokenizer(train, settings.vocab_size)
    assert all(tokenizer.decode(tokenizer.encode(text).ids) == text for text in held_out)
    ids = {
        "train": corpus.encode_files(tokenizer, train),
        "held_out": corpus.encode_files(tokenizer, held_out),
    }
    console.print(f"{len(train)} training files, {len(ids['train']):,} tokens")
    console.print(f"{len(held_out)} held-out files, {len(ids['held_out']):,} tokens")
    corpus.write_tokenizer(tokenizer, settings.work, 1024)
    save_file(ids, settings.work / "ids.safetensors")


def target_config(settings: Settings) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=settings.feed_forward,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=corpus.END_ID,
        pad_token_id=corpus.END_ID,
    )


def next_token_loss(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.inference_mode()
def held_out_loss(model: Qwen3ForCausalLM, ids: Tensor, rows: int = 64) -> float:
    """Return nats per token on evenly spread windows of 256 held-out tokens."""
    starts = torch.linspace(0, len(ids) - 257, rows).long()
    batches = corpus.windows(ids, starts, 257).to(model.device).split(16)
    return float(torch.stack([next_token_loss(model, batch) for batch in batches]).mean())


def train_target(settings: Settings) -> None:
    generator = seeded(settings, 1)
    ids = load_file(settings.work / "ids.safetensors")
    model = on_device(Qwen3ForCausalLM(target_config(settings)), settings)
    optimizer = Optimizer(model, settings.target_steps)
    console.print(f"target: {sum(p.numel() for p in model.parameters()):,} parameters")
    # Short sequences are cheaper; the last part learns positions up to 512.
    long_from = int(0.85 * settings.target_steps)
    with progress() as bar:
        task = bar.add_task("target", total=settings.target_steps, note="")
        for step in range(settings.target_steps):
            length = 512 if step >= long_from else 256
            rows = settings.batch_tokens // length
            starts = torch.randint(len(ids["train"]) - length, (rows,), generator=generator)
            batch = corpus.windows(ids["train"], starts, length + 1).to(settings.device)
            loss = next_token_loss(model, batch)
            optimizer.step(loss)
            bar.update(task, advance=1, note=f"loss {loss.item():.3f}")
            if (step + 1) % 100 == 0 or step + 1 == settings.target_steps:
                held_out = held_out_loss(model, ids["held_out"])
                console.print(f"step {step + 1}: held-out loss {held_out:.4f}")
    save_target(model, settings.work / "target")


def save_target(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Round to bfloat16 and save; from here on everything uses the rounded weights."""
    model.bfloat16().save_pretrained(folder)


def load_target(settings: Settings) -> Qwen3ForCausalLM:
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(
        settings.work / "target", dtype=torch.float32
    )
    model.eval().requires_grad_(False)
    return on_device(model, settings)


def prompt_starts(settings: Settings, ids: Tensor, generator: torch.Generator) -> Tensor:
    """Choose half of them at unindented lines, as the held-out prompts, half anywhere."""
    tokenizer = Tokenizer.from_file(str(settings.work / "tokenizer.json"))
    lines = corpus.line_starts(tokenizer, ids)
    half = settings.rollouts // 2
    anywhere = torch.randint(len(ids) - corpus.PROMPT, (settings.rollouts - half,),
                             generator=generator)  # fmt: skip
    some = lines[torch.randint(len(lines), (half,), generator=generator)]
    both = torch.cat([some, anywhere])
    return both[torch.randperm(len(both), generator=generator)]


def half_file(settings: Settings, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a half-precision tensor in a file: features and logits need not fit in memory."""
    path = str(settings.work / name)
    size = torch.Size(shape).numel()
    return torch.from_file(path, shared=True, size=size, dtype=torch.half).view(shape)


def rollout_files(settings: Settings) -> tuple[Tensor, Tensor]:
    """Return features and logits of every rollout, one row per position."""
    rows = (settings.rollouts, corpus.PROMPT + settings.new_tokens - 1)
    features = half_file(settings, "features.f16", (*rows, len(settings.taps) * settings.hidden))
    logits = half_file(settings, "logits.f16", (*rows, settings.vocab_size))
    return features, logits


def make_rollouts(settings: Settings) -> None:
    """Let the target continue training prompts: three in four greedily, one at 0.6 to 1."""
    generator = seeded(settings, 2)
    model = load_target(settings)
    corpus_ids = load_file(settings.work / "ids.safetensors")["train"]
    starts = prompt_starts(settings, corpus_ids, generator)
    prompts = corpus.windows(corpus_ids, starts, corpus.PROMPT)
    features, logits = rollout_files(settings)
    rows = []
    with progress() as bar:
        task = bar.add_task("rollouts", total=settings.rollouts, note="")
        for begin in range(0, settings.rollouts, settings.rollout_batch):
            part = slice(begin, begin + settings.rollout_batch)
            count = len(prompts[part])
            warm = 0.6 + 0.4 * torch.rand(count, generator=generator)
            temperatures = torch.where(torch.arange(count) % 4 == 0, warm, 0.0)
            rollout = roll_out(
                model, prompts[part], settings.new_tokens, temperatures, settings.taps, generator
            )
            features[part], logits[part] = rollout.features, rollout.logits
            rows.append(rollout.ids)
            bar.update(task, advance=count)
    save_file({"ids": torch.cat(rows)}, settings.work / "rollouts.safetensors")


def draft_batches(
    settings: Settings, rollouts: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield batches of rollouts, all of them before any repeats."""
    while True:
        order = torch.randperm(rollouts, generator=generator)
        whole = len(order) // settings.draft_batch * settings.draft_batch
        yield from order[:whole].view(-1, settings.draft_batch)


def initial_drafter(settings: Settings, number: int, target: Qwen3ForCausalLM) -> DFlashDraftModel:
    """Return the start of cycle `number`: the target's last layers, or the cycle before."""
    layers = settings.draft_cycles[number - 1].layers
    if number > 1:
        return grow(load_drafter(settings.work / f"drafter-{number - 1}"), layers)
    drafter = DFlashDraftModel(
        draft_config(target.config, layers, settings.taps, settings.block_size)
    )
    start_from_target(drafter, target)
    return drafter


def load_drafter(folder: Path) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)


def train_drafter(settings: Settings, number: int) -> None:
    """Train cycle `number`, counted from 1."""
    generator = seeded(settings, 2 + number)
    cycle = settings.draft_cycles[number - 1]
    target = load_target(settings)
    ids = load_file(settings.work / "rollouts.safetensors")["ids"]
    features, logits = rollout_files(settings)
    drafter = initial_drafter(settings, number, target).to(settings.device)
    console.print(f"drafter: {sum(p.numel() for p in drafter.parameters()):,} parameters")
    drafter.train()
    optimizer = Optimizer(drafter, cycle.steps, muon_lr=0.01)
    embedding = target.model.embed_tokens.weight
    # A block needs its anchor in the rollout's own text and a label for every draft token.
    last = ids.shape[1] - settings.block_size + 1
    batches = draft_batches(settings, len(ids), generator)
    check = list(ids[:8, : corpus.PROMPT])
    with progress() as bar:
        task = bar.add_task(f"drafter, cycle {number}", total=cycle.steps, note="")
        for step in range(cycle.steps):
            rows = next(batches)
            shape = (len(rows), settings.anchors)
            anchors = torch.randint(corpus.PROMPT, last, shape, generator=generator)
            loss, hits = draft_loss(
                drafter,
                embedding,
                ids[rows].to(settings.device),
                features[rows].to(settings.device).float(),
                logits[rows].to(settings.device).float(),
                anchors.to(settings.device),
                cycle.aware,
            )
            optimizer.step(loss)
            bar.update(task, advance=1, note=f"loss {loss.item():.3f}")
            if (step + 1) % 300 == 0 or step + 1 == cycle.steps:
                tau = measure.speculative(target, drafter, check, 96).tau
                rates = " ".join(f"{hit:.2f}" for hit in hits.tolist())
                console.print(f"step {step + 1}: loss {loss.item():.3f}, hits {rates}")
                console.print(f"tau on 8 training prompts {tau:.2f}")
    save_drafter(drafter, settings.work / f"drafter-{number}")


def last_drafter(settings: Settings) -> Path:
    return settings.work / f"drafter-{len(settings.draft_cycles)}"


def evaluate(settings: Settings) -> None:
    target = load_target(settings)
    drafter = load_drafter(last_drafter(settings)).eval().to(settings.device)
    tokenizer = Tokenizer.from_file(str(settings.work / "tokenizer.json"))
    prompts = [torch.tensor(ids) for ids in corpus.read_prompts(tokenizer)]
    held_out = load_file(settings.work / "ids.safetensors")["held_out"]
    with progress() as bar:

        def track(items: Iterable[Any], name: str) -> Iterable[Any]:
            return bar.track(list(items), task_id=bar.add_task(name, note=""))

        measured = measure.measure(target, drafter, prompts, 128, track)
    measured["held_out_nats_per_token"] = round(held_out_loss(target, held_out), 4)
    sample = measure.autoregressive(target, prompts[1:2], 128).ids[0]
    measured["sample"] = {
        "prompt": tokenizer.decode(prompts[1].tolist()),
        "greedy": tokenizer.decode(sample.tolist()),
    }
    corpus.write_json(settings.work / "measured.json", measured)


def publish(settings: Settings) -> None:
    """Put the finished pair into the output folder, each folder in one move."""
    settings.output.mkdir(parents=True, exist_ok=True)
    for name, made in (("target", settings.work / "target"), ("drafter", last_drafter(settings))):
        fresh, old = settings.output / f".{name}.new", settings.output / name
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(made, fresh)
        if name == "target":
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(settings.work / file, fresh / file)
        shutil.rmtree(old, ignore_errors=True)
        fresh.rename(old)
    shutil.copyfile(settings.work / "measured.json", settings.output / "measured.json")
    console.print((settings.output / "measured.json").read_text(encoding="utf-8"))


def stages(settings: Settings) -> Iterator[tuple[str, str, Callable[[Settings], None]]]:
    """Return name, file that marks completion, and function of each stage, in order."""
    yield "tokenizer", "ids.safetensors", build_tokenizer
    yield "target", "target/model.safetensors", train_target
    yield "rollouts", "rollouts.safetensors", make_rollouts
    for number in range(1, len(settings.draft_cycles) + 1):
        stage = partial(train_drafter, number=number)
        yield f"drafter, cycle {number}", f"drafter-{number}/model.safetensors", stage
    yield "evaluate", "measured.json", evaluate


def keep_freed_memory() -> None:
    """Reuse freed buffers: glibc otherwise pages large tensors in anew, about 10 % slower."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


def parse_arguments() -> tuple[Settings, int]:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__)
    default_work = Path(tempfile.gettempdir()) / "pycode-work"
    parser.add_argument("--work", type=Path, default=default_work, help="intermediate files")
    parser.add_argument("--output", type=Path, default=here, help="where the pair goes")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--target-steps", type=int, default=Settings.target_steps)
    parser.add_argument("--rollouts", type=int, default=Settings.rollouts)
    parser.add_argument("--draft-steps", type=int, nargs="+", help="steps of the drafter's cycles")
    given = vars(parser.parse_args())
    threads, draft_steps = given.pop("threads"), given.pop("draft_steps")
    settings = Settings(**given)
    for cycle, steps in zip(settings.draft_cycles, draft_steps or [], strict=False):
        cycle.steps = steps
    return settings, threads


def main() -> None:
    settings, threads = parse_arguments()
    torch.set_num_threads(threads)
    keep_freed_memory()
    settings.work.mkdir(parents=True, exist_ok=True)
    for name, made, stage in stages(settings):
        if (settings.work / made).exists():
            console.print(f"{name}: already there")
            continue
        began = time.perf_counter()
        stage(settings)
        console.print(f"{name}: {time.perf_counter() - began:.0f} s")
    publish(settings)


if __name__ == "__main__":
    main()
