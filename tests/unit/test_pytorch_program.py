"""Engine kind `pytorch` on the CPU, node by node, against ONNX Runtime."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from dflash_trt.builder import read_manifest
from dflash_trt.config import Speculation, Storage
from dflash_trt.decoding import Request, check_lossless, in_process
from dflash_trt.engines import Engine, load_engine, onnxruntime, read_info, write_info
from dflash_trt.engines.pytorch import GRAPH_FILE
from dflash_trt.engines.pytorch.program import Program
from dflash_trt.errors import EngineError
from dflash_trt.speculation import Choice, Fixed, NextStep
from tests.support.builds import build_engines, build_pair
from tests.support.equality import drafter_step, run_all, scheduler_of, target_step
from tests.support.families import CELLS, FORMS, HYBRIDS, make, pair_of
from tests.support.pairs import Pair, make_endless, make_pair, teach

SLOTS, LENGTH = 3, 96
CACHES = [f"{which}_{layer}" for layer in range(4) for which in ("key", "value")]
KINDS = ("onnxruntime", "pytorch")
ROLES = ("target", "drafter")
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
    found = {}
    for kind, path in built.items():
        target, drafter = load_engine(path / "target"), load_engine(path / "drafter")
        found[kind] = decoded(target, drafter, Fixed(5))
    assert found["pytorch"] == found["onnxruntime"]


def decoded(target: Engine, drafter: Engine, policy: Fixed) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of texts that are drafted together, and how many came in each round."""
    prompts = [[(31 * i + 7 * k) % 300 for i in range(9 + 4 * k)] for k in range(3)]
    rounds = in_process(target, drafter)
    scheduler = scheduler_of(rounds, policy, slots=SLOTS, max_seq_len=LENGTH)
    sequences = run_all(scheduler, [Request(prompt, 24) for prompt in prompts])
    assert sum(sequence.drafted for sequence in sequences) > 0
    return [(sequence.tokens, sequence.committed_per_round) for sequence in sequences]


@pytest.mark.parametrize(("family", "form"), FEW)
def test_numbers_and_texts_are_onnx_runtimes(family: str, form: str, tmp_path: Path) -> None:
    built = both_kinds(pair_of(family, form, tmp_path), tmp_path)
    assert_same_numbers(built)
    assert_same_texts(built)


class NowAndThen(Fixed):
    """Drafts after every third round: the features of the others wait."""

    rounds = 0

    def choose(self, step: NextStep) -> Choice:
        choice = super().choose(step)
        if step.is_prompt:
            return choice
        self.rounds += 1
        return choice if self.rounds % 3 == 0 else Choice(choice.proposals, 0)


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_features_stay_where_both_models_are(family: str, tmp_path: Path) -> None:
    """They are copied to the host where another process has the drafter; texts are the same."""
    pair, engines = make(family, tmp_path), tmp_path / "engines"
    sizes = {"slots": SLOTS, "max_seq_len": LENGTH, "kind": "pytorch"}
    build_engines(pair.target_dir, pair.drafter_dir, engines, **sizes)
    found = []
    for alone in (False, True):
        target = load_engine(engines / "target", alone=alone)
        drafter = load_engine(engines / "drafter", alone=alone)
        made = target.step(0, 1, 1, 64, 1).outputs["features"]
        taken = drafter.step(0, 1, 2, 64, 1, 1).inputs["features"]
        assert isinstance(made, np.ndarray) == isinstance(taken, np.ndarray) == alone
        found.append(decoded(target, drafter, NowAndThen(5)))
    assert found[0] == found[1]


class InTurn(Fixed):
    """Verifies one draft, then two, and so on."""

    rounds = 0

    def choose(self, step: NextStep) -> Choice:
        choice = super().choose(step)
        if step.is_prompt:
            return choice
        self.rounds += 1
        length = self.rounds % (self.draft_tokens + 1)
        cut = [proposal and proposal.cut(length) for proposal in choice.proposals]
        return Choice(cut if length else [None] * len(cut), choice.draft_tokens)


@pytest.mark.parametrize(
    ("family", "prompts"),
    # the last chunk has no room for 64 rows; what follows a hybrid's known tokens is a draft
    [("llama", {29, 64}), ("qwen3.5", {19, 27, 29, 33})],
)
def test_sizes_of_steps_are_few(family: str, prompts: set[int], tmp_path: Path) -> None:
    """Each is recorded; what pads them changes no text, up to the end of the caches."""
    pair = make(family, tmp_path)
    requests = [
        Request((text + text)[:length], LENGTH - length)
        for text, length in zip(teach(pair), (5, 19, 41, 60, 95), strict=False)
    ]
    engines, sequences = dict[str, list[Any]](), {}
    for kind, path in both_kinds(pair, tmp_path).items():
        engines[kind] = [load_engine(path / role) for role in ROLES]
        rounds = in_process(*engines[kind])
        scheduler = scheduler_of(rounds, InTurn(7), slots=1, max_seq_len=LENGTH, prefill_chunk=33)
        sequences[kind] = run_all(scheduler, requests)
    texts = {kind: [each.tokens for each in decoded] for kind, decoded in sequences.items()}
    assert texts["pytorch"] == texts["onnxruntime"]
    target, drafter = engines["pytorch"]
    assert {width for _, _, width, *_ in target._steps} == {1, 2, 4, 8} | prompts
    assert len({sizes[:-1] for sizes in drafter._steps}) == 1  # but for the features
    accepted = {count - 1 for each in sequences["pytorch"] for count in each.committed_per_round}
    assert accepted >= {0, 1, 2, 3}
    replayed = {counts[1] for counts, *_ in target._lowered}
    assert replayed == ({0} if family == "llama" else {0, 1, 2, 4})


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


