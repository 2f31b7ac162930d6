"""Make the drafter in a given time: the target writes conversations, and it learns them meanwhile.

    python train.py --target TARGET --output OUTPUT --minutes 8

needs PyTorch, Transformers, safetensors and NumPy. It computes in bfloat16 on an NVIDIA GPU, where
there is one, otherwise in float32 on the CPU. Once a minute and at the end OUTPUT gets `log.jsonl`
and the drafter, whose file is in parts of 16 MiB: `cat part-* > model.safetensors` joins them.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import humaneval
import torch
from llama import Llama, load_llama, read
from model import (
    BLOCK,
    DRAFT_VOCABULARY,
    Batch,
    Vocabulary,
    Weights,
    draft_loss,
    load_weights,
    save_drafter,
    start_from_target,
    tau,
    vocabulary_of,
)
from people import read_questions
from prompts import chats
from sampling import LENGTH, Conversation, Prompts, Sampler, begin
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
HELD_OUT_TOKENS = 128
PART = 16 * 1024 * 1024  # bytes
RATES = (0.02, 3e-3)  # of Muon, for the matrices, and of AdamW, for the rest
CONSTANT, WARMUP = 0.55, 60  # share of the time before the rates fall to nothing; steps
REPORT = 55  # seconds
ANCHORS = 64
USES = 2  # of a conversation, each with other anchors


class Log:
    """Lines of JSON, in a file and on the screen, with the seconds since the start."""

    def __init__(self, file: Path) -> None:
        self.file, self.began = file, time.monotonic()
        file.write_text("", encoding="utf-8")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def __call__(self, **values: object) -> None:
        line = json.dumps({"seconds": round(self.seconds, 1)} | values)
        print(line, flush=True)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")


def held_out(tokenizer: PreTrainedTokenizerBase, people: Path | None) -> dict[str, list[list[int]]]:
    """Return the prompts that drafters are judged by, which none is trained on.

    people: what `people.py` wrote.
    """
    sets = {
        "chat": chats(tokenizer, read_questions(HERE / "prompts.jsonl")),
        "humaneval": chats(tokenizer, humaneval.questions()),
    }
    if people is not None:
        sets["people"] = chats(tokenizer, read_questions(people / "held_out.jsonl"))
    return sets


def batch_of(
    conversations: list[Conversation], generator: torch.Generator, device: torch.device
) -> Batch:
    """Return conversations of similar length, padded to a multiple of 32 for few shapes."""
    longest = max(len(each.ids) for each in conversations)
    ids = torch.zeros(len(conversations), -(-longest // 32) * 32, dtype=torch.long)
    for line, each in zip(ids, conversations, strict=True):
        line[: len(each.ids)] = each.ids
    lengths = torch.tensor([len(each.ids) for each in conversations])
    starts = torch.tensor([each.start for each in conversations])
    draws = torch.rand(len(conversations), ANCHORS, generator=generator)
    room = (lengths - 1 - starts)[:, None]
    anchors = starts[:, None] + (draws * room).long()
    return Batch(ids.to(device), lengths.to(device), anchors.to(device))


def optimizers(weights: Weights) -> list[torch.optim.Optimizer]:
    matrices = [tensor for name, tensor in weights.items() if ".mlp." in name or "_proj.w" in name]
    matrices.append(weights["fc.weight"])
    others = [tensor for tensor in weights.values() if not any(tensor is each for each in matrices)]
    return [
        torch.optim.Muon(matrices, lr=RATES[0], weight_decay=0.0),
        torch.optim.AdamW(others, lr=RATES[1], betas=(0.9, 0.98), weight_decay=0.0),
    ]


def commonest(conversations: list[Conversation], llama: Llama) -> Vocabulary:
    answers = torch.cat([each.ids[each.start :] for each in conversations])
    counts = torch.bincount(answers, minlength=len(llama.embedding))
    ids = counts.argsort(descending=True, stable=True)[:DRAFT_VOCABULARY].sort().values
    return vocabulary_of(ids.to(llama.embedding.device), llama)


def write(weights: Weights, llama: Llama, vocabulary: Vocabulary, output: Path) -> None:
    """Replace the drafter in `output` by one whose file is in parts."""
    save_drafter(weights, llama, vocabulary, output)
    whole = output / "model.safetensors"
    with whole.open("rb") as stream:
        for number, part in enumerate(iter(lambda: stream.read(PART), b"")):
            (output / f"part-{number}").write_bytes(part)
    whole.unlink()


class HeldOut:
    """The target's greedy answers to the prompts that a drafter is judged by."""

    def __init__(self, sets: dict[str, list[list[int]]], every: int, prompts: Prompts) -> None:
        self.texts: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in sets}
        self._set: list[str] = []  # of each number
        for name, asked in sets.items():
            for ids in asked[::every]:
                if len(ids) + HELD_OUT_TOKENS <= LENGTH:
                    prompts.waiting.append((ids, len(self._set)))
                    self._set.append(name)

    def take(self, answered: Conversation, device: torch.device) -> None:
        ids = answered.ids[: answered.start + HELD_OUT_TOKENS].to(device)
        self.texts[self._set[answered.number]].append((ids, answered.start))

    def taus(
        self, weights: Weights, llama: Llama, vocabulary: Vocabulary, every: int
    ) -> dict[str, float]:
        return {
            f"tau, {name}": round(tau(weights, llama, vocabulary, texts[::every]), 3)
            for name, texts in self.texts.items()
        }


