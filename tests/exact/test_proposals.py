"""What else may draft: prompt lookup. The text stays the target's."""

from collections.abc import Sequence

from dflash_trt.decoding import Proposer, Request, SequenceState, in_process
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Fixed, SequenceView
from dflash_trt.speculation.lookup import NgramIndex
from tests.support.built_pairs import BuildPair
from tests.support.equality import run_all, scheduler_of

QWEN3 = {"family": "qwen3", "heads": 4, "kv_heads": 2, "tied": True, "taps": (0, 2)}
NEW_TOKENS = 40


def test_lookup_knows_the_text_of_every_row(built_pair: BuildPair) -> None:
    built, compared = built_pair(**QWEN3), 0

    class Compared(Proposer):
        def views(self, sequences: Sequence[SequenceState]) -> list[SequenceView]:
            nonlocal compared
            rows = super().views(sequences)
            for sequence, row in zip(sequences, rows, strict=True):
                whole = NgramIndex([*sequence.request.prompt, *sequence.tokens])
                for copied in row.proposals:
                    assert (copied.match, copied.tokens) == whole.find(len(copied.tokens))
                    compared += 1
            return rows

    rounds = in_process(Engine(built.target_engine), None)
    run_all(
        scheduler_of(rounds, Fixed(5), Compared(5, lookup=True), slots=3, prefill_chunk=5),
        [Request(x[: 9 + 4 * i], NEW_TOKENS - 4 * i) for i, x in enumerate(built.texts[:8])],
    )
    assert compared > 30
