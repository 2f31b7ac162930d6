"""The demo pair in examples/pycode: the issue's bars, held on its 40 prompts."""

from pathlib import Path

import pytest

from dflash_trt.decoding import Request, in_process
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Fixed
from tests.support import reference
from tests.support.builds import build_engines
from tests.support.equality import run_all, scheduler_of
from tests.support.pycode import PYCODE, prompt_ids

PROMPTS, NEW_TOKENS = 40, 128
FEW = 8
BAR = 3.2  # generated tau, greedy, block 8


@pytest.mark.parametrize("compared", [FEW, pytest.param(PROMPTS, marks=pytest.mark.models)])
def test_same_text_and_same_rounds(compared: int, tmp_path: Path) -> None:
    """As the references say of so many prompts, and as many tokens a round as the bar of all."""
    pair, prompts = (PYCODE / "target", PYCODE / "drafter"), prompt_ids()
    assert len(prompts) == PROMPTS
    longest = max(map(len, prompts)) + NEW_TOKENS
    build_engines(*pair, tmp_path, slots=1, max_seq_len=longest)
    rounds = in_process(Engine(tmp_path / "target"), Engine(tmp_path / "drafter"))
    scheduler = scheduler_of(rounds, Fixed(7), slots=1, max_seq_len=longest, prefill_chunk=64)
    sequences = [run_all(scheduler, [Request(prompt, NEW_TOKENS)])[0] for prompt in prompts]
    few = prompts[:: PROMPTS // compared]
    same = sequences[:: PROMPTS // compared]
    assert [s.tokens for s in same] == reference.greedy(pair[0], few, NEW_TOKENS)
    for sequence, zlab in zip(same, reference.dflash_generate(*pair, few, NEW_TOKENS), strict=True):
        assert sequence.tokens == zlab.tokens
        assert sequence.committed_per_round == zlab.acceptance_lengths
    assert PROMPTS * (NEW_TOKENS - 1) / sum(s.rounds for s in sequences) >= BAR
