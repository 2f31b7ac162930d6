"""`engine.quantize` of a bundle: what ModelOpt writes, what it costs, what is refused."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dflash_trt.builder import acceptance_probe as costs
from dflash_trt.builder.acceptance_probe import calibration_texts, measure_cost
from dflash_trt.builder.manifest import differences, read_manifest
from dflash_trt.builder.pipeline import build
from dflash_trt.checkpoints import Pair, open_drafter, open_target
from dflash_trt.checks import inspect
from dflash_trt.config import BuildConfig, Precision, load_config
from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.hardware import find_machine
from dflash_trt.tensorrt_llm import check_quantizable, quantization, quantize_target
from dflash_trt.tensorrt_llm.plan import make_plan as plan
from dflash_trt.weights import Weights, read_json, stored
from tests.support.builds import assert_only, config_of, edit, quiet
from tests.support.families import DRAFTER, FAMILIES
from tests.support.pairs import make_pair, write_pair
from tests.support.request_tools import wait_until

IDS = [[(7 * i + 3 * j) % 300 for j in range(24)] for i in range(3)]


def config(pair: Path, prompts: Path, method: Precision = "fp8") -> BuildConfig:
    engine = {"kind": "tensorrt_llm", "gpus": 1, "quantize": method, "calibration": prompts}
    return config_of(pair, engine=engine)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    make_pair(tmp_path / "pair", family="llama", rope_theta=10000.0, dtype="bfloat16")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"ids": {ids}}}\n' for ids in IDS))
    return tmp_path / "pair"


@pytest.fixture
def prompts(pair: Path) -> Path:
    return pair.parent / "prompts.jsonl"


def test_prompts_lie_beside_the_config(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    text = "name: x\ntarget: {path: a}\ndrafter: {path: b}\nengine:\n  kind: tensorrt_llm\n"
    file.write_text(f"{text}  quantize: fp8\n  calibration: p.jsonl\n")
    assert load_config(file).engine.calibration == tmp_path / "p.jsonl"  # type: ignore[union-attr]
    for wrong, says in (
        ("  quantize: int3\n", "'fp8' or 'nvfp4'"),
        ("  quantize: fp8\n  checkpoints: hub\n", "leaves the target on the Hub"),
        ("  calibration: p.jsonl\n", "goes with quantize"),
    ):
        file.write_text(text + wrong)
        with pytest.raises(ConfigError, match=says):
            load_config(file)


def test_a_plan_is_of_the_quantized_target(pair: Path, prompts: Path) -> None:
    whole = config_of(pair, engine={"kind": "tensorrt_llm", "gpus": 1})
    sizes = [
        plan(each, pair / "target", pair / "drafter")["target"]["weight_bytes"]
        for each in (whole, config(pair, prompts), config(pair, prompts, "nvfp4"))
    ]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[0] / 4


@pytest.mark.parametrize(
    ("asked", "hardware", "architecture", "says"),
    [
        ("nvfp4", "hgx-h200", "LlamaForCausalLM", "no nvfp4 kernels for H200 .*fp8"),
        ("nvfp4", "dgx-b300", "MistralForCausalLM", "lists no nvfp4 for Mistral.*to fp8"),
        ("fp8", "dgx-b300", "GptOssForCausalLM", "lists no fp8 for GptOss.*Leave"),
        ("fp8", "dgx-b300", "unknown", "lists no fp8 for unknown"),
    ],
)
def test_what_has_no_kernels_is_refused(
    pair: Path, asked: Precision, hardware: str, architecture: str, says: str
) -> None:
    target = open_target(pair / "target")
    target = replace(target, values={**target.values, "architectures": [architecture]})
    with pytest.raises(ConfigError, match=says):
        check_quantizable(asked, target, find_machine(hardware))


def test_a_quantized_target_is_refused(pair: Path, prompts: Path) -> None:
    edit(pair / "target", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="quantized already"):
        build(config(pair, prompts), pair / "built", quiet)
    assert_only(pair)


def test_a_missing_package_is_named(
    pair: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None if "opt" in name else 1)
    with pytest.raises(BuildError, match=r"needs modelopt, .*pip install 'dflash-trt\[quantize\]'"):
        build(config(pair, prompts), pair / "built", quiet)


def test_texts_are_the_same_each_time(pair: Path, prompts: Path) -> None:
    target = open_target(pair / "target")
    own = calibration_texts(None, target)
    assert own == calibration_texts(None, target)
    assert (len(own), max(map(len, own))) == (costs.PAGES, costs.PAGE_TOKENS)
    assert calibration_texts(prompts, target) == IDS


def test_what_is_too_large_for_this_machine_is_said(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Pair(open_target(pair / "target"), open_drafter(pair / "drafter"))
    monkeypatch.setattr(costs, "free_memory", lambda: 1000)
    cost = measure_cost(both, both, pair / "scratch", quiet)
    assert str(cost).startswith("not measured: in float32 it may take")
    refused = replace(both, target=replace(both.target, read=None, refusal=BuildError("a", "b")))
    assert "refuse the target" in measure_cost(refused, both, pair / "s", quiet).skipped
    assert not (pair / "scratch").exists()


def test_the_same_target_costs_nothing(pair: Path) -> None:
    both = Pair(open_target(pair / "target"), open_drafter(pair / "drafter"))
    cost = measure_cost(both, both, pair / "scratch", quiet)
    assert cost.taus is not None
    assert cost.taus[0] == cost.taus[1] >= 1
    assert not (pair / "scratch").exists()


# ModelOpt's usual way, the model in memory, and what its classes make of the codes; apart, because
# importing it changes transformers
WHOLE = """
import copy, json, sys, torch
from modelopt.torch.export import unified_export_hf as exporter
from modelopt.torch import quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from tests.support.modelopt_codes import dequantized
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

