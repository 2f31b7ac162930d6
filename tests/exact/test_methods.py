"""Builds without a DFlash drafter: plain decoding, n-grams and a draft model give the target's own
text."""

from __future__ import annotations

from pathlib import Path

import pytest
from builds import config_of, quiet
from pairs import make_pair

from dflash_trt.build.run import build
from dflash_trt.config import Method, Speculation, variants
from dflash_trt.decoding import (
    PrefixCache,
    Request,
    SamplingParams,
    Scheduler,
    check_lossless,
    in_process,
)
from dflash_trt.decoding.speculation import strategy
from dflash_trt.engines import load_engines
from dflash_trt.errors import CheckpointError, PairError

SPECULATION = {
    "none": Speculation(method="none"),
    "ngram": Speculation(method="ngram"),
    "ngram, 5 drafts": Speculation(method="ngram", draft_tokens=5),
    "draft_model": Speculation(method="draft_model"),
}
PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11, 9, 10, 11, 9]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[Method, Path]:
    """The same target with each method; the drafter is never looked for where it is not needed.

    The draft model is another random one, with fewer and other layers.
    """
    directory = tmp_path_factory.mktemp("pair")
    make_pair(directory, block_size=8)
    make_pair(directory / "small", seed=1, family="llama", layers=2, hidden=48, taps=(0,))
    config = config_of(directory, drafters={"draft_model": {"path": directory / "small/target"}})
    found: dict[Method, Path] = {}
    for method, made in variants(config).items():
        if method != "dflash":
            (directory / "drafter").rename(directory / "elsewhere")
        found[method] = build(made, directory / method, quiet).directory
        if method != "dflash":
            (directory / "elsewhere").rename(directory / "drafter")
    return found


def test_a_build_without_a_drafter_has_none(built: dict[Method, Path]) -> None:
    assert {*built} == {"dflash", "draft_model", "ngram", "none"}
    for method in ("ngram", "none", "draft_model"):
        engines = built[method] / "engines"
        drafts = ["drafter"] if method == "draft_model" else []
        assert [each.name for each in sorted(engines.iterdir())] == [*drafts, "target"]
        models = {each.name for each in (built[method] / "model_repository").iterdir()}
        assert models == {"dflash", "dflash_infer"}  # nothing to put into an ensemble


@pytest.mark.parametrize("name", SPECULATION)
def test_its_text_is_the_targets(built: dict[Method, Path], name: str) -> None:
    speculation = SPECULATION[name]
    directory = built[speculation.method] / "engines"
    found = check_lossless(directory, PROMPTS, 40, speculation, lambda _: None)
    assert found.identical == found.total == len(PROMPTS)
    with_drafter = check_lossless(
        built["dflash"] / "engines", PROMPTS, 40, Speculation(), lambda _: None
    )
    assert found.outputs == with_drafter.outputs
    if speculation.method != "draft_model":
        assert (found.tau > 1) == (speculation.method == "ngram")  # random text repeats itself soon


@pytest.mark.parametrize("name", SPECULATION)
def test_a_prompt_that_was_seen_is_reused(built: dict[Method, Path], name: str) -> None:
    """There is no drafter that has not seen it, or it keeps what it has seen."""
    speculation = SPECULATION[name]
    target, drafter = load_engines(built[speculation.method] / "engines")
    assert (drafter is None) == (name != "draft_model")
    policy, proposer = strategy(speculation, target.info, None)
    scheduler = Scheduler(
        in_process(target, drafter),
        slots=2,
        max_seq_len=target.info.max_seq_len,
        prefill_chunk=16,
        policy=policy,
        proposer=proposer,
        prefix_cache=PrefixCache(64),
    )
    texts = []
    for _ in range(2):
        sequence = scheduler.submit(Request([*range(1, 41)], 8))
        while scheduler.busy:
            scheduler.step()
        texts.append(sequence.tokens)
    assert sequence.cached_tokens == 32
    assert texts[0] == texts[1]


def test_a_draft_model_that_is_the_target_is_always_right(tmp_path: Path) -> None:
    """So its cache and its positions are, whatever came and went in the slots."""
    make_pair(tmp_path, block_size=8)
    speculation = Speculation(method="draft_model", draft_tokens=5)
    drafters = {"draft_model": {"path": tmp_path / "target"}}
    config = config_of(tmp_path, drafters=drafters, speculation=speculation)
    engines = build(variants(config)["draft_model"], tmp_path / "out", quiet).directory / "engines"
    target, drafter = load_engines(engines)
    policy, proposer = strategy(speculation, target.info, None)

    def texts(drafting: bool, temperature: float) -> tuple[list[list[int]], list[int]]:
        scheduler = Scheduler(
            in_process(target, drafter if drafting else None),
            slots=3,
            max_seq_len=target.info.max_seq_len,
            prefill_chunk=16,
            policy=policy
            if drafting
            else strategy(Speculation(method="none"), target.info, None)[0],
            proposer=proposer,
            prefix_cache=PrefixCache(64),
        )
        sequences = [
            scheduler.submit(
                Request([*range(1, 20 + 7 * i)], 20 + 9 * i, SamplingParams(temperature, seed=i))
            )
            for i in range(6)
        ]
        while scheduler.busy:
            scheduler.step()
        rounds = [count for each in sequences for count in each.committed_per_round[:-1]]
        return [each.tokens for each in sequences], rounds

    greedy, rounds = texts(True, 0.0)
    assert {*rounds} == {6}
    assert greedy == texts(False, 0.0)[0]
    sampled, rounds = texts(True, 0.8)
    assert 1 < sum(rounds) / len(rounds) < 6
    assert sampled == texts(False, 0.8)[0]


def test_a_draft_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    make_pair(tmp_path)
    for name, vocab in (("fewer", 300), ("more", 330)):
        make_pair(tmp_path / name, vocab=vocab)
        drafters = {"draft_model": {"path": tmp_path / name / "target"}}
        config = variants(config_of(tmp_path, drafters=drafters))["draft_model"]
        with pytest.raises(PairError, match=f"knows {vocab} tokens, the target 320"):
            build(config, tmp_path / "out", quiet)
    drafters = {"draft_model": {"path": tmp_path / "drafter"}}
    config = variants(config_of(tmp_path, drafters=drafters))["draft_model"]
    with pytest.raises(CheckpointError, match="is a DFlash drafter"):
        build(config, tmp_path / "out", quiet)
