"""The other programs of scripts/bench_table.py say what we say, and are counted as we are; so
are those of scripts/engines_table.py.

The test of one that is a server is in `test_bench_serve.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from builds import build_engines
from pycode import PYCODE, ROOT, prompt_ids

from dflash_trt.bench import Table
from dflash_trt.config import Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.engines.onnxruntime import Engine

sys.path.append(str(ROOT / "scripts"))
import peers
from bench_table import fill
from engines_table import by_node, generated, step_ours, works
from floor import Work, floor_of

TOKENS, PROMPTS = 12, 3


@pytest.mark.models
def test_transformers_and_zlab_say_what_we_say(built: Path) -> None:
    prompts = prompt_ids(PROMPTS)
    fixed = Speculation(draft_tokens=7)
    report = check_lossless(built / "engines", prompts, TOKENS, fixed, lambda done: None)
    work = peers.Work(PYCODE, prompts, TOKENS, 2, 2, [*report.outputs[:2], [0] * TOKENS])
    new = PROMPTS * (TOKENS - 1)  # a first token comes from no round
    with peers.torch_peers(work) as (generate, dflash):
        for peer, streams, rounds in (
            (generate, 1, new),
            (generate, 2, new),
            (dflash, 1, round(new / report.tau)),
        ):
            sample, same = peer.run(streams)
            assert (sample.tokens, sample.rounds) == (PROMPTS * TOKENS, rounds)
            assert sample.seconds > 0
            assert same == 2  # the third text is not expected
        assert (generate.most, dflash.most) == (2, 1)


def test_a_server_that_does_not_start_is_shown_with_its_log(tmp_path: Path) -> None:
    work = peers.Work(PYCODE, [], TOKENS, 2, 2, [])
    line = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(RuntimeError, match="no such model"),
        peers.server_peer("x", line, work, tmp_path / "log"),
    ):
        pass


def test_only_its_own_table_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    first, second = (f"<!-- table: scripts/{name} -->\nold {name}\n<!-- end -->" for name in "ab")
    page.write_text(f"before\n{first}\nbetween\n{second}\nafter\n")
    fill(page, "a", {}, Table("new a", "", [{"head": "cell"}]))
    written = page.read_text()
    assert written.startswith("before\n<!-- table: scripts/a -->\n")
    assert written.endswith(f"<!-- end -->\nbetween\n{second}\nafter\n")
    assert "new a" in written
    assert "old a" not in written


def test_a_step_of_who_generates_is_what_more_tokens_take() -> None:
    def asked(_: str, prompts: list[list[int]], tokens: int, streams: int) -> list[float]:
        assert len(prompts) == streams
        return [len(prompts[0]) * 0.001 + (tokens - 1) * 0.01 * streams]

    found = generated(asked)
    assert found[Work("prefill", 512)] == pytest.approx(0.512)
    assert found[Work("decode", 4)] == pytest.approx(0.04)


def test_our_steps_are_all_timed(tmp_path: Path) -> None:
    sizes = {"slots": 8, "max_seq_len": 512, "threads": 1}
    build_engines(PYCODE / "target", PYCODE / "drafter", tmp_path / "built", **sizes)
    target = tmp_path / "built" / "target"
    found = step_ours(Engine(target))
    assert set(found) == set(works(512))
    least = floor_of(PYCODE / "target", "float32", 1e9, 1e12)
    assert least(Work("decode", 8)) == least(Work("decode", 1))  # bound by memory
    assert least(Work("prefill", 4096)) > least(Work("prefill", 512))
    for work, spent in by_node(target):
        assert float(spent["products of layers"]) > 0, work
        assert float(spent["head"]) > 0, work
