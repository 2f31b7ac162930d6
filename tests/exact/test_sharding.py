"""Every family and drafter format cut for 2, 4 and 8 ranks: they compute what one computes.

The ranks' graphs run in turn, in this process (`lib/ranks.py`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import reference
import torch
from builds import build_engines, build_pair
from built_pairs import SLOTS
from exact import drafter_step, run_all, scheduler_of, target_step
from families import ATTENTION, BIASED, DRAFTER, FAMILIES, SLIDING, TARGET, pair_of, to_speculators
from op_profile import assert_in_profile
from pairs import Pair, make_pair, write_pair
from ranks import Ranks
from test_quantized import FP8, write
from transformers import LlamaConfig

from dflash_trt.checkpoints import Shard
from dflash_trt.decoding import Request, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.info import rank_directory, read_info
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.errors import ConfigError

pytestmark = pytest.mark.models

TOLERANCE = 2e-4
MAX_SEQ_LEN, NEW_TOKENS = 96, 24
PROMPTS = [[5, 17, 200, 44, 3], list(range(100, 119)), [7] * 11]
LLAMA = LlamaConfig(**TARGET, tie_word_embeddings=False)


def engines_of(pair: Pair, directory: Path, ranks: int) -> Path:
    engines = directory / str(ranks)
    sizes = {"slots": SLOTS, "max_seq_len": MAX_SEQ_LEN}
    build_engines(pair.target_dir, pair.drafter_dir, engines, **sizes, ranks=ranks)
    return engines


def outputs_of(target: Any, drafter: Any, text: list[int]) -> list[Any]:
    """Return logits and features of a text, whole and in chunks, and of two blocks of drafts."""
    found, features = [], []
    for row, start, end in ((0, 0, 40), (1, 0, 13), (1, 13, 14), (1, 14, 40)):
        outputs = target_step(target, text[start:end], start, row)
        found += [outputs[name].copy() for name in ("logits", "features")]
        features.append(found[-1][0])
    target.copy_kv(1, 2, 40)
    found.append(target_step(target, text[40:43], 40, 2)["logits"].copy())
    for seen, start in ((0, 17), (17, 20)):
        outputs = drafter_step(drafter, features[0][seen:start], text[start], seen, row=2)
        names = ("logits", "pair_scores") if "pair_scores" in outputs else ("logits",)
        found += [outputs[name].copy() for name in names]
    return found


def texts_of(target: Any, drafter: Any) -> list[list[int]]:
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
                info = read_info(at)
                assert (info.rank, info.ranks) == (rank, ranks)
        together = Ranks(engines / "target"), Ranks(engines / "drafter")
        for found, wanted in zip(outputs_of(*together, text), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0)
        assert texts_of(*together) == texts


@pytest.mark.parametrize("family", ATTENTION)
def test_every_family(family: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, FAMILIES[family](), DRAFTER | SLIDING)
    assert_ranks_agree(pair, tmp_path)


def own_vocabulary(directory: Path) -> Pair:
    pair = write_pair(directory, LLAMA, DRAFTER)
    to_speculators(pair, directory / "speculators", from_anchor=True, ids=range(40, 280))
    return Pair(pair.target_dir, directory / "speculators")


FORMATS: dict[str, Callable[[Path], Pair]] = {
    "dflash2": lambda directory: pair_of("llama", "dflash2", directory),
    "speculators-own-vocabulary": own_vocabulary,
    "biases": lambda directory: write_pair(directory, LLAMA, DRAFTER | BIASED),
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_drafter_format(form: str, tmp_path: Path) -> None:
    assert_ranks_agree(FORMATS[form](tmp_path), tmp_path)


def test_eight_ranks_that_share_two_heads(tmp_path: Path) -> None:
    assert_ranks_agree(make_pair(tmp_path, heads=8, kv_heads=2), tmp_path, (8,))


def test_each_rank_has_its_share(tmp_path: Path) -> None:
    """Ranks have the same nodes with half of the weights; one rank alone has no collectives."""
    pair = make_pair(tmp_path, dtype="bfloat16", tied=False)
    whole, halves = (engines_of(pair, tmp_path, ranks) for ranks in (1, 2))
    for role in ("target", "drafter"):
        places = [whole / role, *(rank_directory(halves / role, rank) for rank in range(2))]
        graphs = [onnx.load(at / "model.onnx", load_external_data=False).graph for at in places]
        alone, *kinds = ([(n.op_type, len(n.input)) for n in graph.node] for graph in graphs)
        assert kinds[0] == kinds[1]
        assert "DistCollective" not in {kind for kind, _ in alone}
        sizes = [(at / "model.onnx.data").stat().st_size for at in places]
        assert sizes[1] == sizes[2] < 0.8 * sizes[0]


UNEVEN = [
    ({"heads": 6}, 4, "the target cannot be cut for 4 ranks: num_attention_heads 6 / 4"),
    ({"heads": 6, "kv_heads": 3}, 2, "num_key_value_heads 3 / 2"),
    ({"intermediate": 92}, 8, "num_attention_heads 4 / 8, intermediate_size 92 / 8"),
    ({"vocab": 330}, 4, "vocab_size 330 / 4"),
]


@pytest.mark.parametrize(("shape", "ranks", "numbers"), UNEVEN)
def test_uneven_shapes_are_refused(
    shape: dict[str, int], ranks: int, numbers: str, tmp_path: Path
) -> None:
    make_pair(tmp_path, **shape)
    plans = {"kind": "tensorrt", "library": "tensorrt_rtx", "tensor_parallel_size": ranks}
    with pytest.raises(ConfigError) as raised:
        build_pair(tmp_path, tmp_path / "built", **plans)
    assert numbers in raised.value.problem
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize(
    "cut",
    [Shard(0, 1, 3), Shard(1, 32, 96), Shard(2, 64, 192), Shard(0, 128, 384), Shard(1, 128, 256)],
)
def test_parts_of_quantized_tensors(cut: Shard, tmp_path: Path) -> None:
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
