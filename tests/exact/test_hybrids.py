"""Hybrids: the text is the target's however many drafts are taken back, beside any neighbors.

Against `transformers`: its forward pass, and plain `generate`, which drafts nothing. Logits and
taps of every family are in test_families.py, texts with every drafter format in test_models.py, and
random traffic in test_lossless.py.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3NextConfig

from dflash_trt.checkpoints import load_drafter, load_target
from dflash_trt.checkpoints.fields import Config
from dflash_trt.checkpoints.target import qwen3_5, qwen3_5_moe, qwen3_next
from dflash_trt.decoding import (
    Proposer,
    Request,
    RunRound,
    SamplingParams,
    SequenceState,
    in_process,
)
from dflash_trt.decoding.proposer import view
from dflash_trt.engine_kinds import GraphKind
from dflash_trt.engines.onnxruntime import Engine, use_one_pool
from dflash_trt.errors import CheckpointError
from dflash_trt.graphs import target_graph
from dflash_trt.graphs.builder import OPSET, PART_DOMAIN
from dflash_trt.graphs.positions import inverse_frequencies
from dflash_trt.speculation import Fixed, Proposal, SequenceView
from dflash_trt.weights import Weights
from tests.support import equality as exact
from tests.support import families, reference
from tests.support.builds import build_engines, edit, edit_weights
from tests.support.built_pairs import BuiltPair, built_from
from tests.support.equality import (
    NEW_TOKENS,
    Case,
    case_for,
    prefix_cache_of,
    run_all,
    scheduler_of,
    target_step,
)
from tests.support.families import FORMATS, HYBRIDS, pair_of

ONE = "qwen3.5"
PROMPTS = [[5, 17, 200, 44, 3], list(range(100, 119)), [7], [*range(40, 73)]]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @cache
    def make(name: str) -> Case:
        directory = tmp_path_factory.mktemp("hybrid")
        return case_for(built_from(families.make(name, directory), directory))

    return make


@pytest.fixture(scope="module")
def case(case_of: Callable[[str], Case]) -> Case:
    return case_of(ONE)


def rounds_of(built: BuiltPair, *, drafting: bool = True) -> RunRound:
    target = Engine(built.target_engine)
    return in_process(target, Engine(built.drafter_engine) if drafting else None)


class Lucky(Proposer):
    """Proposes the text that a sequence will have; beyond `right` tokens of it something else."""

    def __init__(self, texts: dict[int, list[int]], right: dict[int, int], count: int) -> None:
        super().__init__()
        self._texts, self._right, self._count = texts, right, count

    def views(self, sequences: Sequence[SequenceState]) -> list[SequenceView]:
        return [view(sequence, [self._guess(sequence)]) for sequence in sequences]

    def _guess(self, sequence: SequenceState) -> Proposal:
        key = id(sequence.request)
        text = self._texts[key][len(sequence.tokens) :][: min(self._count, sequence.budget - 1)]
        wrong = [(token + 1) % 300 for token in text]
        tokens = [*text[: self._right[key]], *wrong[self._right[key] :]]
        return Proposal("drafter", tokens, [0.5] * len(tokens))


@pytest.mark.parametrize("count", [2, 7, 15])
def test_what_was_rejected_leaves_nothing_and_what_was_accepted_is_not_lost(
    count: int, case: Case
) -> None:
    """Rows of one batch accept none, some and all of as many drafts, round after round."""
    requests = [Request(prompt, NEW_TOKENS) for prompt in case.prompts]
    texts = {id(r): text for r, text in zip(requests, case.greedy, strict=True)}
    right = {id(r): n for r, n in zip(requests, (0, count, count // 2, 1), strict=True)}
    proposer = Lucky(texts, right, count)
    rounds = rounds_of(case.built, drafting=False)
    sequences = run_all(scheduler_of(rounds, Fixed(count), proposer), requests)
    assert [x.tokens for x in sequences] == case.greedy
    accepted = [x.accepted / max(x.drafted, 1) for x in sequences]
    assert accepted[0] == 0 < accepted[2] < accepted[1] == 1


def test_rounds_without_drafts_come_between_rounds_with_some(case: Case) -> None:
    """A plain step folds in the last drafts too, and leaves none to the next."""
    requests = [Request(prompt, NEW_TOKENS) for prompt in case.prompts]
    texts = {id(r): text for r, text in zip(requests, case.greedy, strict=True)}

    class InTurns(Lucky):
        turn = 0

        def views(self, sequences: Sequence[SequenceState]) -> list[SequenceView]:
            self.turn += 1
            return (
                super().views(sequences)
                if self.turn % 3
                else [view(sequence) for sequence in sequences]
            )

    proposer = InTurns(texts, dict.fromkeys(texts, 3), 5)
    rounds = rounds_of(case.built, drafting=False)
    sequences = run_all(scheduler_of(rounds, Fixed(5), proposer), requests)
    assert [x.tokens for x in sequences] == case.greedy
    assert all(x.accepted for x in sequences)


def test_a_slot_forgets_the_text_that_had_it(case: Case) -> None:
    scheduler = scheduler_of(rounds_of(case.built, drafting=False), Fixed(0), slots=1)
    for prompt, text in zip(case.prompts, case.greedy, strict=True):
        (sequence,) = run_all(scheduler, [Request(prompt, NEW_TOKENS)])
        assert sequence.tokens == text


def test_sequences_that_move_to_another_slot_take_their_state_along(case: Case) -> None:
    """Shorter texts end first; the last sequence moves into the slot of one that ends."""
    lengths = [3, 9, 5, NEW_TOKENS]
    requests = [Request(p, n) for p, n in zip(case.prompts, lengths, strict=True)]
    texts = {id(r): text for r, text in zip(requests, case.greedy, strict=True)}
    proposer = Lucky(texts, dict.fromkeys(texts, 2), 4)
    rounds = rounds_of(case.built, drafting=False)
    sequences = run_all(scheduler_of(rounds, Fixed(4), proposer), requests)
    for sequence, text, length in zip(sequences, case.greedy, lengths, strict=True):
        assert sequence.tokens == text[:length]


@pytest.mark.parametrize("drafts", [0, 7])
@pytest.mark.parametrize("position", [8, 20])  # while its prompt is taken in, and behind it
def test_a_row_whose_state_is_broken_fails_alone(drafts: int, position: int, case: Case) -> None:
    """The next sequence in its slot does not notice either."""
    target = Engine(case.built.target_engine)
    rounds = in_process(target, Engine(case.built.drafter_engine) if drafts else None)
    scheduler = scheduler_of(rounds, Fixed(drafts), slots=2, prefill_chunk=4)
    first, broken, after = (
        scheduler.submit(Request(prompt, NEW_TOKENS)) for prompt in case.prompts[:3]
    )
    while broken.position < position:
        scheduler.step()
    for states in target._states.values():
        states[:, scheduler.sequences.index(broken)] = np.nan
    while scheduler.has_work:
        scheduler.step()
    assert [s.finish_reason for s in (first, broken, after)] == ["length", "error", "length"]
    assert [first.tokens, after.tokens] == [case.greedy[0], case.greedy[2]]


@pytest.mark.parametrize("sampling", [SamplingParams(0.8, seed=3), SamplingParams(1.1, seed=9)])
def test_sampled_text_is_the_same_with_and_without_drafts(
    sampling: SamplingParams, case: Case
) -> None:
    scored = replace(sampling, logprobs=2)
    requests = [Request(prompt, NEW_TOKENS, scored) for prompt in case.prompts]
    plain = run_all(scheduler_of(rounds_of(case.built, drafting=False), Fixed(0)), requests)
    drafted = run_all(scheduler_of(rounds_of(case.built), Fixed(7)), requests)
    assert [x.tokens for x in drafted] == [x.tokens for x in plain]
    assert sum(x.accepted for x in drafted) > 0
    for one, other in zip(drafted, plain, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 5, 160])
def test_a_prompts_log_probabilities_are_those_of_transformers(chunk: int, case: Case) -> None:
    scored = SamplingParams(prompt_logprobs=True, logprobs=0)
    scheduler = scheduler_of(rounds_of(case.built), Fixed(7), prefill_chunk=chunk)
    prompt = case.built.texts[0][:40]
    (sequence,) = run_all(scheduler, [Request(prompt, 4, scored)])
    logits, _ = reference.target_logits_and_taps(case.built.pair.target_dir, prompt, [0])
    expected = torch.log_softmax(torch.tensor(logits[:-1]), -1)
    expected = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    found = [line[0] for line in sequence.logprobs[1 : len(prompt)]]
    np.testing.assert_allclose(found, expected, atol=exact.TOLERANCE)


# --- every family and format --------------------------------------------------------------------

CELLS = [f"{name}-{form}" for name in HYBRIDS if "vision" not in name for form in FORMATS]


@pytest.mark.models
@pytest.mark.parametrize("cell", CELLS)
def test_texts_in_any_number_of_slots_and_chunks(cell: str, tmp_path: Path) -> None:
    family, form = next((f, d) for f in HYBRIDS for d in FORMATS if cell == f"{f}-{d}")
    pair = pair_of(family, form, tmp_path)
    engines = tmp_path / "engines"
    _, drafter = build_engines(pair.target_dir, pair.drafter_dir, engines, slots=16, max_seq_len=96)
    rounds = in_process(Engine(engines / "target"), Engine(engines / "drafter"))
    dice = np.random.default_rng(1)
    prompts = [*PROMPTS, *(dice.integers(300, size=n).tolist() for n in range(16, 52, 3))]
    texts = reference.greedy(pair.target_dir, prompts, 24)
    for slots in (1, 4, 16):
        for chunk in (3, 16, 96):
            policy = Fixed(drafter.spec.block_size - 1)
            scheduler = scheduler_of(
                rounds, policy, slots=slots, max_seq_len=96, prefill_chunk=chunk
            )
            sequences = run_all(scheduler, [Request(prompt, 24) for prompt in prompts])
            assert [x.tokens for x in sequences] == texts, (slots, chunk)


PARTS = (0, 30), (30, 40)


@pytest.mark.models
@pytest.mark.parametrize("name", HYBRIDS)
def test_the_cpus_pass_changes_nothing_but_rounding(name: str, tmp_path: Path) -> None:
    pair = families.make(name, tmp_path)
    target, drafter = load_target(pair.target_dir), load_drafter(pair.drafter_dir)
    text = np.random.default_rng(0).integers(300, size=40).tolist()
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "cpu", slots=2, max_seq_len=64)
    engine = tmp_path / "cpu" / "target"
    fast = Engine(engine)
    expected = [np.array(target_step(fast, text[a:b], a)["logits"]) for a, b in PARTS]
    graph = target_graph(
        target, drafter.spec.target_layer_ids, fast.info.cache_len, "tensorrt", most_drafts=15
    )
    graph.save(engine, lambda _: None)
    standard = onnx.load(engine / "model.onnx", load_external_data=False)
    assert {(o.domain, o.version) for o in standard.opset_import} == {("", 27), (PART_DOMAIN, 1)}
    slow = Engine(engine)
    for (a, b), logits in zip(PARTS, expected, strict=True):
        found = target_step(slow, text[a:b], a)["logits"]
        np.testing.assert_allclose(found, logits, atol=exact.TOLERANCE)


def test_the_graph_has_the_standards_operator_and_the_cpus_its_own(case: Case) -> None:
    model = onnx.load(case.built.target_engine / "model.onnx", load_external_data=False)
    domains = {("", 24), ("com.microsoft", 1), (PART_DOMAIN, 1)}
    assert {(o.domain, o.version) for o in model.opset_import} == domains
    kinds: dict[GraphKind, str] = {"onnxruntime": "com.microsoft", "pytorch": ""}
    for kind, domain in kinds.items():
        graph = target_graph(case.built.target, (), 64, kind, most_drafts=15).model()
        recurrences = [node for node in graph.graph.all_nodes() if node.op_type == "Recur"]
        assert len(recurrences) == 2 * len(case.built.target.spec.delta_nets)
        bodies = [node for function in graph.functions.values() for node in function]
        kernels = [node for node in bodies if node.op_type == "LinearAttention"]
        assert {node.domain for node in kernels} == {domain}


def test_onnx_runtime_takes_no_attention_apart(case: Case, tmp_path: Path) -> None:
    """It does where it has no kernel: `Attention` of opset 25, the standard's `LinearAttention`."""
    use_one_pool(2)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.optimized_model_filepath = str(tmp_path / "placed.onnx")
    ort.InferenceSession(case.built.target_engine / "model.onnx", options)
    graph = onnx.load(tmp_path / "placed.onnx", load_external_data=False).graph
    branches = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    placed = Counter(node.op_type for part in (graph, *branches) for node in part.node)
    spec = case.built.target.spec
    assert placed["Attention"] == len(spec.attention_layers)
    assert placed["LinearAttention"] == 2 * len(spec.delta_nets)


