"""Engine kind `pytorch` with its kernels: the program's numbers, and rows that stay as they are.

In Triton's interpreter, or compiled where a GPU is.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.config import Storage
from dflash_trt.decoding import Request, SamplingParams, in_process
from dflash_trt.decoding.sequence import SequenceState
from dflash_trt.engines import load_engine
from dflash_trt.engines.info import read_info
from dflash_trt.engines.pytorch import GRAPH_FILE, fusion, operators
from dflash_trt.engines.pytorch.engine import Engine
from dflash_trt.engines.pytorch.program import Calls, Program
from dflash_trt.graphs.builder import PART_DOMAIN
from dflash_trt.speculation import Fixed
from dflash_trt.weights.gguf import as_directory
from tests.support import ggufs
from tests.support.builds import build_engines, edit, edit_weights
from tests.support.equality import drafter_step, run_all, scheduler_of, target_step
from tests.support.families import make, pair_of
from tests.support.interpreted import DEVICE, in_order
from tests.support.pairs import Pair, make_pair, teach

SLOTS, LENGTH = 3, 64
# what depends on other rows, if PyTorch does it
BY_ROWS = {
    operators.OPERATORS[name]
    for name in ("Attention", "Gemm", "LinearAttention", "MatMul", "RMSNormalization")
}
FEW = [("gemma2", "z-lab"), ("qwen3", "z-lab")]
OTHERS = [
    *((family, "z-lab") for family in ("gemma4", "gpt-oss", "qwen2", "qwen3-moe")),
    ("qwen3", "dflash2"),
]


@pytest.fixture(autouse=True)
def sums_in_order() -> Iterator[None]:
    with in_order():
        yield


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    """Return the calls of each step, as they are made."""
    seen: list[Calls] = []
    kernel_calls = fusion.kernel_calls

    def watched(*given: Any) -> Calls:
        seen.append(kernel_calls(*given))
        return seen[-1]

    monkeypatch.setattr(fusion, "kernel_calls", watched)
    return seen


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    """Return the calls of each step before kernels take them."""
    seen: list[Calls] = []
    calls = Program.calls

    def watched(*given: Any) -> Calls:
        seen.append(calls(*given))
        return seen[-1]

    monkeypatch.setattr(Program, "calls", watched)
    return seen


def loaded(directory: Path, *, fuses: bool, alone: bool = True) -> Engine:
    """Load an engine; alone: its features are numpy's."""
    engine = load_engine(directory, alone)
    assert isinstance(engine, Engine)
    if fuses:
        engine.use_kernels()
    return engine


def built(pair: Pair, directory: Path, dtype: str = "float32", **options: Any) -> Path:
    sizes: dict[str, Any] = {"slots": SLOTS, "max_seq_len": LENGTH, "kind": "pytorch"} | options
    build_engines(pair.target_dir, pair.drafter_dir, directory / dtype, dtype=dtype, **sizes)
    return directory / dtype


def assert_numbers_stay(engines: Path, lowered: list[Calls]) -> None:
    """Assert that kernels give the program's numbers, and that none of `BY_ROWS` is left."""
    targets = [loaded(engines / "target", fuses=fuses) for fuses in (False, True)]
    drafters = [loaded(engines / "drafter", fuses=fuses) for fuses in (False, True)]
    text = [(7 * i * i + 3 * i) % 301 for i in range(20)]
    # beyond a window of 10 tokens
    for start, end in ((0, 11), (11, 12), (12, 14)):
        plain, fused = (target_step(engine, text[start:end], start, 1) for engine in targets)
        for name in ("logits", "features", "top_logits"):
            np.testing.assert_allclose(fused[name], plain[name], atol=2e-4, rtol=1e-5)
        assert not {call.run for call in lowered[-1].calls} & BY_ROWS
        features = np.array(plain["features"][0])
        plain, fused = (drafter_step(engine, features, 5, start, 1) for engine in drafters)
        for name in {*plain} - {"top_ids"} | {"logits"}:
            np.testing.assert_allclose(fused[name], plain[name], atol=2e-4, rtol=1e-5)
    for engines_of_role in (targets, drafters):
        plain, fused = map(step_of_two, engines_of_role)
        for name in {*plain} - {"top_ids"} | {"logits"}:
            np.testing.assert_allclose(fused[name], plain[name], atol=2e-4, rtol=1e-5)


