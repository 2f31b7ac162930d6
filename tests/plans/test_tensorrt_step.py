"""TensorRT's step, over a stand-in of its runtime in this process's memory (stand_in_tensorrt.py).

What it binds, when and where, is what a GPU would get; what comes out shows whether it was right.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.config import TensorRT
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import PrefixCache, Request, check_lossless, in_process
from dflash_trt.engines.step import load_engine
from dflash_trt.engines.tensorrt import engine as engine_module
from dflash_trt.engines.tensorrt import library as library_module
from dflash_trt.engines.tensorrt import plan as plan_module
from dflash_trt.engines.tensorrt.plan import capabilities
from dflash_trt.errors import EngineError
from dflash_trt.speculation import Fixed
from tests.standins import tensorrt as stand_in_tensorrt
from tests.standins.tensorrt import ExecutionContext, Memory, make_plan
from tests.support.built_pairs import BuildPair, BuiltPair
from tests.support.equality import run_all, scheduler_of

CHUNK = 24


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", stand_in_tensorrt)
    monkeypatch.setattr(library_module, "compute_capabilities", lambda: ["8.9"])
    monkeypatch.setattr(engine_module, "Gpu", Memory)
    monkeypatch.setattr(ExecutionContext, "made", [])
    monkeypatch.setattr(Memory, "recorded", 0)


@pytest.fixture
def built(built_pair: BuildPair) -> BuiltPair:
    return built_pair()


@pytest.fixture
def plans(built: BuiltPair, gpu: None, tmp_path: Path) -> Path:
    shutil.copytree(built.target_engine.parent, tmp_path / "engines")
    for role in ("target", "drafter"):
        make_plan(tmp_path / "engines" / role, CHUNK)
    return tmp_path / "engines"


def test_greedy_text_is_the_targets_own(built: BuiltPair, plans: Path) -> None:
    prompts = [text[:40] for text in built.texts[:3]]
    whole = Speculation(draft_tokens=7)
    report = check_lossless(plans, prompts, 24, whole, lambda done: None)
    assert report.identical == report.total == 3
    assert report.tau > 2  # the drafter knows these texts
    # float16 may part from float32 where two tokens are as good; these texts have no such place
    alone = check_lossless(built.target_engine.parent, prompts, 24, whole, print)
    assert report.outputs == alone.outputs


def test_rows_share_a_round_and_move(built: BuiltPair, plans: Path) -> None:
    rounds = in_process(load_engine(plans / "target"), load_engine(plans / "drafter"))
    scheduler = scheduler_of(rounds, Fixed(7), prefill_chunk=CHUNK)
    # of several lengths, so that rows end in turn and others move into them
    asked = [Request(text[: 12 + 7 * i], 40 - 8 * i) for i, text in enumerate(built.texts[:5])]
    for request, sequence, text in zip(asked, run_all(scheduler, asked), built.texts, strict=False):
        start = len(request.prompt)
        assert sequence.tokens == text[start : start + request.max_tokens]


def test_a_prefix_that_is_kept_is_read_back(built: BuiltPair, plans: Path) -> None:
    rounds = in_process(load_engine(plans / "target"), load_engine(plans / "drafter"))
    text, found = built.texts[0], []
    for cache in (None, PrefixCache(20)):
        scheduler = scheduler_of(rounds, Fixed(7), prefill_chunk=CHUNK, prefix_cache=cache)
        # the same text each time, a little further
        requests = [Request(text[:length], 20) for length in (40, 50, 60)]
        found.append([run_all(scheduler, [request])[0] for request in requests])
    off, on = found
    assert [each.tokens for each in on] == [each.tokens for each in off]
    assert [each.committed_per_round for each in on] == [each.committed_per_round for each in off]
    assert [each.cached_tokens for each in on] == [0, 48, 48]


def test_rounds_are_recorded_when_they_come_again_and_chunks_are_not(
    built: BuiltPair, plans: Path
) -> None:
    engine = load_engine(plans / "target")
    engine.step(0, 1, 8, 32, 2)  # not run
    for width, visible in ((8, 32), (CHUNK, 32)):
        for _ in range(3):
            fill(engine.step(0, 1, width, visible, 1))
    round_, chunk = ExecutionContext.made
    assert (round_.profile, chunk.profile) == (0, 1)
    assert Memory.recorded == 1
    assert round_.runs == chunk.runs == 3


def test_logits_come_when_they_are_asked_for(built: BuiltPair, plans: Path) -> None:
    ours, whole = load_engine(plans / "target"), load_engine(built.target_engine)
    found = [fill(engine.step(2, 1, 8, 32, 8)) for engine in (ours, whole)]
    assert "logits" not in found[0]
    for name in ("logits", "features", "top_logits"):
        np.testing.assert_allclose(found[0][name], found[1][name], atol=0.1, rtol=0)
    with pytest.raises(KeyError):
        found[0]["pair_scores"]


def fill(step):  # type: ignore[no-untyped-def]
    """Fill in the first tokens of a text, with all or only the first of them scored."""
    width, scored = step.inputs["tokens"].shape[1], len(step.inputs["scored_tokens"])
    step.inputs["tokens"][:] = range(5, 5 + width)
    step.inputs["positions"][:] = range(width)
    step.inputs["write_index"][:] = 0
    step.inputs["mask"][:] = False
    step.inputs["mask"][:, :, :, :width] = np.tri(width, dtype=bool)
    step.inputs["scored_tokens"][:] = range(scored)
    step.run()
    return step.outputs


def test_a_step_that_no_profile_has_is_refused(plans: Path) -> None:
    engine = load_engine(plans / "target")
    with pytest.raises(EngineError, match="does not fit the plan"):
        fill(engine.step(0, 1, CHUNK + 1, 32, 1))


def test_a_plan_with_other_tensors_is_refused(plans: Path) -> None:
    path = plans / "target" / "engine.json"
    said = json.loads(path.read_text())
    said["plan"]["aliases"].pop("new_key_0")
    path.write_text(json.dumps(said))
    with pytest.raises(EngineError, match=r"not those of its engine\.json"):
        load_engine(plans / "target")


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("gpu", "no NVIDIA GPU"),
        ("capability", r"compute capability 8\.9, and GPU 0 here has 9\.0"),
        ("torch", "PyTorch, which is not here"),
        ("library", "the library tensorrt_rtx is not here"),
        ("version", r"built by tensorrt_rtx 1\.7\.stand-in, and here is 1\.8"),
    ],
)
def test_what_is_missing_is_said(
    plans: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, says: str
) -> None:
    if lacks in ("gpu", "capability"):
        found = [] if lacks == "gpu" else ["9.0"]
        monkeypatch.setattr(library_module, "compute_capabilities", lambda: found)
    elif lacks == "torch":
        monkeypatch.setattr(library_module, "find_spec", lambda name: None)
    elif lacks == "library":
        monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    else:
        monkeypatch.setattr(stand_in_tensorrt, "__version__", "1.8")
    with pytest.raises(EngineError, match=says):
        load_engine(plans / "target")


@pytest.mark.parametrize(
    ("library", "says"),
    [
        ("tensorrt_rtx", r"tensorrt_rtx is not here .* pip install 'dflash-trt\[rtx\]'"),
        ("tensorrt", "on the GPU that will run them, and here is none"),
    ],
)
def test_a_build_says_what_it_misses(
    monkeypatch: pytest.MonkeyPatch, library: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    monkeypatch.setitem(sys.modules, "tensorrt", stand_in_tensorrt)
    monkeypatch.setattr(plan_module, "compute_capabilities", list)
    with pytest.raises(EngineError, match=says):
        capabilities(TensorRT.model_validate({"kind": "tensorrt", "library": library}))
