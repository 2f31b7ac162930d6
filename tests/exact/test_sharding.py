"""Every family and drafter format cut for 2, 4 and 8 ranks: they compute what one computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from builds import build_engines
from built_pairs import SLOTS
from exact import drafter_step, run_all, scheduler_of, target_step
from families import BIASED, DRAFTER, FAMILIES, SLIDING, TARGET, pair_of, to_speculators
from op_profile import assert_in_profile
from pairs import Pair, make_pair, write_pair
from test_quantised import FP8, write
from transformers import LlamaConfig

from dflash_trt.checkpoints import Shard, load_drafter, load_target
from dflash_trt.decoding import Request, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.info import rank_directory, read_info
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.graphs.sharding import Rank
from dflash_trt.graphs.target import target_graph

pytestmark = pytest.mark.models

TOLERANCE = 2e-4
MAX_SEQ_LEN, NEW_TOKENS = 96, 24
PROMPTS = [[5, 17, 200, 44, 3], list(range(100, 119)), [7] * 11]
LLAMA = LlamaConfig(**TARGET, tie_word_embeddings=False)


def engines_of(pair: Pair, directory: Path, ranks: int) -> Path:
    """`directory/RANKS/target` and `.../drafter`."""
    engines = directory / str(ranks)
    sizes = {"slots": SLOTS, "max_seq_len": MAX_SEQ_LEN}
    build_engines(pair.target_dir, pair.drafter_dir, engines, **sizes, ranks=ranks)
    return engines


def outputs_of(target: Engine, drafter: Engine, text: list[int]) -> list[Any]:
    """Logits and features of a text, whole and in uneven chunks over the cache, and of two
    blocks of drafts.
    """
    found, features = [], []
    for row, start, end in ((0, 0, 40), (1, 0, 13), (1, 13, 14), (1, 14, 40)):
        outputs = target_step(target, text[start:end], start, row)
        found += [outputs[name].copy() for name in ("logits", "features")]
        features.append(found[-1][0])
    target.move_row(1, 2, 40)
    found.append(target_step(target, text[40:43], 40, 2)["logits"].copy())
    for seen, start in ((0, 17), (17, 20)):
        outputs = drafter_step(drafter, features[0][seen:start], text[start], seen, row=2)
        names = ("logits", "pair_scores") if "pair_scores" in outputs else ("logits",)
        found += [outputs[name].copy() for name in names]
    return found


def texts_of(target: Engine, drafter: Engine) -> list[list[int]]:
    block_size = drafter.info.block_size
    scheduler = scheduler_of(
        in_process(target, drafter), Fixed(block_size - 1), max_seq_len=MAX_SEQ_LEN, prefill_chunk=8
    )
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
    return [sequence.tokens for sequence in run_all(scheduler, requests)]


def assert_ranks_agree(
    pair: Pair, directory: Path, sizes: tuple[int, ...] = (2, 4), tolerance: float = TOLERANCE
) -> None:
    text = np.random.default_rng(0).integers(300, size=43).tolist()
    whole = engines_of(pair, directory, 1)
    alone = Engine(whole / "target"), Engine(whole / "drafter")
    expected, texts = outputs_of(*alone, text), texts_of(*alone)
    assert texts == reference.greedy(pair.target_dir, PROMPTS, NEW_TOKENS)
    for ranks in sizes:
        engines = engines_of(pair, directory, ranks)
        for role in ("target", "drafter"):
            for rank in range(ranks):
                at = rank_directory(engines / role, rank)
                assert_in_profile(at / "model.onnx", ranks)
                info = read_info(at, "onnxruntime")
                assert (info.rank, info.ranks) == (rank, ranks)
        together = Engine(engines / "target"), Engine(engines / "drafter")
        for found, wanted in zip(outputs_of(*together, text), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0)
        assert texts_of(*together) == texts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    pair = write_pair(tmp_path, config, DRAFTER | SLIDING)
    assert_ranks_agree(pair, tmp_path)


def own_vocabulary(directory: Path) -> Pair:
    """A head over 240 of the target's tokens."""
    pair = write_pair(directory, LLAMA, DRAFTER)
    to_speculators(pair, directory / "speculators", from_anchor=True, ids=range(40, 280))
    return Pair(pair.target_dir, directory / "speculators")


def biased(directory: Path) -> Pair:
    return write_pair(directory, LLAMA, DRAFTER | BIASED)


FORMATS: dict[str, Callable[[Path], Pair]] = {
    "dflash2": lambda directory: pair_of("llama", "dflash2", directory),
    "speculators-own-vocabulary": own_vocabulary,
    "biases": biased,
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_drafter_format(form: str, tmp_path: Path) -> None:
    assert_ranks_agree(FORMATS[form](tmp_path), tmp_path)


def test_eight_ranks_that_share_two_heads(tmp_path: Path) -> None:
    assert_ranks_agree(make_pair(tmp_path, heads=8, kv_heads=2), tmp_path, (8,))


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_the_experts_body_for_tensorrt(family: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, FAMILIES[family](), DRAFTER)
    target, taps = load_target(pair.target_dir), load_drafter(pair.drafter_dir).spec
    text = list(range(60, 90))
    expected = target_step(Engine(engines_of(pair, tmp_path, 1) / "target"), text, 0)
    engine = engines_of(pair, tmp_path, 2) / "target"
    for index in range(2):
        at = rank_directory(engine, index)
        rows = read_info(at, "onnxruntime").cache_len
        graph = target_graph(target, taps.target_layer_ids, rows, "tensorrt", rank=Rank(index, 2))
        graph.save(at, lambda name: None)
        assert_in_profile(at / "model.onnx", 2)
    found = target_step(Engine(engine), text, 0)
    for name in ("logits", "features"):
        np.testing.assert_allclose(found[name], expected[name], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "cut",
    [Shard(0, 1, 3), Shard(1, 32, 96), Shard(2, 64, 192), Shard(0, 128, 384), Shard(1, 128, 256)],
)
def test_parts_of_quantised_tensors(cut: Shard, tmp_path: Path) -> None:
    """Of FP8's matrices and MXFP4's stacks of them, whole and piece by piece."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn((512, 256), generator=generator).to(torch.float8_e4m3fn)
    packed = torch.randint(256, (4, 256, 4, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 130, (4, 256, 4), generator=generator, dtype=torch.uint8)
    scales = torch.rand((4, 2), generator=generator)
    whole = write(tmp_path / "fp8", {"x": codes, "x_scale_inv": scales}, FP8)
    if cut.axis == 2 or cut.stop < 100:
        mxfp4 = {"quant_method": "mxfp4"}
        whole = write(tmp_path / "mxfp4", {"x_blocks": packed, "x_scales": exponents}, mxfp4)
    part = whole.shard(lambda name, shape: cut)
    expected = np.take(whole.read("x"), range(cut.start, cut.stop), cut.axis)
    assert part.shape("x") == expected.shape
    assert (part.read("x") == expected).all()
    assert (np.concatenate(list(part.pieces("x", 100))) == expected).all()
    if expected.ndim == 3 and cut.axis:
        assert (part.read("x", 2) == expected[2]).all()
