"""scripts/replay_policy.py: a replay is the live run, and no policy is better than the oracle."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import strategy
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Adaptive, CostProfile
from tests.support.built_pairs import BuildPair
from tests.support.equality import rounds_of

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from replay_policy import compare, decode, given, record, replay

COSTS = "1:10,2:11,8:15,16:30,draft:4", "1:0.3,2:0.5,16:3,draft:0.3", "1:10,16:10,draft:0"


@pytest.mark.parametrize("costs", COSTS)
def test_replays_and_oracle(
    costs: str, built_pair: BuildPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = built_pair(family="qwen3", heads=4, kv_heads=2, tied=True, taps=(0, 2))
    info, rounds, table = Engine(built.target_engine).info, rounds_of(built), given(costs)
    texts = record(rounds, info, [text[: 12 + 3 * i] for i, text in enumerate(built.texts[:4])], 50)
    assert [text.tokens[:80] for text in texts] == [
        built.texts[i][: 12 + 3 * i + 50] for i in range(4)
    ]
    found = compare(texts, info, table)
    assert found["plain"] == 1.0
    assert all(rate <= found["oracle"] + 1e-9 for rate in found.values())
    assert found["oracle"] > 1.2
    for streams in (1, 3):  # the same rounds as on the engines, where these take what the costs say
        _, replayed = replay(texts, table, info, *strategy(Speculation(), info, table), streams)
        policy, proposer = strategy(Speculation(), info, table)
        assert isinstance(policy, Adaptive)
        monkeypatch.setattr(policy, "timed", by_costs(policy, table))
        live = decode([text.request for text in texts], rounds, info, policy, proposer, streams)
        assert [x.tokens for x in live] == [x.tokens for x in replayed]
        assert [x.committed_per_round for x in live] == [x.committed_per_round for x in replayed]
        assert [x.drafted for x in live] == [x.drafted for x in replayed]


def by_costs(policy: Adaptive, table: CostProfile) -> Callable[[float, float], None]:
    timed = policy.timed

    def timed_by_table(_: float, drafted: float) -> None:
        last = policy._last
        draft = table.draft(last.sequences, last.context) if drafted else 0.0
        timed(table.verify(last.sequences, 1 + last.draft_len, last.context), draft)

    return timed_by_table
