"""PyTorch chooses the tokens of a round as NumPy does, and copies no logits to the host."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_trt.decoding import Request, SamplingParams, device_sampling, in_process
from dflash_trt.decoding import logits_processor as numpys
from dflash_trt.decoding.device_sampling import Chooser
from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.decoding.logprobs import log_probabilities
from dflash_trt.decoding.messages import RoundSequence
from dflash_trt.decoding.place_rules import place_rules
from dflash_trt.decoding.sampling import sample
from dflash_trt.engines import Engine, Step, load_engine
from dflash_trt.engines.gpu import Gpu
from dflash_trt.engines.pytorch.engine import Cpu
from dflash_trt.speculation import Fixed
from tests.standins.cuda import install, recorded_steps
from tests.support.builds import build_engines
from tests.support.equality import run_all, scheduler_of
from tests.support.pairs import make_pair
from tests.support.random_rules import SIZES, Dice, logits_of, mask_of, one_of, rules_of

EXAMPLES = int(os.environ.get("RULES_EXAMPLES", "400"))
PROMPT = 8
SLOTS, LENGTH, NEW_TOKENS = 3, 96, 12
Array = np.ndarray[Any, Any]


def row_of(dice: Dice, vocab: int) -> RoundSequence:
    """Return a row of a random text, which may have drafts, rules and a grammar's masks."""
    tokens = [int(token) for token in dice.integers(0, vocab, 1 + dice.integers(5))]
    history = [int(token) for token in dice.integers(0, vocab, 12)]
    rules = rules_of(dice, vocab, history)
    biased = dict(rules.logit_bias)
    rules = replace(rules, logit_bias=tuple(biased.items()))
    processor = LogitsProcessor(rules, PROMPT, stop_ids=(0,) if vocab > 1 else ())
    row = RoundSequence(tokens, 1, len(history), 99, processor=processor, history=history)
    if dice.random() < 0.3:
        share = dice.choice([0.02, 0.5, 1.0])
        masks = [mask_of(dice.random(vocab) < share) for _ in tokens]
        row.masks = [one_of(dice, mask, None) for mask in masks]
    return row


def by_numpy(row: RoundSequence, logits: Array) -> list[int]:
    chosen = []
    for place, of_place in enumerate(logits[: len(row.tokens)]):
        position = row.position + 1 + place
        history = [*row.history, *row.tokens[: 1 + place]]
        mask = row.masks[place] if row.masks else None
        likely = row.processor.likely(of_place, position, history, mask)
        chosen += sample([likely], [row.processor.sampling.seed], [position])
    return chosen


def by_torch(
    chooser: Chooser, rows: list[RoundSequence], first_rows: list[int], vocab: int
) -> list[int]:
    chosen: list[int] = chooser.start(place_rules(rows, first_rows, vocab))().tolist()
    return chosen


def differences(examples: int) -> list[int]:
    """Return which random rounds PyTorch chooses otherwise than NumPy."""
    different = []
    for number in range(examples):
        dice = np.random.default_rng(number)
        vocab = int(dice.choice(SIZES))
        rows = [row_of(dice, vocab) for _ in range(dice.integers(1, 4))]
        logits = np.array([[logits_of(dice, vocab) for _ in range(6)] for _ in rows])
        before = logits.copy()
        chooser = Chooser(Cpu(), torch.from_numpy(logits).flatten(0, 1))
        found = by_torch(chooser, rows, [6 * index for index in range(len(rows))], vocab)
        if found != [*chain(*map(by_numpy, rows, logits))]:
            different.append(number)
        assert (logits == before).all()
    return different


def test_all_rules_together_choose_as_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """But at a border of top-p among thousands of equal tokens, where float32 sums are rounded."""
    monkeypatch.setattr(numpys, "SUM", np.float64)
    assert differences(EXAMPLES) == []


def test_rows_are_chosen_as_if_alone() -> None:
    """Also where a vocabulary has to be sorted: bits do not depend on what is beside them."""
    dice = np.random.default_rng(5)
    vocab = 3000
    rows = [row_of(dice, vocab) for _ in range(24)]
    logits = np.array([[logits_of(dice, vocab) for _ in range(5)] for _ in rows])
    chooser = Chooser(Cpu(), torch.from_numpy(logits).flatten(0, 1))
    alone = [by_torch(chooser, [row], [5 * index], vocab) for index, row in enumerate(rows)]
    assert by_torch(chooser, rows, [*range(0, 5 * len(rows), 5)], vocab) == [*chain(*alone)]


