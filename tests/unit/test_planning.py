"""The plan: sizes against transformers' own models, memory by hand, and figures of others."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from pydantic import TypeAdapter, ValidationError

from dflash_trt.checkpoints import load_target, target_shapes
from dflash_trt.errors import CheckpointError, ConfigError
from dflash_trt.hardware import PRESETS, Machine, find_machine
from dflash_trt.planning import (
    Constants,
    Layout,
    Method,
    drafter_size,
    published_models,
    target_size,
)
from dflash_trt.planning.capacity import arena_slot, bytes_per_gpu, cache_bytes
from dflash_trt.planning.rounds import draft_rate
from tests.support import families
from tests.support.commands import run
from tests.support.hub import Repository, running_hub

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import calibrate_plan as calibrate  # noqa: E402

TARGETS = {hub.split("/")[1]: values for hub, values in published_models()["targets"].items()}
DRAFTERS = {
    hub: {**drafter["config"], **drafter["config"]["dflash_config"]}
    for hub, drafter in published_models()["drafters"].items()
}
EIGHT = Layout(8)
ONE = Layout()
SPREAD = Layout(8, attention_dp=True, experts_parallel=True)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-4B", 4.02), ("Qwen3-8B", 8.19), ("Llama-3.1-8B-Instruct", 8.03),
     ("Qwen3-Coder-30B-A3B-Instruct", 30.5), ("gpt-oss-120b", 116.8), ("gpt-oss-20b", 20.9),
     ("Qwen3-Coder-Next", 79.7), ("Qwen3.5-9B", 8.95), ("Qwen3.5-27B", 26.9),
     ("Qwen3.5-35B-A3B", 34.7)],
)  # fmt: skip
def test_published_models_have_their_published_sizes(name: str, billions: float) -> None:
    assert calibrate.target(name).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.fixture(scope="module")
def oss() -> Any:
    return calibrate.target("gpt-oss-120b")


@pytest.fixture(scope="module")
def oss_drafter(oss: Any) -> Any:
    return drafter_size(DRAFTERS["z-lab/gpt-oss-120b-DFlash"], oss)


def test_weights_of_gpt_oss_by_hand(oss: Any) -> None:
    experts = 36 * 128 * 3 * 2880 * 2880 * (4.25 / 8)
    attention = 36 * 2 * (2880 * (64 + 8 + 8) * 64 + 64 * 64 * 2880)
    router, tables = 36 * 128 * 2880 * 2, 2 * 201088 * 2880 * 2
    whole = experts + attention + router + tables
    assert whole == pytest.approx(65.25e9, rel=2e-3)  # the checkpoint's files
    assert bytes_per_gpu(oss, ONE) == whole
    assert bytes_per_gpu(oss, EIGHT) == whole / 8
    # attention-DP splits the experts alone
    assert bytes_per_gpu(oss, SPREAD) == experts / 8 + attention + router + tables


def test_caches_of_gpt_oss_by_hand(oss: Any, oss_drafter: Any) -> None:
    # half of 36 layers see 128 tokens; 8 KV heads of 64, bf16
    assert cache_bytes(oss, ONE, 8192, 2) == 18 * 2 * 8 * 64 * 2 * (8192 + 128)
    assert cache_bytes(oss, EIGHT, 8192, 1) == 18 * 2 * 1 * 64 * 1 * (8192 + 128)
    # no half of a head
    assert cache_bytes(oss, Layout(16), 8192, 1) == cache_bytes(oss, EIGHT, 8192, 1)
    assert cache_bytes(oss, SPREAD, 8192, 2) == cache_bytes(oss, ONE, 8192, 2)
    # 16,384 bytes for each token of a slot; 64 of them and one of padding at 131,072 tokens
    slot = arena_slot(oss_drafter, 1, 131072 + 10, "VANILLA")
    assert slot == 16384 * (131072 + 10)
    assert 65 * slot / (1 << 30) == pytest.approx(130, abs=0.1)
    assert arena_slot(oss_drafter, 8, 131072 + 10, "VANILLA") == slot / 8


OWN = """
name: lab
gpus: 4
gpu:
  name: H100 NVL
  sm: 90
  memory_bytes: 100_000_000_000
  bandwidth: 3.9e+12
  flops: {bf16: 8.0e+14, fp8: 1.6e+15}
  link_bandwidth: 3.0e+11
