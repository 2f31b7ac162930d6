"""Plans, built by TensorRT-RTX on a machine that needs no GPU for that: `make test-plans`."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from dflash_trt.builder.engines import EngineOptions, build_drafter, build_target
from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.builder.pipeline import build
from dflash_trt.checkpoints import load_drafter, load_target
from dflash_trt.config import BuildConfig, TensorRT
from dflash_trt.engines.info import EngineInfo, read_info
from dflash_trt.engines.step import step_tensors
from dflash_trt.engines.tensorrt.library import make_log, trt, use
from dflash_trt.engines.tensorrt.network import (
    check_form,
    check_network,
    parse,
    read_operators,
    to_16_bits,
)
from dflash_trt.engines.tensorrt.plan import DTYPES, build_plan
from dflash_trt.errors import EngineError, ServerError
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.supervisor import process
from tests.support.builds import build_engines
from tests.support.commands import program
from tests.support.families import CELLS, pair_of
from tests.support.pairs import make_pair

pytestmark = pytest.mark.plans

DEMO = Path(__file__).parents[2] / "examples" / "pycode"
ROOT = Path(__file__).parents[2]
ENGINE = TensorRT(kind="tensorrt", library="tensorrt_rtx")

Demo = Callable[..., Path]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Return `demo(**engine)`: the demo pair, built for an engine of these fields."""

    @cache
    def make(**engine: Any) -> Path:
        directory = tmp_path_factory.mktemp("demo") / "built"
        paths = {role: {"path": DEMO / role} for role in ("target", "drafter")}
        config = BuildConfig.model_validate({"name": "pycode", **paths, "engine": engine})
        build(config, directory, lambda *_: None)
        return directory

    return make


def plans_of(demo: Demo, dtype: str) -> Path:
    return demo(kind="tensorrt", library="tensorrt_rtx", dtype=dtype)


def graphs_of(directory: Path) -> Path:
    """Return the demo pair's graphs as `build` writes them before they become plans."""
    pair = DEMO / "target", DEMO / "drafter"
    build_engines(*pair, directory / "engines", slots=4, max_seq_len=1024)
    return directory