def test_masses_do_not_depend_on_what_is_beside_them() -> None:
    weights = torch.rand(64, 20_000)
    together = device_sampling._whole(weights, torch.zeros(64, 1))
    for index, row in enumerate(weights):
        alone = device_sampling._whole(row[None], torch.zeros(1, 1))
        assert (alone.mass, alone.rest) == (together.mass[index], together.rest[index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_have_many_ties(dtype: torch.dtype) -> None:
    dice = np.random.default_rng(6)
    values = torch.from_numpy(dice.normal(0, 3, (40, 5000)).astype(np.float32)).to(dtype).float()
    chooser = Chooser(Cpu(), values)
    for top_k, top_p in ((20, 0.95), (0, 0.95), (0, 1.0), (64, 1.0), (63, 1.0), (500, 0.5)):
        rules = SamplingParams(0.8, top_k, top_p)
        rows = [
            RoundSequence([1], 1, 9, 9, processor=LogitsProcessor(replace(rules, seed=seed), 1, ()))
            for seed in range(40)
        ]
        expected = [*chain(*(map(by_numpy, rows, values.numpy()[:, None])))]
        assert by_torch(chooser, rows, [*range(40)], 5000) == expected


def test_log_probabilities_are_numpys() -> None:
    dice = np.random.default_rng(7)
    logits = np.round(dice.normal(0, 3, (70, 3000)), 1).astype(np.float32)
    tokens = [int(token) for token in dice.integers(0, 3000, 70)]
    chooser = Chooser(Cpu(), torch.from_numpy(logits))
    for count in (0, 1, 20):
        expected = log_probabilities(logits, tokens, count)
        found = chooser.log_probabilities(range(70), tokens, count)
        assert (found.ids == expected.ids).all()
        np.testing.assert_allclose(found.values, expected.values, atol=1e-5)
        alone = chooser.log_probabilities([69], tokens[69:], count)
        assert (alone.values == found.values[69:]).all()


class OnHost:
    """An engine whose logits NumPy looks at."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *sizes: int, **context: int) -> Step:
        return replace(self._engine.step(*sizes, **context), on_device=None)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pytorch")
    pair = make_pair(folder / "pair")
    sizes: dict[str, Any] = {"slots": SLOTS, "max_seq_len": LENGTH, "kind": "pytorch"}
    build_engines(pair.target_dir, pair.drafter_dir, folder / "engines", **sizes)
    return folder / "engines"


RULES = {
    "temperature": [SamplingParams(1.0, seed=1)],
    "top-k": [SamplingParams(0.6, 20, 0.95, seed=2)],
    "all kinds beside each other": [
        SamplingParams(1.0, top_p=0.95, seed=3, logprobs=5),
        SamplingParams(0.8, 3, 0.9, 0.05, 1.2, 0.3, 0.2, seed=4, logit_bias=((7, 2.0),)),
        SamplingParams(),
    ],
    "greedy rules": [
        SamplingParams(min_tokens=5, repetition_penalty=1.3, bad_words=((9,), (3, 4)))
    ],
    "log-probabilities": [
        SamplingParams(1.0, min_p=0.02, seed=5, logprobs=20, prompt_logprobs=True)
    ],
    "those of drafts": [SamplingParams(1.0, seed=6, include_drafting=True)],
}


def decoded(target: Engine, engines: Path, samplings: list[SamplingParams]) -> list[Any]:
    rounds = in_process(target, load_engine(engines / "drafter"))
    scheduler = scheduler_of(rounds, Fixed(5), slots=SLOTS, max_seq_len=LENGTH)
    requests = [
        Request(
            [(31 * i + 7 * k) % 300 for i in range(9)], NEW_TOKENS, samplings[k % len(samplings)]
        )
        for k in range(SLOTS)
    ]
    return run_all(scheduler, requests)


class Copies:
    """Counts numbers that come to the host, the most at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._pinned: dict[int, Tensor] = {}  # kept, so that no other has its address
        pinned_zeros, copy = Gpu.pinned_zeros, Gpu.copy

        def remember(gpu: Gpu, shape: tuple[int, ...], dtype: str) -> Tensor:
            memory = pinned_zeros(gpu, shape, dtype)
            self._pinned[memory.untyped_storage().data_ptr()] = memory
            return memory

        def count(gpu: Gpu, source: Tensor, to: Tensor) -> None:
            if self._is_on_host(to):
                self._count(source)
            copy(gpu, source, to)

        monkeypatch.setattr(Gpu, "pinned_zeros", remember)
        monkeypatch.setattr(Gpu, "copy", count)
        for name in ("cpu", "numpy", "tolist", "item", "__array__"):
            monkeypatch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _count(self, tensor: Tensor) -> None:
        self.most = max(self.most, tensor.numel())

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *options: Any, **others: Any) -> Any:
            if not self._is_on_host(tensor):
                self._count(tensor)
            return read(tensor, *options, **others)

        return counted


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("candidates", [1024, 16])
def test_texts_are_numpys_and_logits_stay(
    rules: str, candidates: int, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds are recorded; with few candidates tokens are often chosen a second time."""
    target = load_engine(engines / "target")
    expected = decoded(OnHost(target), engines, RULES[rules])
    monkeypatch.setattr(device_sampling, "MANY", candidates)
    monkeypatch.setattr(device_sampling, "FEW", min(device_sampling.FEW, candidates))
    install(monkeypatch)
    copies = Copies(monkeypatch)
    target = load_engine(engines / "target")
    found = decoded(target, engines, RULES[rules])
    assert max(graph.replays for graph in recorded_steps()) > 2
    assert 0 < copies.most < target.info.vocab_size
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.committed_per_round == theirs.committed_per_round
        assert ours.logprob_ids == theirs.logprob_ids
        for values, expected_values in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert values == pytest.approx(expected_values, abs=1e-4)
    step = target.step(0, 1, 1, 32, 1)
    assert step.outputs["logits"].shape == (1, target.info.vocab_size)
    assert copies.most >= target.info.vocab_size