plain, output, name, ids = sys.argv[1:]
def feed(model):
    for each in json.loads(ids):
        model(torch.tensor([each]))
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    recipe = copy.deepcopy(getattr(mtq, name))
    model = mtq.quantize(model, recipe, feed)
    if name == "FP8_DEFAULT_CFG":  # its export does the like for all others
        for parent in model.modules():
            for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
                joined = [getattr(parent, each) for each in names if hasattr(parent, each)]
                if joined and hasattr(joined[0], "weight_quantizer"):
                    exporter.preprocess_linear_fusion(joined)
    export_hf_checkpoint(model, export_dir=output)
tensors = load_file(f"{output}/model.safetensors")
save_file(dequantized(tensors), f"{output}/plain.safetensors")
"""
CASES = [
    *((family, "fp8") for family in ("llama", "qwen2", "qwen3", "mistral", "qwen3-moe")),
    *((family, "nvfp4") for family in ("llama", "qwen2", "qwen3", "qwen3-moe")),
]


@pytest.mark.models
@pytest.mark.parametrize(("family", "method"), CASES)
def test_a_target_is_written_as_modelopt_writes_and_reads_it(
    tmp_path: Path, family: str, method: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in parts that end within blocks of scales, as large matrices are."""
    from safetensors.torch import load_file  # noqa: PLC0415

    monkeypatch.setattr(stored, "CHUNK", 2_000)

    write_pair(tmp_path, FAMILIES[family](), DRAFTER, dtype="bfloat16")
    target = open_target(tmp_path / "target")
    check_quantizable(method, target, find_machine("dgx-b300"))
    output = tmp_path / "out" / "target"
    quantize_target(method, target.directory, output, IDS, quiet)
    whole = tmp_path / "whole"
    given = [target.directory, whole, f"{method.upper()}_DEFAULT_CFG", json.dumps(IDS)]
    command = [sys.executable, "-c", WHOLE, *given]
    root = Path(__file__).parents[2]  # from which `tests` is imported
    subprocess.run(list(map(str, command)), check=True, timeout=300, capture_output=True, cwd=root)

    found, expected = (load_file(each / "model.safetensors") for each in (output, whole))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.float().equal(expected[name].float()), name
    written, plain = read_json(output / "config.json"), load_file(whole / "plain.safetensors")
    older = {name: value for name, value in written.items() if name != "quantization_config"}
    for weights in (Weights(output, written), Weights(output, older)):  # hf_quant_config.json alone
        assert weights.names == target.weights.names
        files = [file.name for file in weights.files]
        assert files == ["model.safetensors", "hf_quant_config.json"]
        assert {name for name in weights.names if weights.dtype(name) == "F32"} == plain.keys()
        assert plain
        for name, tensor in plain.items():
            assert (weights.read(name) == tensor.numpy()).all(), name
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in plain)
    said = [json.loads((each / "hf_quant_config.json").read_text()) for each in (output, whole)]
    assert said[0] == said[1]
    original = json.loads((target.directory / "config.json").read_text())
    config = json.loads((output / "config.json").read_text())
    assert config.pop("quantization_config")["quant_algo"] == method.upper()
    assert config == original


