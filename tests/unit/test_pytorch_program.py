"""Engine kind `pytorch` on the CPU, node by node, against ONNX Runtime."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builds import build_engines
from exact import drafter_step, run_all, scheduler_of, target_step
from families import CELLS, FORMS, HYBRIDS, make, pair_of
from pairs import Pair

from dflash_trt.decoding import Request, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines import load_engine
from dflash_trt.engines.pytorch.program import Program
from dflash_trt.errors import EngineError
from dflash_trt.graphs import Storage

SLOTS, LENGTH = 3, 96
KINDS = ("onnxruntime", "pytorch")
FEW = [("qwen3", "z-lab"), ("gemma2", "z-lab"), ("qwen3", "dflash2")]
OTHERS = [cell for cell in CELLS if cell not in FEW]


def both_kinds(pair: Pair, directory: Path, **options: Any) -> dict[str, Path]:
    """Build a pair as both kinds; return their directories."""
    built = {kind: directory / kind for kind in KINDS}
    for kind, path in built.items():
        sizes = {"slots": SLOTS, "max_seq_len": LENGTH, "kind": kind} | options
        build_engines(pair.target_dir, pair.drafter_dir, path, **sizes)
    return built


def assert_same_numbers(built: dict[str, Path]) -> None:
    """Assert that prompts, single tokens, drafts and both models' rows agree to 1e-4."""
    targets = {kind: load_engine(path / "target") for kind, path in built.items()}
    drafters = {kind: load_engine(path / "drafter") for kind, path in built.items()}
    text = [(7 * i * i + 3 * i) % 301 for i in range(60)]
    for start, end in ((0, 33), (33, 34), (34, 50)):
        theirs, ours = (target_step(targets[kind], text[start:end], start, 1) for kind in KINDS)
        for name in ("logits", "features", "top_logits"):
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4, rtol=1e-5)
        assert (ours["top_ids"] == theirs["top_ids"]).all()
        features = np.array(theirs["features"][0])
        theirs, ours = (drafter_step(drafters[kind], features, 5, start, 1) for kind in KINDS)
        for name in {*theirs} - {"top_ids"} | {"logits"}:
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4, rtol=1e-5)


def assert_same_texts(built: dict[str, Path]) -> None:
    """Assert that texts drafted together are those of ONNX Runtime, and as many in each round."""
    prompts = [[(31 * i + 7 * k) % 300 for i in range(9 + 4 * k)] for k in range(3)]
    found = {}
    for kind, path in built.items():
        rounds = in_process(load_engine(path / "target"), load_engine(path / "drafter"))
        scheduler = scheduler_of(rounds, Fixed(5), slots=SLOTS, max_seq_len=LENGTH)
        sequences = run_all(scheduler, [Request(prompt, 24) for prompt in prompts])
        found[kind] = [(each.tokens, each.committed_per_round) for each in sequences]
    assert found["pytorch"] == found["onnxruntime"]


@pytest.mark.parametrize(("family", "form"), FEW)
def test_numbers_and_texts_are_onnx_runtimes(family: str, form: str, tmp_path: Path) -> None:
    built = both_kinds(pair_of(family, form, tmp_path), tmp_path)
    assert_same_numbers(built)
    assert_same_texts(built)


@pytest.mark.models
@pytest.mark.parametrize(("family", "form"), OTHERS)
def test_every_family_and_format(family: str, form: str, tmp_path: Path) -> None:
    built = both_kinds(pair_of(family, form, tmp_path), tmp_path)
    assert_same_numbers(built)
    assert_same_texts(built)


@pytest.mark.models
@pytest.mark.parametrize("name", [*FORMS, *HYBRIDS, "gemma4-31b", "gemma3-with-vision"])
def test_every_form_and_hybrid(name: str, tmp_path: Path) -> None:
    built = both_kinds(make(name, tmp_path), tmp_path)
    assert_same_numbers(built)
    assert_same_texts(built)


def test_a_hybrid_is_rolled_back(tmp_path: Path) -> None:
    built = both_kinds(make("qwen3.5", tmp_path), tmp_path)
    assert_same_numbers(built)
    assert_same_texts(built)