# --- no number depends on its neighbors ---------------------------------------------------------


@pytest.mark.parametrize("op", ["Exp", "Sigmoid", "Atanh", "Abs", "Neg", "Relu"])
def test_the_ops_of_a_state_round_alike_wherever_a_number_is(op: str) -> None:
    """ONNX Runtime's `Softplus` and `Log` do not."""
    session = _session(op)
    dice = np.random.default_rng(0)
    values = (dice.uniform(-0.34, 0.34, 40) if op == "Atanh" else dice.normal(0, 6, 40)).astype("f")
    alone = np.array([session.run(None, {"x": value[None]})[0][0] for value in values])
    for size in (*range(2, 40), 1000, 4097):
        found = session.run(None, {"x": np.repeat(values[:, None], size, 1).ravel()})[0]
        np.testing.assert_array_equal(found.reshape(-1, size), np.repeat(alone[:, None], size, 1))


def _session(op: str) -> ort.InferenceSession:
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["N"]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node(op, ["x"], ["y"])], "op", [x], [y])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=11
    )
    return _open(model)


def _open(model: onnx.ModelProto) -> ort.InferenceSession:
    use_one_pool(2)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    return ort.InferenceSession(model.SerializeToString(), options)


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("sizes", [(16, 16), (20, 24), (128, 128)])
def test_linear_attention_gives_a_row_the_same_bits_alone_and_split(
    heads: int, sizes: tuple[int, int]
) -> None:
    """Alone or beside others, token by token or at once, with masked ones in between."""
    session, dice = _linear_attention(heads, *sizes), np.random.default_rng(heads)
    rows, count = 3, 70
    tokens = _tokens(dice, rows, count, heads, *sizes)
    state = dice.normal(size=(rows, heads, *sizes)).astype(np.float32)
    out, end = session.run(None, {**tokens, "state": state})
    for row in range(rows):
        place, now = 0, state[row : row + 1]
        while place < count:
            size = int(dice.choice([1, 1, 2, 7, 16]))
            part = {name: x[row : row + 1, place : place + size] for name, x in tokens.items()}
            masked = _tokens(dice, 1, 2, heads, *sizes)
            masked |= {name: masked[name] * 0 for name in ("decay", "beta")}
            part = {name: np.concatenate([masked[name], x], 1) for name, x in part.items()}
            found, now = session.run(None, {**part, "state": now})
            np.testing.assert_array_equal(found[0, 2:], out[row, place : place + size])
            place += size
        np.testing.assert_array_equal(now[0], end[row])