"""
WRONG = (None, 0, -1, 1, "x", [], {}, [1], ["x"], {"a": 1}, 1.5, 1e300, True, 10**30)


def places(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *more) for more in places(value))


def test_fields_of_any_kind_are_read_or_refused() -> None:
    kimi = {
        **{"num_hidden_layers": 4, "n_routed_experts": 32, "first_k_dense_replace": 1},
        **{"hidden_size": 1024, "tie_word_embeddings": False},
        **{"num_attention_heads": 4, "vocab_size": 500, "num_experts_per_tok": 2},
        **{"kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 16},
        **{"qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 64},
        "full_attention_interval": 2,
        "per_layer_config": {"01": {"head_dim": 3}},
        "quantization_config": {"config_groups": {"g": {"weights": {"num_bits": 4}}}},
    }
    models, refused = TARGETS, 0
    sound = target_size(models["Qwen3.5-9B"])
    drafter = DRAFTERS["z-lab/Qwen3.8-27B-DFlash2"]
    for values in (models["gpt-oss-120b"], models["Qwen3-Coder-Next"], kimi, drafter):
        for place in places(values):
            for wrong in WRONG:
                spoiled = json.loads(json.dumps(values))
                inner = spoiled
                for name in place[:-1]:
                    inner = inner[name]
                inner[place[-1]] = wrong
                try:
                    shape = (
                        drafter_size(spoiled, sound) if values is drafter else target_size(spoiled)
                    )
                except CheckpointError:
                    refused += 1
                    continue
                assert cache_bytes(shape, EIGHT, 100, 2) >= 0 < bytes_per_gpu(shape, SPREAD)
    assert refused > 50


def test_fewer_drafts_are_accepted_as_the_model_card_says() -> None:
    """gpt-oss-120b-DFlash, GSM8K: 5.3, 4.3 and 3.3 with 9, 5 and 3 drafts."""
    whole = Method("DFlash", 9, 5.3)
    assert whole.shortened(9) == whole
    assert whole.shortened(5).acceptance == pytest.approx(4.3, rel=0.06)
    assert whole.shortened(3).acceptance == pytest.approx(3.3, rel=0.06)
    # the drafter fills its whole block all the same
    drafter = calibrate.drafting("z-lab/gpt-oss-120b-DFlash", "gpt-oss-120b", 5.3)
    assert drafter.shortened(3).block == drafter.block == 10
    assert draft_rate(1.0, 5) == pytest.approx(0, abs=1e-6)


def test_the_constants_are_the_fitted_ones() -> None:
    known = Constants.fitted()
    moved = calibrate.numbers(calibrate.fit(known, steps=3)) - calibrate.numbers(known)
    assert abs(moved).max() < 0.02
    assert len(moved) == calibrate.FITTED


def test_figures_that_were_not_fitted_are_met_as_said() -> None:
    written = yaml.safe_load((ROOT / "dflash_trt/planning/constants.yaml").read_text())["errors"]
    off = sorted(abs(math.log1p(error)) for error in calibrate.errors(Constants.fitted(), "check"))
    fitted = calibrate.errors(Constants.fitted(), "calibrate")
    assert written["checked"] == len(off) > 4 * len(fitted)
    within = sum(each <= written["nine_of_ten"] * 1.01 for each in off)
    assert within / len(off) == pytest.approx(0.9, abs=0.02)
    assert off[len(off) // 2] == pytest.approx(written["median"], rel=0.05)


def test_presets_are_known_by_name() -> None:
    assert find_machine("dgx-b300") is PRESETS["dgx-b300"]
    assert find_machine("gb300-nvl72-slice").domain == 8
    with pytest.raises(ConfigError, match=r"'dgx-a100'.*dgx-b300, dgx-b200"):
        find_machine("dgx-a100")


def test_an_own_machine_is_a_mapping_of_these_fields_alone() -> None:
    values = yaml.safe_load(OWN)
    own = TypeAdapter(str | Machine).validate_python(values)
    assert find_machine(own) is own
    assert (own.domain, own.gpu.sm, own.gpu.flops.fp8) == (4, 90, 1.6e15)
    with pytest.raises(ValidationError, match="watts"):
        TypeAdapter(Machine).validate_python(values | {"watts": 700})


# the command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    drafter = DRAFTERS["z-lab/gpt-oss-120b-DFlash"]
    for role, values in (("target", TARGETS["gpt-oss-120b"]), ("drafter", drafter)):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps(values))
    file = tmp_path / "plan.yaml"
    write(file, kind="tensorrt_llm", hardware="dgx-b300")
    return file


def write(file: Path, **engine: Any) -> None:
    places = {role: {"path": role} for role in ("target", "drafter")}
    file.write_text(yaml.safe_dump({"name": "oss", **places, "engine": engine}))


@pytest.mark.parametrize("file", sorted((ROOT / "build_configs").glob("dgx-b300/*.yaml")))
def test_a_published_pair_is_planned_without_a_network(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run("plan", file, "--json")
    assert code == 0, err
    assert err.count("taken as the package has it") == 2
    assert json.loads(out)["speed"]
    (tmp_path / "config.yaml").write_text(file.read_text().replace("z-lab/", "nobody/"))
    assert run("plan", tmp_path / "config.yaml")[0] == 1


def test_a_hub_that_does_not_answer_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    file = ROOT / "build_configs" / "dgx-b300" / "gpt-oss-120b.yaml"
    pair = "openai/gpt-oss-120b@main", "z-lab/gpt-oss-120b-DFlash@main"
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        hub.failing = ("/", 503)
        for command in (("plan", file), ("export", "vllm", file), ("inspect", *pair)):
            code, _, err = run(*command)
            assert code == 0, err
            assert err.count("taken as the package has it") == 2
        assert hub.log == ["HEAD /"]
        # what the package does not know is asked for as ever
        code, _, err = run("inspect", "nobody/knows@main")
        assert (code, len(hub.log) > 1) == (1, True)
        assert "taken as" not in err


def test_a_hub_is_asked_for_no_weights(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    sources = {}
    with running_hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        for role, name in (
            ("target", "openai/gpt-oss-120b"),
            ("drafter", "z-lab/gpt-oss-120b-DFlash"),
        ):
            (tmp_path / role / "model.safetensors").write_bytes(b"not to be read")
            hub.repositories[name] = Repository(tmp_path / role, {"main": "c" * 40})
            sources[role] = {"hub": name, "revision": "main"}
        engine = {"kind": "tensorrt_llm", "gpus": 1}
        config.write_text(yaml.safe_dump({"name": "oss", **sources, "engine": engine}))
        code, out, _ = run("plan", config, "--json")
        assert not any("safetensors" in line for line in hub.log)
    plan = json.loads(out)
    assert code == 0
    assert plan["target"]["name"] == "openai/gpt-oss-120b"
    assert plan["assumed"]["acceptance_from"].startswith("published")
    assert plan["assumed"]["acceptance"] == pytest.approx(4.68)


def test_a_plan_of_two_configs(config: Path) -> None:
    code, out, _ = run("plan", config, "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["machine"] == {"name": "dgx-b300", "gpu": "B300", "gpus": 8}
    assert plan["target"]["weight_bytes"] == pytest.approx(65.2e9, rel=2e-3)
    assert [row["layout"] for row in plan["memory"]] == [
        "1 GPU", "TP2", "DP2 EP2", "TP4", "DP4 EP4", "TP8", "DP8 EP8"
    ]  # fmt: skip
    by_length = [*plan["memory"][-2]["sequences"].values()]
    assert by_length == sorted(by_length, reverse=True)
    assert by_length[-1] > 0
    assert {point["method"] for point in plan["speed"]} == {"plain", "DFlash"}
    assert plan["assumed"]["acceptance_from"].startswith("taken")
    assert plan["built"]["layout"].startswith("TP8")


def test_what_a_config_and_options_change(config: Path) -> None:
    def plan(*options: object) -> Any:
        code, out, _ = run("plan", config, "--json", *options)
        assert code == 0
        return json.loads(out)

    def fastest(plan: Any) -> float:
        return max(p["tokens_per_user"] for p in plan["speed"] if p["method"] == "DFlash")

    usual = plan()
    assert fastest(plan("--acceptance", 6)) > fastest(usual)
    assert plan("--machine", "hgx-h200")["assumed"]["attention_backend"] == "FA4"
    assert plan("--context", 512)["assumed"]["context"] == 512
    write(config, kind="tensorrt_llm", hardware="dgx-b300", gpus=2,
          args={"kv_cache_config": {"dtype": "fp8"}})  # fmt: skip
    changed = plan()
    assert changed["machine"]["gpus"] == 2
    write(config, kind="onnxruntime")
    of_machine = plan("--machine", "hgx-h200")["assumed"]
    assert of_machine["attention_backend"] == "FA4"
    halves = [x["memory"][0]["kv_bytes_per_token"] for x in (usual, changed)]
    assert halves[0] == 2 * halves[1]


@pytest.mark.parametrize("objective", ["balanced", "throughput"])
def test_the_built_batch_is_what_the_plan_counts(config: Path, objective: str) -> None:
    """A drafter's arena for max_seq_len, a cache for 4,096 tokens of each sequence."""
    write(config, kind="tensorrt_llm", hardware="hgx-h200", concurrency=99999, objective=objective)
    code, out, _ = run("plan", config, "--json")
    plan = json.loads(out)
    assert code == 0
    layout = plan["built"]["layout"]
    (row,) = [row for row in plan["memory"] if row["layout"] == layout.replace("TP8 EP8", "TP8")]
    ranks = 8 if layout.startswith("DP") else 1
    assert plan["built"]["max_batch_size"] == row["sequences"]["4096"] // ranks > 50
    assert max(point["concurrency"] for point in plan["speed"]) <= max(
        row["sequences"]["4096"] for row in plan["memory"]
    )