def test_arguments_are_checked_before_anything_is_quantized(pair: Path, prompts: Path) -> None:
    asked = config(pair, prompts)
    wrong = asked.engine.model_copy(update={"args": {"pipeline_parallel_size": 2}})

    def report(step: str, done: int, total: int) -> None:
        assert "quantizing" not in step

    with pytest.raises(ConfigError, match=r"engine\.args\.pipeline_parallel_size is 2"):
        build(asked.model_copy(update={"engine": wrong}), pair / "built", report)
    assert_only(pair)


@pytest.mark.models
def test_a_bundle_holds_the_quantized_target_and_its_cost(pair: Path, prompts: Path) -> None:
    settings = config(pair, prompts)
    output = pair / "built"
    result = build(settings, output, quiet)
    assert_only(pair, "built")
    engine = output / "engines" / "tensorrt_llm"
    manifest = read_manifest(output)
    assert manifest["config"]["engine"]["quantize"] == "fp8"
    assert manifest["quantization"]["taus"][0] >= 1
    assert set(manifest["target"]["quantized"]) == {"texts", "modelopt"}
    assert result.written.cost is not None
    assert result.written.cost.taus is not None
    assert not differences(output, manifest, "full", quiet)
    report = inspect(engine / "target", pair / "drafter")
    assert all(kind["fits"] for kind in report["engine_kinds"])
    assert {check["result"] for check in report["checks"]} == {"passed", "not checked"}
    assert str(prompts) not in (output / "manifest.json").read_text()
    assert yaml.safe_load((engine / "llm_args.yaml").read_text())["model"] == "target"
    assert not build(settings, output, quiet).built
    prompts.write_text(prompts.read_text() + '{"ids": [5, 6, 7]}\n')  # other scales
    assert build(settings, output, quiet).built


@pytest.mark.models
def test_a_killed_build_leaves_no_process_and_nothing_half_written(
    pair: Path, prompts: Path, tmp_path: Path
) -> None:
    file, asked = tmp_path / "x.yaml", config(pair, prompts)
    file.write_text(yaml.safe_dump(asked.model_dump(mode="json", exclude_unset=True)))
    output = pair / "built"
    command = [sys.executable, "-m", "dflash_trt", "build", str(file), "--output", str(output)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if b"quantizing" in line)
        workers = children(process.pid)
        process.kill()
    assert workers
    wait_until(lambda: not any(map(_alive, workers)))
    assert build(asked, output, quiet).built
    assert_only(pair, "built")


def children(process: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.models
def test_a_worker_that_is_killed_fails_the_build_with_a_sentence(pair: Path, prompts: Path) -> None:
    def kill(step: str, done: int, total: int) -> None:
        if "quantizing" in step and done == 1:
            for child in children(os.getpid()):
                if b"tensorrt_llm.quantization" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)

    with pytest.raises(BuildError, match="killed by SIGKILL; there may be too little memory"):
        build(config(pair, prompts), pair / "built", kill)
    assert_only(pair)