def _tokens(
    dice: np.random.Generator, rows: int, count: int, heads: int, keys: int, values: int
) -> dict[str, Any]:
    def normal(width: int) -> Any:
        return dice.normal(size=(rows, count, width)).astype(np.float32)

    gates = dice.random((2, rows, count, heads)).astype(np.float32)
    return {
        "query": normal(heads * keys),
        "key": normal(heads * keys) * np.float32(keys**-0.5),
        "value": normal(heads * values),
        "decay": -gates[0],
        "beta": gates[1],
    }


def _linear_attention(heads: int, keys: int, values: int) -> ort.InferenceSession:
    helper = onnx.helper
    shapes: dict[str, list[Any]] = {
        "query": ["n", "S", heads * keys],
        "key": ["n", "S", heads * keys],
        "value": ["n", "S", heads * values],
        "state": ["n", heads, keys, values],
        "decay": ["n", "S", heads],
        "beta": ["n", "S", heads],
        "out": ["n", "S", heads * values],
        "new_state": ["n", heads, keys, values],
    }
    infos = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    names = [*shapes]
    node = helper.make_node(
        "LinearAttention",
        names[:6],
        names[6:],
        domain="com.microsoft",
        update_rule="gated_delta",
        q_num_heads=heads,
        kv_num_heads=heads,
        scale=keys**-0.5,
    )
    graph = helper.make_graph([node], "linear_attention", infos[:6], infos[6:])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return _open(helper.make_model(graph, opset_imports=opsets, ir_version=11))


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.models
@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3.5-moe-with-vision"])
def test_experts_in_one_stack_are_read_as_one_by_one(name: str, tmp_path: Path) -> None:
    """As in Qwen3.5's bf16 files; transformers writes them one by one."""
    pair = families.make(name, tmp_path)
    before = load_target(pair.target_dir)
    matrices = {name: before.weights.read(name) for name in before.weights.names}

    def stack(tensors: dict[str, Any]) -> None:
        count = before.spec.layers[0].experts.count  # type: ignore[union-attr]
        for index in range(before.spec.num_hidden_layers):
            experts = f"{before.spec.prefix}layers.{index}.mlp.experts"
            parts = {
                part: [tensors.pop(f"{experts}.{i}.{part}_proj.weight") for i in range(count)]
                for part in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            tensors[f"{experts}.gate_up_proj"] = torch.stack(both)
            tensors[f"{experts}.down_proj"] = torch.stack(parts["down"])

    edit_weights(pair.target_dir, stack)
    after = load_target(pair.target_dir)
    assert after.weights.names == before.weights.names
    for name, matrix in matrices.items():
        assert np.array_equal(after.weights.read(name), matrix)
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "engines", slots=1, max_seq_len=64)
    logits, _ = reference.target_logits_and_taps(pair.target_dir, PROMPTS[3], [0])
    found = target_step(Engine(tmp_path / "engines" / "target"), PROMPTS[3], 0)["logits"]
    np.testing.assert_allclose(found, logits, atol=exact.TOLERANCE, rtol=1e-5)