def test_what_cannot_be_planned_is_said(config: Path) -> None:
    code, _, error = run("plan", config, "--machine", "dgx-1")
    assert code == 2
    assert "dgx-b300, dgx-b200" in error
    write(config, kind="onnxruntime")
    code, _, error = run("plan", config)
    assert code == 2
    assert "--machine" in error
    code, out, _ = run("plan", config, "--machine", "hgx-h100", "--json")
    assert (code, json.loads(out)["built"]) == (0, None)
    (config.parent / "target" / "config.json").write_text("{}")
    code, _, error = run("plan", config, "--machine", "hgx-h100")
    assert (code, "states no" in error) == (1, True)


def test_a_step_of_one_gpu_is_as_measured() -> None:
    """One figure gives a kernel's seconds, the others check it."""
    off = calibrate.errors(Constants.fitted(), "one_gpu")
    assert abs(off[0]) < 0.01
    assert 0 < max(map(abs, off[1:])) < 0.05
    again = calibrate.with_one_gpu(Constants.fitted())
    assert again.kernel["pytorch"] == pytest.approx(Constants.fitted().kernel["pytorch"], rel=0.01)


def test_one_gpu_is_planned_for_our_own_engine(config: Path) -> None:
    """gpt-oss-20b: experts in 16 bits, on one of the machine's GPUs."""
    (config.parent / "target" / "config.json").write_text(json.dumps(TARGETS["gpt-oss-20b"]))

    def plan(*options: object, **engine: object) -> Any:
        write(config, kind="pytorch", **engine)
        code, out, _ = run("plan", config, "--machine", "hgx-h200", "--json", *options)
        assert code == 0
        return json.loads(out)

    usual = plan()
    assert usual["machine"] == {"name": "hgx-h200", "gpu": "H200 SXM", "gpus": 1}
    assert usual["target"]["formats"] == ["bf16"]
    assert usual["target"]["weight_bytes"] == 2 * usual["target"]["parameters"]
    assert {point["layout"] for point in usual["speed"]} == {"1 GPU"}
    fp8 = plan(quantize="fp8")
    assert fp8["target"]["formats"] == ["bf16", "fp8"]  # experts stay
    assert fp8["target"]["weight_bytes"] < usual["target"]["weight_bytes"]
    assert usual["errors"] is None
    assert "single steps" in run("plan", config, "--machine", "hgx-h200")[1]