def step_of_two(engine: Engine) -> dict[str, Any]:
    """Step two sequences that are at different places of their texts; return the outputs."""
    width, visible, starts = 4, 32, np.array([[5], [9]])
    context = 3 if engine.info.role == "drafter" else 0
    step = engine.step(1, 2, width, visible, 2 * width, context)
    inputs = step.inputs
    inputs["block" if context else "tokens"][:] = np.arange(8).reshape(2, width)
    inputs["positions"][:] = starts + np.arange(context + width)
    inputs["write_index"][:] = starts[:, 0]
    for mask, start in zip(inputs["mask"], starts[:, 0], strict=True):
        mask[:] = np.tri(width, visible, start + context, dtype=bool)
    inputs["scored_tokens"][:] = np.arange(2 * width)
    if context:
        size = engine.info.feature_size
        inputs["features"][:] = np.linspace(-1, 1, 6 * size).reshape(2, context, size)
    if engine.info.states is not None:
        inputs["known"][:], inputs["accepted"][:] = 1, [2, 0]
    step.run()
    return step.outputs


def test_each_kernel_gives_what_its_body_does(tmp_path: Path, as_written: list[Calls]) -> None:
    """Of random inputs, for each form that a part has in these families and their drafters."""
    forms = set()
    for family in ("llama", "gemma2", "gemma4-31b", "qwen3-moe", "gpt-oss", "qwen3.5"):
        engines = built(make(family, tmp_path / family), tmp_path / family)
        for role in ("target", "drafter"):
            step_of_two(loaded(engines / role, fuses=False))
            shapes = as_written[-1].shapes
            model = ir.load(engines / role / GRAPH_FILE)
            for node in model.graph.all_nodes():
                form = (node.op_type, str(node.attributes), tuple(map(bool, node.inputs)))
                if (
                    node.domain == PART_DOMAIN
                    and node.op_type in fusion.KERNELS
                    and form not in forms
                ):
                    forms.add(form)
                    function = model.functions[node.op_identifier()]
                    assert_kernel_is_body(node, function, shapes, tmp_path)
    assert {name for name, *_ in forms} == fusion.KERNELS.keys() - {"RMSNormalization"}


def assert_kernel_is_body(
    node: ir.Node, function: ir.Function, shapes: dict[str, torch.Tensor], directory: Path
) -> None:
    pairs = zip(function.inputs, node.inputs, strict=False)
    names = [value.name if given else None for value, given in pairs]
    inputs = {
        str(name): random_input(str(name), shapes[str(given.name)])
        for name, given in zip(names, node.inputs, strict=True)
        if given is not None
    }
    values = {name: ir.Value(name=name) for name in inputs}
    alone = ir.Node(
        PART_DOMAIN,
        node.op_type,
        [None if name is None else values[name] for name in names],
        node.attributes.values(),
        overload=node.overload,
        outputs=[ir.Value(name=f"out_{i}") for i in range(len(node.outputs))],
    )
    imports = {PART_DOMAIN: 1} | function.opset_imports
    graph = ir.Graph(values.values(), alone.outputs, nodes=[alone], opset_imports=imports, name="_")
    path = directory / "part.onnx"
    ir.save(ir.Model(graph, ir_version=11, functions=[function]), path)
    program = Program(path, torch.float32, DEVICE)
    lowered = (program.calls(inputs), fusion.kernel_calls(program, inputs, 0, 0, torch.float32))
    body, kernel = (
        calls.run({name: each.clone().to(DEVICE) for name, each in inputs.items()})
        for calls in lowered
    )
    assert node.op_type in {call.op for call in lowered[1].calls}
    for name, expected in body.items():
        result = kernel[name]
        if node.op_type == "ExpertProduct":  # the others are not used
            chosen = inputs["shares"].to(DEVICE) != 0
            result, expected = result * chosen, expected * chosen
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_parts_without_a_kernel_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = built(make("gpt-oss", tmp_path), tmp_path)
    with caplog.at_level(logging.INFO):
        for role in ("target", "drafter"):
            loaded(engines / role, fuses=True)
    assert caplog.messages == ["target: no kernel for ClampedGate: run as PyTorch's operators"]