@pytest.mark.models
@pytest.mark.parametrize("name", [name for name in HYBRIDS if "vision" not in name])
def test_fp8_blocks_give_the_text_of_their_floats(name: str, tmp_path: Path) -> None:
    """As in Qwen's FP8 files: matrices in e4m3 with a scale for each block of 128 by 128."""
    pair, plain = families.make(name, tmp_path), {}

    def quantize(tensors: dict[str, Any]) -> None:
        for tensor in [*tensors]:
            if not tensor.endswith("_proj.weight") and "in_proj_qkv" not in tensor:
                continue
            matrix = tensors[tensor].float()
            scale = matrix.abs().max() / 448
            codes = (matrix / scale).to(torch.float8_e4m3fn)
            plain[tensor] = codes.float() * scale
            tensors |= {tensor: codes, f"{tensor}_scale_inv": scale.reshape(1, 1)}

    edit_weights(pair.target_dir, quantize)
    edit(
        pair.target_dir,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "engines", slots=2, max_seq_len=64)
    rounds = in_process(*(Engine(tmp_path / "engines" / role) for role in ("target", "drafter")))
    scheduler = scheduler_of(rounds, Fixed(7), slots=2, max_seq_len=64)
    found = run_all(scheduler, [Request(prompt, 24) for prompt in PROMPTS[:2]])

    def restore(tensors: dict[str, Any]) -> None:
        for tensor in plain:
            del tensors[f"{tensor}_scale_inv"]
        tensors |= plain

    edit_weights(pair.target_dir, restore)
    edit(pair.target_dir, quantization_config=None)
    assert len(plain) > 10
    assert [x.tokens for x in found] == reference.greedy(pair.target_dir, PROMPTS[:2], 24)