def test_what_one_gpu_is_not_planned_for(config: Path) -> None:
    write(config, kind="pytorch")
    code, _, error = run("plan", config, "--machine", "hgx-h200", "--context", 9000)
    assert code == 2
    assert "above serving.max_seq_len, 4096" in error
    write(config, kind="pytorch", dtype="float32")
    code, _, error = run("plan", config, "--machine", "hgx-h200")
    assert code == 2
    assert "engine.dtype is float32" in error


def test_text_says_how_far_it_may_be_off(config: Path) -> None:
    code, out, _ = run("plan", config, "--machine", "hgx-h200")
    assert code == 0
    assert "These are estimates" in out
    assert "over plain" in out
    assert "…" not in out  # no number is cut off


def test_a_model_too_large_is_said(config: Path, tmp_path: Path) -> None:
    target = tmp_path / "target" / "config.json"
    target.write_text(json.dumps({**json.loads(target.read_text()), "num_local_experts": 8192}))
    code, out, _ = run("plan", config, "--machine", "hgx-h100")
    assert code == 0
    assert "do not fit" in out


@pytest.mark.parametrize("name", [*families.DENSE, *families.MOE, *families.HYBRIDS])
def test_a_size_is_that_of_the_tensors(name: str, tmp_path: Path) -> None:
    """But norms and biases."""
    target = load_target(families.make(name, tmp_path).target_dir)
    stored = sum(
        math.prod(shape)
        for name, shape in target_shapes(target.spec).items()
        if len(shape) > 1 and not name.endswith("bias")
    )
    assert target_size(target.values).parameters == pytest.approx(stored, rel=0.01)