def engines(built: Path) -> list[Path]:
    return sorted(file.parent for file in (built / "engines").rglob("engine.json"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_demo_pair(demo: Demo, dtype: str, tmp_path: Path) -> None:
    built, graphs = plans_of(demo, dtype), graphs_of(tmp_path)
    assert len(engines(built)) == 2
    for ours, theirs in zip(engines(built), engines(graphs), strict=True):
        info = read_info(ours)
        plan, graph = info.plan, (theirs / "model.onnx").read_bytes()
        assert plan is not None
        assert plan.graph == sha256(graph).hexdigest()  # byte for byte what runs on the CPU
        assert (plan.library, plan.version) == ("tensorrt_rtx", trt.__version__)
        assert plan.dtype == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
        assert plan.taken_apart == ()
        assert len(plan.aliases) == 2 * len(info.caches)
        files = {path.name for path in ours.iterdir() if path.is_file()}
        assert files == {"model.plan", "engine.json"}
        weights = (theirs / "model.onnx.data").stat().st_size  # in bf16
        assert weights < (ours / "model.plan").stat().st_size < weights + (20 << 20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_step_binds_is_what_the_plan_has(demo: Demo, dtype: str) -> None:
    for directory in engines(plans_of(demo, dtype)):
        info = read_info(directory)
        round_, most = info.most_verified, info.widest
        for profile, n, tokens in ((0, 1, 1), (0, 4, round_), (1, 1, most), (1, 4, round_ + 1)):
            assert_fits(info, profile, n, tokens, 1)
            assert_fits(info, profile, n, tokens, info.cache_len)


def assert_fits(info: EngineInfo, profile: int, n: int, tokens: int, visible: int) -> None:
    """Compare names, dtypes and shapes of a step; each size has one value within the profile."""
    plan = info.plan
    assert plan is not None
    width = tokens if info.role == "target" else min(tokens, info.block_size)
    context = 0 if info.role == "target" else tokens
    given, taken = step_tensors(info, n, width, visible, n, context)
    caches: dict[str, Any] = {
        f"{part}_{layer}": (plan.dtype, (n, heads, info.cache_len, head_dim))
        for layer, (heads, head_dim) in enumerate(info.caches)
        for part in ("key", "value")
    }
    sizes: dict[str, int] = {}
    for found, known in (
        (named(given) | caches, plan.inputs),
        (named(taken) | {f"new_{name}": tensor for name, tensor in caches.items()}, plan.outputs),
    ):
        assert found.keys() == known.keys()
        for name, (dtype, shape) in found.items():
            assert (dtype, len(shape)) == (known[name][0], len(known[name][1]))
            for size, axis in zip(shape, known[name][1], strict=True):
                assert size == (axis if isinstance(axis, int) else sizes.setdefault(axis, size))
    assert plan.aliases == {f"new_{name}": name for name in caches}
    for axis, size in sizes.items():
        least, usual, most = plan.profiles[profile][axis]
        assert least <= size <= most
        assert least <= usual <= most
    for row in range(1, info.slots):  # TensorRT asks for addresses at multiples of 256 bytes
        assert all(row * heads * info.cache_len * dim * 2 % 256 == 0 for heads, dim in info.caches)


def named(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: (dtype.__name__.rstrip("_"), shape) for name, (dtype, shape) in tensors.items()}


@pytest.mark.parametrize("command", ["serve", "verify"])
def test_without_a_gpu_a_sentence_says_so(demo: Demo, tmp_path: Path, command: str) -> None:
    (tmp_path / "prompts").write_text('{"text": "def"}\n')
    options = {"serve": [], "verify": ["--prompts", tmp_path / "prompts", "--max-tokens", "4"]}
    words = [command, plans_of(demo, "bf16"), "--check=none", *options[command]]
    done = program(sys.executable, "-m", "dflash_trt", *words)
    assert done.returncode == 1
    assert done.stderr == (
        "error: this build has plans for NVIDIA GPUs, and here is no NVIDIA GPU with its driver. "
        "Run it on a machine with a GPU of compute capability 8.0 or 8.6 or 8.9 or 12.0 or 12.1.\n"
    )


def test_triton_takes_the_repository_and_its_models_say_what_is_missing(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "check_machine", lambda info: None)
    with (
        pytest.raises(ServerError, match=r"ended .* no NVIDIA GPU with its driver"),
        process.Server(
            OpenedBuild(plans_of(demo, "bf16"), "none"), free_ports(), Security()
        ) as server,
    ):
        server.wait_ready()
    log = server.log.path.read_text()
    shutil.rmtree(server.log.path.parent)
    for model in ("verify", "draft"):
        assert f"failed to load '{model}' version 1" in log
    assert "successfully loaded 'dflash'" in log  # which has no engine of its own


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    pair = make_pair(directory)
    build_engines(pair.target_dir, pair.drafter_dir, directory / "engines", slots=2, max_seq_len=64)
    return directory / "engines" / "target"


class Parsed:
    def __init__(
        self,
        engine: Path,
        change: Callable[[ir.Graph], None] = lambda graph: None,
        dtype: ir.DataType | None = ir.DataType.BFLOAT16,
    ) -> None:
        use("tensorrt_rtx")
        self.graph = (model := read_operators(engine / "model.onnx")).graph
        change(self.graph)
        if dtype is not None:
            to_16_bits(self.graph, dtype)
        self._log, _ = make_log()
        self._builder = trt.Builder(self._log)  # the network goes with it
        self.network = parse(self._builder, self._log, model, engine / "model.onnx")

    def node(self, op_type: str) -> ir.Node:
        return next(node for node in self.graph if node.op_type == op_type)

    def check(self) -> list[str]:
        return check_network(self.network, self.graph)


def test_attention_that_lost_its_mask_is_named(tiny: Path) -> None:
    def without_masks(graph: ir.Graph) -> None:
        for node in graph:
            if node.op_type == "Attention":
                without_a_mask(node)

    parsed = Parsed(tiny, without_masks)
    with pytest.raises(EngineError, match=r"at node_Attention_\d+ \(Attention\): its mask is gone"):
        parsed.check()


def test_attention_that_may_fall_apart_is_named(tiny: Path) -> None:
    parsed = Parsed(tiny)
    for index in range(parsed.network.num_layers):
        layer = parsed.network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
    with pytest.raises(EngineError, match=r"\(Attention\): the parser lets it be taken apart"):
        parsed.check()


def test_what_the_graph_says_and_the_network_has_not_is_named(tiny: Path) -> None:
    parsed = Parsed(tiny)
    hidden = parsed.node("RMSNormalization")
    parsed.graph.insert_after(hidden, ir.node("Relu", [hidden.outputs[0]], name="planted"))
    with pytest.raises(EngineError, match=r"at planted \(Relu\): it is not in the network"):
        parsed.check()


@pytest.mark.parametrize("op_type", ["Gemm", "TensorScatter", "RotaryEmbedding"])
def test_a_layer_of_another_type_is_named(tiny: Path, op_type: str) -> None:
    parsed = Parsed(tiny)
    node, other = parsed.node(op_type), parsed.node("Transpose")
    node.name, other.name = other.name, node.name  # as if the parser had made it of something else
    with pytest.raises(EngineError, match=rf"at node_\w+ \({op_type}\): it became SHUFFLE"):
        parsed.check()


def test_a_product_that_stayed_in_float32_is_named(tiny: Path) -> None:
    with pytest.raises(EngineError, match=r"at node_Gemm_\d+: it multiplies FLOAT"):
        Parsed(tiny, dtype=None).check()


def test_a_cache_that_is_not_written_in_place_is_named(tiny: Path) -> None:
    parsed = Parsed(tiny)
    for index in range(parsed.network.num_outputs):
        tensor = parsed.network.get_output(index)
        if tensor.name == "new_key_0":
            parsed.network.unmark_output(tensor)
            break
    with pytest.raises(EngineError, match=r"\(TensorScatter\): its result new_key_0 is not an"):
        parsed.check()


def test_another_output_is_named(tiny: Path) -> None:
    parsed = Parsed(tiny)
    tensor = parsed.network.get_layer(0).get_output(0)
    parsed.network.mark_output(tensor)
    with pytest.raises(EngineError, match=rf"at {tensor.name}: it is new"):
        parsed.check()


def with_lengths(node: ir.Node) -> None:
    node.resize_inputs(7)
    node.replace_input_with(6, node.inputs[3])


def with_a_window(node: ir.Node) -> None:
    node.attributes.add(ir.AttrInt64("left_window_size", 8))


def without_a_mask(node: ir.Node) -> None:
    node.replace_input_with(3, None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_lengths, "it has 7 inputs, not these 4"),
        (with_a_window, "reads over its attribute left_window_size"),
        (without_a_mask, "inputs, not these 4"),
    ],
)
def test_what_the_parser_reads_over_is_refused(
    tiny: Path, change: Callable[[ir.Node], None], says: str
) -> None:
    graph = read_operators(tiny / "model.onnx").graph
    change(next(node for node in graph if node.op_type == "Attention"))
    with pytest.raises(EngineError, match=rf"at node_Attention_\d+ \(Attention\): .*{says}"):
        check_form(graph)


def test_an_operator_that_it_cannot_parse_is_named(tiny: Path) -> None:
    def with_non_zero(graph: ir.Graph) -> None:
        tokens = graph.inputs[0]
        graph.insert_before(graph[0], ir.node("NonZero", [tokens], name="planted"))

    with pytest.raises(EngineError, match=r"at planted \(NonZero\)"):
        Parsed(tiny, with_non_zero)


def test_heads_without_a_kernel_are_taken_apart_and_said(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, heads=2, kv_heads=1, head_dim=512, layers=2, taps=(0,))
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "engines", slots=1, max_seq_len=32)
    build_plan(tmp_path / "engines" / "target", ENGINE, 16)
    plan = read_info(tmp_path / "engines" / "target").plan
    assert plan is not None
    assert len(plan.taken_apart) == 2