def test_layers_that_predict_further_and_the_vision_tower_are_left_out(tmp_path: Path) -> None:
    pair = families.make(ONE, tmp_path)
    beside = {"mtp.fc.weight": torch.ones(2, 2), "model.visual.pos_embed.weight": torch.ones(2, 2)}
    edit_weights(pair.target_dir, lambda tensors: tensors.update(beside))
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "engines", slots=1, max_seq_len=64)
    edit_weights(pair.target_dir, lambda tensors: tensors.update(x=torch.ones(1)))
    with pytest.raises(CheckpointError, match="holds 1 tensors"):
        build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "more", slots=1, max_seq_len=64)


YARN = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, families.ORIGINAL: 128}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e7}, YARN])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_part_of_a_head_is_rotated_as_in_transformers(rope: dict[str, Any], share: float) -> None:
    fields = families.HYBRID | {"rope_parameters": rope | {"partial_rotary_factor": share}}
    config = Qwen3_5TextConfig(**fields)
    model = transformers_rope(config)
    layer = qwen3_5(Config(Path("config.json"), config.to_dict()))["layers"][3]
    assert layer.rope.dim == int(share * 32)
    np.testing.assert_allclose(inverse_frequencies(layer.rope), model.inv_freq, rtol=3e-7)
    assert layer.rope.attention_factor == model.attention_scaling