class Training:
    """A drafter under way, its optimizers, and what was learned since the last report."""

    def __init__(self, llama: Llama, vocabulary: Vocabulary, weights: Weights) -> None:
        self.llama, self.vocabulary, self.weights = llama, vocabulary, weights
        for tensor in weights.values():
            tensor.requires_grad_()
        self._optimizers = optimizers(weights)
        self.steps = self.conversations = 0
        self._losses: list[Tensor] = []
        self._rounds: list[Tensor] = []

    def step(self, batch: Batch, rate: float) -> None:
        """Train on a batch; rate: share of the learning rates."""
        warm = min(1.0, (self.steps + 1) / WARMUP)
        for optimizer, most in zip(self._optimizers, RATES, strict=True):
            optimizer.param_groups[0]["lr"] = most * rate * warm
        loss, hits = draft_loss(self.weights, self.llama, self.vocabulary, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        self.conversations += len(batch.ids)
        self._losses.append(loss.detach())
        self._rounds.append((1 / (1 + hits.cumprod(-1).sum(-1))).mean())

    def news(self) -> dict[str, float]:
        """Return losses since the last call; `block_tau`: tau if such blocks were a text."""
        news: dict[str, float] = {"step": self.steps, "conversations": self.conversations}
        if self._losses:
            news["loss"] = round(torch.stack(self._losses).mean().item(), 3)
            news["block_tau"] = round(1 / torch.stack(self._rounds).mean().item(), 3)
        self._losses.clear()
        self._rounds.clear()
        return news


def first_weights(
    llama: Llama, sampled: list[Conversation], start: Path | None, log: Log
) -> tuple[Vocabulary, Weights]:
    """Return weights of the drafter in `start`, else new ones from the target and its answers."""
    device = llama.embedding.device
    if start:
        weights, ids = load_weights(start, device)
        vocabulary = vocabulary_of(ids, llama)
    else:
        vocabulary = commonest(sampled, llama)
        some = batch_of(sampled[:32], torch.Generator(), device)
        place = torch.arange(some.ids.shape[1], device=device)
        # the first token's features are like no others
        inside = (place > 0) & (place < some.lengths[:, None])
        torch.manual_seed(0)
        weights = start_from_target(llama, read(llama, some.ids)[0][inside])
    answers = torch.cat([each.ids[each.start :] for each in sampled]).to(device)
    log(
        event="training begins",
        conversations=len(sampled),
        answer_tokens=len(answers),
        covered=round((vocabulary.row[answers] >= 0).float().mean().item(), 4),
        parameters=sum(tensor.numel() for tensor in weights.values()),
    )
    return vocabulary, weights


def keep_sampling(
    sampler: Sampler, ended: SimpleQueue[Conversation], most: int, stop: Event
) -> None:
    """Sample until `stop`; wait while `most` conversations are in the queue."""
    on_gpu = sampler.ids.is_cuda
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
        while not stop.is_set():
            if ended.qsize() >= most:
                time.sleep(0.01)
                continue
            sampler.run()
            for each in sampler.harvest():
                ended.put(each)


def train(options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    log = Log(options.output / "log.jsonl")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_stream(torch.cuda.Stream(priority=-1))  # sampling fills what it leaves
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    llama = load_llama(options.target, device, dtype, LENGTH + BLOCK)
    people = read_questions(options.people / "prompts.jsonl") if options.people else []
    prompts = begin(tokenizer, people)
    held = HeldOut(held_out(tokenizer, options.people), options.every, prompts)
    sampler = Sampler(llama, tokenizer, prompts, options.sampled)
    if on_gpu:
        torch.cuda.synchronize()
    log(event="ready", device=torch.cuda.get_device_name() if on_gpu else "cpu")
    total = options.minutes * 60
    generator = torch.Generator().manual_seed(1)
    ended, stop = SimpleQueue[Conversation](), Event()
    fresh = options.turn // USES
    pool: list[Conversation] = []

    def collect() -> None:
        if sampling.done():
            sampling.result()
        for _ in range(min(ended.qsize(), fresh)):
            each = ended.get()
            if each.number < 0:
                pool.append(each)
            else:
                held.take(each, device)

    with ThreadPoolExecutor(1) as threads:
        sampling = threads.submit(keep_sampling, sampler, ended, fresh, stop)
        try:
            while len(pool) < options.first and log.seconds < total:
                time.sleep(0.1)
                collect()
            if not pool:
                raise SystemExit(f"no conversation within {options.minutes} minutes: give more")
            vocabulary, weights = first_weights(llama, pool, options.start, log)
            training = Training(llama, vocabulary, weights)
            began_at = saved_at = log.seconds

            def report(every: int, **more: object) -> None:
                news = training.news() | held.taus(weights, llama, vocabulary, every)
                write(weights, llama, vocabulary, options.output)
                log(**news, sampled=len(pool), answer_tokens=sampler.sampled, **more)

            while log.seconds < total:
                pool.sort(key=lambda each: each.uses)
                turn = sorted(pool[: options.turn], key=lambda each: len(each.ids))
                groups = [turn[i : i + options.rows] for i in range(0, len(turn), options.rows)]
                for group in torch.randperm(len(groups), generator=generator).tolist():
                    left = (total - log.seconds) / (total - began_at)
                    if left <= 0:
                        break
                    rate = min(1.0, left / (1 - CONSTANT))
                    training.step(batch_of(groups[group], generator, device), rate)
                    for each in groups[group]:
                        each.uses += 1
                if on_gpu:
                    torch.cuda.current_stream().synchronize()
                if log.seconds - saved_at > REPORT and log.seconds < total - REPORT / 2:
                    report(every=4)
                    saved_at = log.seconds
                collect()
        finally:
            stop.set()
    report(every=1, event="end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--start", type=Path, help="a drafter to go on from, in place of the target"
    )
    parser.add_argument(
        "--people", type=Path, help="what people.py wrote, to be a third of the prompts"
    )
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--sampled", type=int, default=3072, help="rows that are sampled at once")
    parser.add_argument("--first", type=int, default=12_000, help="conversations before training")
    parser.add_argument(
        "--turn", type=int, default=2048, help="conversations between two looks at what was sampled"
    )
    parser.add_argument("--rows", type=int, default=32, help="conversations of a training step")
    parser.add_argument("--every", type=int, default=1, help="judge by every n-th held-out prompt")
    train(parser.parse_args())