def random_input(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return numbers that a part may get in this input."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel()))
    if name == "mask":
        return numbers > -1
    if name in ("positions", "stored_positions", "write_index"):
        return torch.arange(like.numel()).reshape(like.shape)
    if name == "counts":
        return (numbers > 0).float()
    if name == "shares":
        numbers[0] = 0  # of an expert that nobody chose
        return numbers.clamp(0)
    if name == "decays":
        return -numbers.abs()
    return numbers / 2


@pytest.mark.parametrize(("family", "form"), FEW)
def test_kernels_give_the_same_numbers(
    family: str, form: str, tmp_path: Path, lowered: list[Calls]
) -> None:
    assert_numbers_stay(built(pair_of(family, form, tmp_path), tmp_path), lowered)


@pytest.mark.models
@pytest.mark.parametrize(("family", "form"), OTHERS)
def test_kernels_of_every_kind(
    family: str, form: str, tmp_path: Path, lowered: list[Calls]
) -> None:
    assert_numbers_stay(built(pair_of(family, form, tmp_path), tmp_path), lowered)


@pytest.mark.models
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "scales, all at top level"])
def test_kernels_of_hybrids_and_forms(name: str, tmp_path: Path, lowered: list[Calls]) -> None:
    assert_numbers_stay(built(make(name, tmp_path), tmp_path), lowered)


@pytest.mark.models
def test_kernels_of_tiled_value_heads(tmp_path: Path, lowered: list[Calls]) -> None:
    pair = make("qwen3.5", tmp_path)
    file = ggufs.write(tmp_path / "model.gguf", pair.target_dir)
    assert_numbers_stay(built(Pair(as_directory(file), pair.drafter_dir), tmp_path), lowered)


def test_kernels_read_fp8(tmp_path: Path, lowered: list[Calls]) -> None:
    pair = make_pair(tmp_path / "pair", layers=2, taps=(0,))
    engines = built(pair, tmp_path, storage=Storage(fp8=True))
    assert_numbers_stay(engines, lowered)
    assert "DequantizeLinear" not in {call.op for call in lowered[-1].calls}
    assert_rows_stay(built(pair, tmp_path, "bfloat16", storage=Storage(fp8=True)))


def test_fp8_checkpoints_are_kept_as_they_are(tmp_path: Path, lowered: list[Calls]) -> None:
    """As in Qwen's FP8 files: matrices in e4m3 with a scale for each block of 128 by 128."""
    pair = make_pair(tmp_path / "pair", layers=2, taps=(0,), hidden=160, intermediate=192)
    before = pair.target_dir / "model.safetensors"
    matrices = [name for name in load_file(before) if name.endswith("_proj.weight")]
    edit_weights(pair.target_dir, partial(quantize_blocks, names=matrices))
    edit(
        pair.target_dir,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    plain = built(pair, tmp_path / "plain")
    kept = built(pair, tmp_path / "kept", storage=Storage(keep_fp8=True))
    assert (read_info(plain / "target").fp8, read_info(kept / "target").fp8) == (False, True)
    sizes = [(each / "target" / f"{GRAPH_FILE}.data").stat().st_size for each in (plain, kept)]
    stored = load_file(before)
    assert sizes[0] - sizes[1] > 2.8 * sum(stored[name].numel() for name in matrices)
    assert_numbers_stay(kept, lowered)
    assert "DequantizeLinear" not in {call.op for call in lowered[-1].calls}
    text = [(7 * i * i + 3 * i) % 301 for i in range(20)]
    logits = [
        target_step(loaded(each / "target", fuses=True), text, 0, 1)["logits"]
        for each in (plain, kept)
    ]
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-4, rtol=1e-5)


