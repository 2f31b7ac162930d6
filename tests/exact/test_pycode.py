"""The demo pair in examples/pycode: the issue's bars, held on the 40 held-out prompts."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import reference
from builds import build_engines
from exact import run_all, scheduler_of
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
def test_served_text(demo: Demo, built: Path) -> None:
    with running_server(built) as ports:
        for text, greedy in zip(prompt_texts(), demo.greedy, strict=True):
            chunks = list(
                stream(f"127.0.0.1:{ports.grpc}", text, max_tokens=NEW_TOKENS, temperature=0.0)
            )
            expected = greedy[: greedy.index(END) + 1] if END in greedy else greedy
            assert [token for chunk in chunks for token in chunk.token_ids] == expected