def test_matrices_in_e4m3_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the standard says: ONNX Runtime's own optimizations would round inputs to 8 bits."""
    load = onnxruntime.load_session

    def as_written(*given: Any) -> Any:
        given[2].graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return load(*given)

    monkeypatch.setattr(onnxruntime, "load_session", as_written)
    pair = make_pair(tmp_path / "pair")
    storage = Storage(fp8=True)
    sizes: dict[str, Any] = {"slots": SLOTS, "max_seq_len": LENGTH, "storage": storage}
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "onnxruntime", **sizes)
    shutil.copytree(tmp_path / "onnxruntime", tmp_path / "pytorch")
    for role in ("target", "drafter"):
        directory = tmp_path / "pytorch" / role
        write_info(directory, replace(read_info(directory), kind="pytorch"))
    assert_same_numbers({kind: tmp_path / kind for kind in KINDS})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_near_float32(dtype: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair")
    steps, text = {}, [(7 * i + 3) % 301 for i in range(40)]
    for name in ("float32", dtype):
        sizes: dict[str, Any] = {"slots": SLOTS, "max_seq_len": LENGTH, "kind": "pytorch"}
        build_engines(pair.target_dir, pair.drafter_dir, tmp_path / name, dtype=name, **sizes)
        engine = load_engine(tmp_path / name / "target")
        steps[name] = np.array(target_step(engine, text, 0, 1)["logits"])
        assert engine.info.token_bytes == 4 * 2 * 2 * 16 * (4 if name == "float32" else 2)
    difference = np.abs(steps["float32"] - steps[dtype]).max()
    assert 0 < difference < 0.1 * np.abs(steps["float32"]).max()


def test_an_operator_that_is_not_known_is_named(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair")
    path = both_kinds(pair, tmp_path)["pytorch"] / "target" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    bodies = [node for function in model.functions for node in function.node]
    node = next(node for node in bodies if node.op_type == "Sigmoid")
    node.op_type = "Erf"
    onnx.save(model, path)
    with pytest.raises(EngineError, match="the operator Erf, which engine kind pytorch"):
        target_step(load_engine(path.parent), [1, 2, 3], 0)


def test_a_size_that_depends_on_numbers_is_named(tmp_path: Path) -> None:
    """The body of a mixture of experts for a CPU sorts tokens by expert."""
    pair = pair_of("qwen3-moe", "z-lab", tmp_path)
    sizes: dict[str, Any] = {"slots": SLOTS, "max_seq_len": LENGTH}
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "engines", **sizes)
    directory = tmp_path / "engines" / "target"
    write_info(directory, replace(read_info(directory), kind="pytorch"))
    with pytest.raises(EngineError, match=r"Split has the size .*, which depends on numbers"):
        target_step(load_engine(directory), [1, 2, 3], 0)


def test_values_are_freed_after_their_last_use(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair")
    path = both_kinds(pair, tmp_path)["pytorch"] / "target"
    engine = load_engine(path)
    step = engine.step(0, 1, 2, 32, 1)
    program = Program(path / GRAPH_FILE, torch.float32, "cpu")
    caches = {value: torch.zeros(1, 2, engine.info.cache_len, 16) for value in CACHES}
    inputs = {name: torch.from_numpy(array) for name, array in step.inputs.items()}
    calls = program.calls(inputs | caches)
    freed = [name for call in calls.calls for name in call.last]
    made = {name for call in calls.calls for name in call.outputs}
    assert len(freed) == len(set(freed))
    assert {*freed} == made - {*calls.results}


def test_a_build_decodes_in_process(tmp_path: Path) -> None:
    """From the config to a text, in bfloat16: drafts change nothing of it."""
    pair = make_pair(tmp_path)
    make_endless(pair)
    build_pair(tmp_path, tmp_path / "built", kind="pytorch")
    manifest = read_manifest(tmp_path / "built")["config"]
    assert manifest["engine"] == {"kind": "pytorch", "dtype": "bfloat16", "quantize": None}
    assert manifest["serving"]["mode"] == "in_process"
    engines = tmp_path / "built" / "engines"
    assert [read_info(engines / role).kind for role in ("target", "drafter")] == ["pytorch"] * 2
    prompts = [[(11 * i + k) % 300 for i in range(12)] for k in range(2)]
    report = check_lossless(engines, prompts, 24, Speculation(draft_tokens=5), lambda done: None)
    assert report.total == 2
    assert all(len(text) == 24 for text in report.outputs)