def transformers_rope(config: Qwen3_5TextConfig) -> Any:
    from transformers.models.qwen3_5.modeling_qwen3_5 import (  # noqa: PLC0415
        Qwen3_5TextRotaryEmbedding,
    )

    return Qwen3_5TextRotaryEmbedding(config)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        (qwen3_5, {"attn_output_gate": False}, "attn_output_gate"),
        (qwen3_5, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        (qwen3_5, {"layer_types": ["linear_attention"] * 4}, "no layer has attention"),
        (qwen3_5, {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        (qwen3_5, {"layer_types": ["full_attention"]}, "layer_types"),
        (qwen3_5, {"linear_num_key_heads": 3}, "cannot share 3 key heads"),
        (qwen3_5, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        (qwen3_5, {"rope_parameters": {"partial_rotary_factor": 2.0}}, "whole head"),
        (qwen3_5, {"rope_parameters": {"partial_rotary_factor": 0.1}}, "3 numbers of a head"),
        (qwen3_5_moe, {"num_experts": 2}, "there are 2 experts"),
        (qwen3_next, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    ],
)
def test_what_these_families_may_not_say_is_refused(
    family: Callable[[Config], dict[str, Any]], change: dict[str, object], says: str
) -> None:
    make = Qwen3NextConfig if family is qwen3_next else Qwen3_5TextConfig
    fields = make(**families.HYBRID).to_dict() | families.HYBRID_MOE
    family(Config(Path("config.json"), fields))
    with pytest.raises(CheckpointError, match=says):
        family(Config(Path("config.json"), fields | change))


def test_another_family_of_the_name_is_refused_by_its_own(tmp_path: Path) -> None:
    """Qwen3.8-Flash-Next has sparse attention, and calls itself so."""
    pair = families.make(ONE, tmp_path)
    edit(pair.target_dir, architectures=["Qwen4ExpForConditionalGeneration"])
    with pytest.raises(CheckpointError, match="Qwen4Exp"):
        load_target(pair.target_dir)


def test_stacks_that_are_quantized_are_refused(tmp_path: Path) -> None:
    codes, scales = torch.zeros(2, 4, 8), torch.ones(2, 1, 1)
    tensors = {"m.experts.gate_up_proj": codes.to(torch.float8_e4m3fn)}
    tensors["m.experts.gate_up_proj_scale_inv"] = scales
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(tensors, tmp_path / "model.safetensors")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(CheckpointError, match="quantized experts in one stack"):
        Weights(tmp_path, {"quantization_config": fp8}).unstacked()


# --- kept prefixes ------------------------------------------------------------------------------


def chat(case: Case, chunk: int, sampling: SamplingParams, *, kept: bool) -> list[SequenceState]:
    """Return a chat of six turns, whose prompts hold all that was said."""
    target = Engine(case.built.target_engine)
    rounds = in_process(target, Engine(case.built.drafter_engine))
    cache = prefix_cache_of(target.info, 10**4) if kept else None
    scheduler = scheduler_of(rounds, Fixed(7), prefill_chunk=chunk, prefix_cache=cache)
    text, dice, answers = case.built.texts[0][:23], np.random.default_rng(4), []
    for turn in range(6):
        (answer,) = run_all(scheduler, [Request(text, 9, sampling)])
        answers.append(answer)
        text = [*text, *answer.tokens, *dice.integers(300, size=7 + turn).tolist()]
    return answers


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, seed=3)])
@pytest.mark.parametrize("chunk", [5, 16, 160])
def test_a_chat_says_the_same_and_goes_on_where_it_was(
    chunk: int, sampling: SamplingParams, case: Case
) -> None:
    off, on = (chat(case, chunk, sampling, kept=kept) for kept in (False, True))
    assert [x.tokens for x in on] == [x.tokens for x in off]
    assert [x.committed_per_round for x in on] == [x.committed_per_round for x in off]
    assert not any(x.cached_tokens for x in off)
    before = 0
    for answer in on:
        # all of the text so far but what the last round accepted, and the token after that
        assert before - 9 < answer.cached_tokens <= max(before - 1, 0)
        before = len(answer.request.prompt) + len(answer.tokens)