@pytest.mark.parametrize(("family", "form"), CELLS)
def test_every_family_and_drafter_format(family: str, form: str, tmp_path: Path) -> None:
    pair = pair_of(family, form, tmp_path)
    target, drafter = load_target(pair.target_dir), load_drafter(pair.drafter_dir)
    directory = tmp_path / "engine"
    directory.mkdir()
    options = EngineOptions(slots=2, max_seq_len=64, threads=1, kind="tensorrt")
    if form == "z-lab":
        build_target(target, drafter.spec, directory, options)
    else:
        build_drafter(drafter, target, directory, options)
    build_plan(directory, ENGINE, 16)
    plan = read_info(directory).plan
    assert plan is not None
    assert plan.taken_apart == ()


def test_types_against_the_library_itself(tmp_path: Path) -> None:
    python = [sys.executable, "-m"]
    generate = [*python, "pybind11_stubgen", "tensorrt_rtx_bindings", "--ignore-all-errors"]
    subprocess.run([*generate, "-o", tmp_path], check=True, capture_output=True, timeout=120)
    stub = tmp_path / "tensorrt_rtx_bindings" / "tensorrt_rtx.pyi"
    text = stub.read_text()
    # two slips of the generator, which make the whole file unreadable
    text = re.sub(r"\bin: ", "in_: ", text)
    stub.write_text(re.sub(r"(channel_axis: typing\.SupportsInt)\)", r"\1 = 0)", text))
    (tmp_path / "wrong.py").write_text(
        "import tensorrt_rtx_bindings as trt\ntrt.BuilderFlag.FP16\n"
    )
    look = [*python, "mypy", "--no-warn-unused-ignores", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [*look, "-p", "dflash_trt.engines.tensorrt", "-m", "wrong"],
        env=os.environ | {"MYPYPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if "error:" in line and ".pyi:" not in line]
    # it does check: TensorRT 11 has no such flag
    assert len(found) == 1, done.stdout[-2000:]
    assert "wrong.py:2" in found[0]
