"""The demo pair in examples/pycode: the issue's bars, held on the 40 held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import reference
from builds import build_engines
from exact import drafter_step, run_all, scheduler_of, target_step
from pycode import PYCODE, prompt_ids, prompt_texts

from dflash_trt.decoding import Request, Scheduler, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.serving.client import stream
from dflash_trt.serving.server.run import running_server

END = 0  # the demo target's end-of-text token
PROMPTS, NEW_TOKENS, SLOTS = 40, 128, 4
BAR = 3.2  # generated tau, greedy, block 8


@dataclass(frozen=True)
class Demo:
    """The demo's engines, its prompts, and what the references make of them."""

    target: Engine
    drafter: Engine
    prompts: list[list[int]]
    greedy: list[list[int]]
    zlab: list[reference.Generated]

    def scheduler(self, *, slots: int = 1, drafts: int | None = None) -> Scheduler:
        drafts = self.drafter.info.block_size - 1 if drafts is None else drafts
        return scheduler_of(
            in_process(self.target, self.drafter),
            Fixed(drafts),
            slots=slots,
            max_seq_len=self.target.info.max_seq_len,
            prefill_chunk=64,
        )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    directory = tmp_path_factory.mktemp("pycode")
    prompts = prompt_ids()
    assert len(prompts) == PROMPTS
    longest = max(map(len, prompts)) + NEW_TOKENS
    build_engines(
        PYCODE / "target", PYCODE / "drafter", directory, slots=SLOTS, max_seq_len=longest
    )
    return Demo(
        Engine(directory / "target"),
        Engine(directory / "drafter"),
        prompts,
        reference.greedy(PYCODE / "target", prompts, NEW_TOKENS),
        reference.dflash_generate(PYCODE / "target", PYCODE / "drafter", prompts, NEW_TOKENS),
    )


def test_same_text_and_same_rounds(demo: Demo) -> None:
    """One by one, as z-lab: every token and every round's acceptance, so tau to the digit."""
    scheduler = demo.scheduler()
    sequences = [run_all(scheduler, [Request(prompt, NEW_TOKENS)])[0] for prompt in demo.prompts]
    assert [s.tokens for s in sequences] == demo.greedy
    assert [s.tokens for s in sequences] == [z.tokens for z in demo.zlab]
    for sequence, zlab in zip(sequences, demo.zlab, strict=True):
        assert sequence.committed_per_round == zlab.acceptance_lengths
    rounds = sum(s.rounds for s in sequences)
    assert rounds == sum(len(z.acceptance_lengths) for z in demo.zlab)
    tau = PROMPTS * (NEW_TOKENS - 1) / rounds
    assert tau >= BAR


@pytest.mark.models
@pytest.mark.parametrize("drafts", [1, 3])
def test_shorter_drafts(drafts: int, demo: Demo) -> None:
    scheduler = demo.scheduler(slots=SLOTS, drafts=drafts)
    sequences = run_all(scheduler, [Request(prompt, NEW_TOKENS) for prompt in demo.prompts])
    assert [s.tokens for s in sequences] == demo.greedy


@pytest.mark.models
def test_served_text(demo: Demo, built: Path) -> None:
    """What `build`, the real Triton server and a gRPC client make of it: the target's own text."""
    with running_server(built) as ports:
        for text, greedy in zip(prompt_texts(), demo.greedy, strict=True):
            chunks = list(
                stream(f"127.0.0.1:{ports.grpc}", text, max_tokens=NEW_TOKENS, temperature=0.0)
            )
            expected = greedy[: greedy.index(END) + 1] if END in greedy else greedy
            assert [token for chunk in chunks for token in chunk.token_ids] == expected


def test_logits(demo: Demo) -> None:
    text = demo.prompts[0] + demo.greedy[0]
    drafter = reference.load_drafter(PYCODE / "drafter")
    logits, features = reference.target_logits_and_taps(
        PYCODE / "target", text, drafter.target_layer_ids
    )
    output = target_step(demo.target, text, 0)
    np.testing.assert_allclose(output["logits"], logits, atol=1e-4, rtol=0)
    np.testing.assert_allclose(output["features"][0], features, atol=1e-4, rtol=1e-4)

    prompt = len(demo.prompts[0])
    starts = list(range(prompt, len(text) - drafter.block_size, 5))
    expected = reference.drafter_logits(PYCODE / "target", PYCODE / "drafter", text, starts)
    seen = 0
    for start, wanted in zip(starts, expected, strict=True):
        found = drafter_step(demo.drafter, features[seen:start], text[start], seen)
        np.testing.assert_allclose(found["logits"], wanted, atol=1e-4, rtol=0)
        seen = start
