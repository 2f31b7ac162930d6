"""`examples/inflate.py`: a larger pair says the same, by `transformers` and by z-lab's loop."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import reference
from built_pairs import BuildPair

from dflash_trt.checkpoints import load_target

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from inflate import Shape, inflate_pair, places

NEW_TOKENS = 40
QWEN3 = {"family": "qwen3", "heads": 4, "kv_heads": 2, "tied": True, "taps": (0, 2)}
LLAMA = {"family": "llama", "heads": 4, "kv_heads": 1, "tied": False, "taps": (1,)}


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        (QWEN3, Shape(96, 7, 8, 2, 32, 160, 400, 2)),  # four query heads a kv head, not two
        (QWEN3, Shape(80, 4, 4, 2, 16, 128, 320, 1)),  # only hidden channels
        (LLAMA, Shape(132, 5, 6, 3, 64, 200, 321, 3)),  # two, not four: the kv head is there twice
    ],
)
def test_logits_text_and_rounds_stay(
    built_pair: BuildPair, tmp_path: Path, family: dict[str, object], shape: Shape
) -> None:
    built = built_pair(**family)
    pair = built.pair
    inflate_pair(pair.target_dir.parent, shape, tmp_path)
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    spec = load_target(pair.target_dir).spec
    old_taps = built.drafter.spec.target_layer_ids
    new_taps = [
        (tap + 1) * shape.num_hidden_layers // spec.num_hidden_layers - 1 for tap in old_taps
    ]
    text = built.texts[0]
    logits, features = reference.target_logits_and_taps(pair.target_dir, text, old_taps)
    large, large_features = reference.target_logits_and_taps(target, text, new_taps)
    scale = np.abs(logits).max()
    np.testing.assert_allclose(large[:, : spec.vocab_size], logits, atol=1e-3 * scale, rtol=0)
    assert (large[:, spec.vocab_size :] < logits.min() - scale).all()
    for i in range(len(old_taps)):
        start = i * shape.hidden_size
        np.testing.assert_allclose(
            large_features[:, start : start + spec.hidden_size],
            features[:, i * spec.hidden_size : (i + 1) * spec.hidden_size],
            atol=1e-3 * np.abs(features).max(),
        )

    prompts = [line[: 12 + 3 * i] for i, line in enumerate(built.texts[:4])]
    small = reference.dflash_generate(pair.target_dir, pair.drafter_dir, prompts, NEW_TOKENS)
    assert reference.greedy(target, prompts, NEW_TOKENS) == [each.tokens for each in small]
    assert reference.dflash_generate(target, drafter, prompts, NEW_TOKENS) == small
    assert any(length > 1 for each in small for length in each.acceptance_lengths)


def test_a_shape_that_is_too_small_is_refused(built_pair: BuildPair) -> None:
    spec = built_pair(**QWEN3).target.spec
    with pytest.raises(ValueError, match="intermediate_size 95 is below 96"):
        places(spec, Shape(96, 4, 4, 2, 16, 95, 320, 1))
    with pytest.raises(ValueError, match="head_dim 24 is no multiple of 16"):
        places(spec, Shape(96, 4, 4, 2, 24, 96, 320, 1))