def test_the_state_at_the_end_of_a_text_is_before_its_last_drafts(case: Case) -> None:
    """It does not hold them yet: the next turn computes them again."""
    prompt, text = case.prompts[0], case.greedy[0][:11]
    first, second = Request(prompt, 11), Request([*prompt, *text, 9, 8, 7], 9)
    plain = rounds_of(case.built, drafting=False)
    (alone,) = run_all(scheduler_of(plain, Fixed(0)), [second])
    texts = {id(first): text, id(second): alone.tokens}
    target = Engine(case.built.target_engine)
    scheduler = scheduler_of(
        in_process(target, None),
        Fixed(5),
        Lucky(texts, dict.fromkeys(texts, 5), 5),
        prefix_cache=prefix_cache_of(target.info, 10**4),
    )
    (before,) = run_all(scheduler, [first])
    assert (before.tokens, before.replayed) == (text, 3)  # 1, 1 + 5 and 1 + 3 tokens
    (after,) = run_all(scheduler, [second])
    assert after.cached_tokens == len(prompt) + len(text) - 1 - 3
    assert after.tokens == alone.tokens


def test_the_next_turn_goes_on_before_what_its_template_leaves_out(case: Case) -> None:
    """Thoughts of an answer are no part of the next prompt, nor is what opened them."""
    target = Engine(case.built.target_engine)
    rounds = in_process(target, Engine(case.built.drafter_engine))
    cache = prefix_cache_of(target.info, 10**4)
    scheduler = scheduler_of(rounds, Fixed(7), prefix_cache=cache)
    asked, opening, thought = case.built.texts[0][:50], [301, 302, 303], [304] * 5
    (first,) = run_all(scheduler, [Request([*asked, *opening, *thought], 9)])
    again = [*asked, *opening, *first.tokens, 9, 8, 7, *opening]
    (second,) = run_all(scheduler, [Request(again, 9)])
    assert second.cached_tokens == len(asked) + len(opening) + len(thought) - 16
    plain = scheduler_of(rounds, Fixed(7))
    assert second.tokens == run_all(plain, [Request(again, 9)])[0].tokens