def quantize_blocks(tensors: dict[str, torch.Tensor], names: Sequence[str]) -> None:
    for name in names:
        matrix = tensors[name].float()
        rows, columns = (-(-size // 128) for size in matrix.shape)
        scales = torch.ones(rows, columns)
        codes = torch.zeros(matrix.shape, dtype=torch.float8_e4m3fn)
        for row, column in np.ndindex(rows, columns):
            part = np.s_[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
            scales[row, column] = matrix[part].abs().max() / 448
            codes[part] = (matrix[part] / scales[row, column]).to(codes.dtype)
        tensors |= {name: codes, f"{name}_scale_inv": scales}


# --- rows -----------------------------------------------------------------------------------------


def step_logits(
    engine: Engine, texts: Sequence[Sequence[int]], start: int, row: int = 0
) -> np.ndarray:
    """Return the logits of a step of several sequences, `[n, width, vocab]`, at `start` of each."""
    n, width = len(texts), len(texts[0])
    step = engine.step(row, n, width, start + width, n * width)
    step.inputs["tokens"][:] = texts
    step.inputs["positions"][:] = start + np.arange(width)
    step.inputs["write_index"][:] = start
    step.inputs["mask"][..., :start] = True
    step.inputs["mask"][..., start:] = np.tri(width, dtype=bool)
    step.inputs["scored_tokens"][:] = np.arange(n * width)
    if engine.info.states is not None:
        step.inputs["known"][:], step.inputs["accepted"][:] = width, 0
    step.run()
    return np.array(step.outputs["logits"]).reshape(n, width, -1)


def assert_rows_stay(engines: Path) -> None:
    """Assert that logits are bit for bit those of one token at a time, drafts and others beside."""
    engine = loaded(engines / "target", fuses=True)
    texts = [[(11 * i * i + 5 * k + 2) % 301 for i in range(6)] for k in range(SLOTS)]
    together = step_logits(engine, texts, 0)
    alone = [step_logits(engine, [texts[1][place : place + 1]], place, 2) for place in range(6)]
    np.testing.assert_array_equal(np.concatenate([*alone], 1)[0], together[1])
    whole = step_logits(engine, texts[:1], 0)
    np.testing.assert_array_equal(whole[0], together[0])


def test_rows_do_not_depend_on_each_other(tmp_path: Path) -> None:
    """Of 6 tokens, 18 rows in all: other tiles than for one."""
    pair = make_pair(tmp_path / "pair", layers=2, taps=(0,))
    assert_rows_stay(built(pair, tmp_path, "bfloat16"))


@pytest.mark.models
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "qwen3-moe"])
def test_rows_of_other_families(family: str, tmp_path: Path) -> None:
    assert_rows_stay(built(pair_of(family, "z-lab", tmp_path), tmp_path, "bfloat16"))


@pytest.mark.models
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=7)])
def test_drafts_change_no_text_in_16_bits(sampling: SamplingParams, tmp_path: Path) -> None:
    """Three texts decoded plainly one by one, drafted one by one, and drafted together."""
    pair = make_pair(tmp_path / "pair", layers=2, taps=(0,))
    prompts = [text[: 13 + k] for k, text in enumerate(teach(pair)[:SLOTS])]
    engines = built(pair, tmp_path, "bfloat16")
    target, drafter = (
        loaded(engines / role, fuses=True, alone=False) for role in ("target", "drafter")
    )
    requests = [Request(prompt, 8, sampling) for prompt in prompts]

    def decoded(drafts: int, batches: Sequence[Sequence[Request]]) -> list[SequenceState]:
        rounds = in_process(target, drafter if drafts else None)
        scheduler = scheduler_of(rounds, Fixed(drafts), slots=SLOTS, max_seq_len=LENGTH)
        return [sequence for batch in batches for sequence in run_all(scheduler, batch)]

    one_by_one = [[request] for request in requests]
    plain, alone = (decoded(drafts, one_by_one) for drafts in (0, 5))
    together = decoded(5, [requests])
    texts = [[each.tokens for each in sequences] for sequences in (plain, alone, together)]
    assert texts[0] == texts[1] == texts[2]
    rounds = [[each.committed_per_round for each in sequences] for sequences in (alone, together)]
    assert rounds[0] == rounds[1]
    assert max(each.accepted for each in together) > 0