def test_a_beginning_that_texts_share_is_kept_when_it_is_met_again(case: Case) -> None:
    target = Engine(case.built.target_engine)
    rounds = in_process(target, Engine(case.built.drafter_engine))
    cache = prefix_cache_of(target.info, 10**4)
    scheduler = scheduler_of(rounds, Fixed(7), prefix_cache=cache)
    system = case.built.texts[0][:40]
    prompts = [[*system, *range(n, n + 30)] for n in (10, 60, 110)]
    found = [run_all(scheduler, [Request(prompt, 9)])[0] for prompt in prompts]
    assert [x.cached_tokens for x in found] == [0, 0, 32]
    plain = scheduler_of(rounds, Fixed(7))
    for sequence, prompt in zip(found, prompts, strict=True):
        assert sequence.tokens == run_all(plain, [Request(prompt, 9)])[0].tokens


def test_no_state_is_found_under_another_salt(case: Case) -> None:
    target = Engine(case.built.target_engine)
    cache = prefix_cache_of(target.info, 10**4)
    scheduler = scheduler_of(in_process(target, None), Fixed(0), prefix_cache=cache)
    short = case.built.texts[0][:12]  # less than a block, so that the salt is all that differs
    (first,) = run_all(scheduler, [Request(short, 9, cache_salt="a")])
    longer = [*short, *first.tokens, 5, 6]
    found = [
        run_all(scheduler, [Request(longer, 3, cache_salt=salt)])[0].cached_tokens
        for salt in ("b", "", "a")
    ]
    assert found == [0, 0, len(short) + 8]


def test_texts_that_drafted_nothing_are_for_those_who_draft_nothing(case: Case) -> None:
    target = Engine(case.built.target_engine)
    rounds = in_process(target, Engine(case.built.drafter_engine))
    cache = prefix_cache_of(target.info, 10**4)
    scheduler = scheduler_of(rounds, Fixed(7), prefix_cache=cache)
    prompt = case.built.texts[0][:60]
    asked = [Request(prompt, 9, drafting=drafting) for drafting in (False, True, False, True)]
    found = [run_all(scheduler, [request])[0] for request in asked]
    assert [x.cached_tokens for x in found] == [0, 0, 44, 44]
    assert found[1].committed_per_round == found[3].committed_per_round
    assert found[1].rounds < found[0].rounds == 8


def test_the_config_says_what_a_slot_and_a_state_take(case: Case) -> None:
    info = json.loads((case.built.target_engine / "engine.json").read_text())
    states = info["states"]
    assert (states["layers"], states["state"], states["window"]) == (3, [4, 32, 48], 3)
    assert states["inputs"] == [3 + 15, 2 * 64 + 192]
    assert states["drafts"] == [15, 64 + 192 + 8]
    assert info["caches"] == [[2, 32]]
    engine = Engine(case.built.target_engine)
    assert engine.info.states is not None
    stored = sum(states[:, 0].nbytes for states in engine._states.values())
    assert engine.info.states.slot_bytes == stored
