"""Scripts for other engines: their options are published ones, and the shell agrees."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dflash_trt.builder.export import ENGINES, export
from dflash_trt.checkpoints import Located, Model
from dflash_trt.config import BuildConfig, Method, Source
from dflash_trt.errors import ConfigError, PairError
from tests.support.builds import config_of
from tests.support.commands import run
from tests.support.exported import PUBLISHED, commands
from tests.support.pairs import make_pair
from tests.unit.test_deployment import KUBERNETES, SCHEMAS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("a pair")  # a path that must be quoted
    make_pair(directory, block_size=8)
    (directory / "head").mkdir()
    values = json.loads((directory / "target" / "config.json").read_text())
    head = {"draft_vocab_size": values["vocab_size"], "num_hidden_layers": 1}
    head |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    (directory / "head" / "config.json").write_text(json.dumps(values | head))
    return directory


def made(directory: Path, drafter: Path | None = None, **engine: Any) -> BuildConfig:
    section = {"kind": "tensorrt_llm", "gpus": 2, **engine}
    return config_of(directory, drafter={"path": drafter or directory / "drafter"}, engine=section)


def written(config: BuildConfig, engine: str) -> str:
    return export(config, engine, lambda *_: None)


def with_method(directory: Path, method: Method) -> BuildConfig:
    """Set the method; export needs only the name of an EAGLE-3 head."""
    drafter = {"drafter": {"path": directory / "head"}} if method == "eagle3" else {}
    return config_of(
        directory,
        **{"drafter": None, **drafter},
        engine={"kind": "tensorrt_llm", "gpus": 2},
        speculation={"method": method},
    )


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def test_each_method_is_that_of_the_engine(pair: Path) -> None:
    drafts, lines = "--speculative-config", {}
    for method in ("eagle3", "ngram", "none"):
        config = with_method(pair, method)
        lines[method] = [commands(written(config, engine))[0] for engine in ("vllm", "sglang")]
    vllm = {method: json.loads(option(x, drafts) or "null") for method, (x, _) in lines.items()}
    head = str(pair / "head")
    assert vllm == {
        "eagle3": {"method": "eagle3", "num_speculative_tokens": 3, "model": head},
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        "none": None,
    }
    allowed = {*PUBLISHED["vllm"]["speculative_config"]}
    assert all(each.keys() <= allowed for each in vllm.values() if each)
    names = ("algorithm", "num-steps", "num-draft-tokens", "draft-model-path")
    sglang = {
        method: [option(x, f"--speculative-{name}") for name in names]
        for method, (_, x) in lines.items()
    }
    assert sglang == {
        "eagle3": ["EAGLE3", "3", "4", head],
        "ngram": ["NGRAM", None, "4", None],
        "none": [None] * 4,
    }


def test_vllm_gets_its_drafter(pair: Path) -> None:
    (words,) = commands(written(made(pair, concurrency=3), "vllm"))
    drafter = json.loads(words[words.index("--speculative-config") + 1])
    assert drafter == {
        "method": "dflash",
        "model": str(pair / "drafter"),
        "num_speculative_tokens": 7,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
        "enable_adaptive_verification": True,
    }
    assert drafter.keys() <= set(PUBLISHED["vllm"]["speculative_config"])
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--max-num-seqs") + 1] == "3"
    assert words[words.index("--attention-backend") + 1] == "flash_attn"
    assert words[words.index("--max-num-batched-tokens") + 1] == "32768"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_code_of_a_checkpoint_runs_where_the_config_says_so(pair: Path, engine: str) -> None:
    assert "trust" not in written(made(pair), engine)
    trusting = written(made(pair, args={"trust_remote_code": True}), engine)
    assert "--trust-remote-code" in trusting


@pytest.mark.parametrize(
    ("engine", "option"),
    [("vllm", "--no-enable-prefix-caching"), ("sglang", "--disable-radix-cache")],
)
def test_prefixes_are_kept_where_the_bundle_keeps_them(
    pair: Path, engine: str, option: str
) -> None:
    config = made(pair)
    assert option in written(config, engine)
    serving = config.serving.model_copy(update={"prefix_cache": "recompute_tail"})
    script = written(config.model_copy(update={"serving": serving}), engine)
    assert option not in script
    assert "acceptance may drop" in script


def test_vllm_runs_gemma_with_two_backends(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its causal backends run the target, and drafts need one that is not causal."""
    monkeypatch.setattr(Model, "architecture", "Gemma4ForConditionalGeneration")
    script = written(made(pair), "vllm")
    (words,) = commands(script)
    drafter = json.loads(words[words.index("--speculative-config") + 1])
    assert drafter["attention_backend"] == "flash_attn"
    assert words[words.index("--attention-backend") + 1] == "triton_attn"
    assert "# needs vllm>=0.33" in script


@pytest.mark.parametrize(
    ("speculation", "engine", "expected"),
    [
        ({}, {}, {"enable_adaptive_verification": True}),
        ({}, {"objective": "latency"}, {}),  # with few users it loses
        ({"policy": "fixed"}, {}, {}),
        (
            {},
            {"args": {"speculative_config": {"draft_len_schedule": {32: 7, 256: 3}}}},
            {"num_speculative_tokens_per_batch_size": [[1, 32, 7], [33, 256, 3]]},
        ),
    ],
)
def test_vllm_verifies_as_the_policy_does(
    speculation: dict[str, Any], engine: dict[str, Any], expected: dict[str, Any], pair: Path
) -> None:
    section = {"kind": "tensorrt_llm", "gpus": 2, **engine}
    (words,) = commands(written(config_of(pair, engine=section, speculation=speculation), "vllm"))
    drafter = json.loads(option(words, "--speculative-config") or "")
    names = ("enable_adaptive_verification", "num_speculative_tokens_per_batch_size")
    assert {name: drafter[name] for name in names if name in drafter} == expected


def test_attention_of_each_rank_is_said_and_counted(pair: Path) -> None:
    args = {"enable_attention_dp": True}
    for engine, name in (("vllm", "--max-num-seqs"), ("sglang", "--max-running-requests")):
        script = written(made(pair, concurrency=6, args=args), engine)
        assert ("vllm gets tensor parallelism only" in script) == (engine == "vllm")
        (words,) = commands(script)
        assert option(words, name) == "6"
    assert option(words, "--attn-dp-size") == "2"
    assert "--enable-dp-lm-head" in words
    section = {"kind": "tensorrt_llm", "gpus": 2, "args": args}
    lookup = config_of(pair, drafter=None, engine=section, speculation={"method": "ngram"})
    script = written(lookup, "sglang")  # which refuses the two together
    assert "sglang gets tensor parallelism only" in script
    assert "--attn-dp-size" not in script


def test_sglang_verifies_the_drafts_that_it_samples_as_a_block(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = "--speculative-use-block-verification"
    assert block not in written(made(pair), "sglang")
    monkeypatch.setattr(Model, "architecture", "DFlash2DraftModel")
    assert block in written(made(pair), "sglang")


def test_sglang_counts_the_anchor(pair: Path) -> None:
    (words,) = commands(written(made(pair), "sglang"))
    assert words[words.index("--speculative-dflash-block-size") + 1] == "8"
    assert words[words.index("--speculative-algorithm") + 1] in PUBLISHED["sglang"]["algorithms"]
    assert "--speculative-draft-model-quantization" not in words  # nothing to inherit


def test_trtllm_serve_gets_the_arguments_of_a_build(pair: Path) -> None:
    text = written(made(pair), "trtllm-serve").split("<<'EOF'\n")[1].split("EOF\n")[0]
    args = yaml.safe_load(text)
    assert args["speculative_config"]["speculative_model"] == str(pair / "drafter")
    assert args["speculative_config"]["max_draft_len"] == 7
    assert args["tensor_parallel_size"] == 2
    assert "model" not in args


def test_dynamo_gets_the_arguments_of_a_build(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="a directory of this machine"):
        written(made(pair), "dynamo")
    hub = {role: Source(hub=f"org/{role}", revision="0" * 40) for role in ("target", "drafter")}
    monkeypatch.setattr(
        "dflash_trt.builder.export.locate_config",
        lambda source, role, report, scratch: Located(pair / role, source.revision),
    )
    text = written(made(pair).model_copy(update=hub), "dynamo")
    config, graph = yaml.safe_load_all(text)
    kubernetes_validate.validate(config, KUBERNETES, strict=True)
    jsonschema.validate(graph, json.loads((SCHEMAS / "dynamographdeployment.json").read_text()))
    for component in graph["spec"]["components"]:
        spec = component["podTemplate"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    fetches = [each["command"] + each["args"] for each in spec["initContainers"]]
    assert fetches[0][:3] == ["hf", "download", "org/target"]
    assert fetches[1][-4:] == ["--local-dir", "/models/drafter", "--revision", "0" * 40]
    (server,) = spec["containers"]
    assert server["resources"]["limits"] == {"nvidia.com/gpu": 2}
    args = yaml.safe_load(config["data"]["llm_args.yaml"])
    script = written(made(pair), "trtllm-serve")
    built = yaml.safe_load(script.split("<<'EOF'\n")[1].split("EOF\n")[0])
    assert built["speculative_config"].pop("speculative_model") == str(pair / "drafter")
    assert args["speculative_config"].pop("speculative_model") == "/models/drafter"
    assert args == built
    frontend = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]
    assert frontend["command"] == ["python3", "-m", "dynamo.frontend"]
    assert frontend["image"] == "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.6.1"
    tail = {"speculative_config": {"context_recompute_tail": 64}}
    config = made(pair, args=tail).model_copy(update=hub)
    serving = config.serving.model_copy(update={"prefix_cache": "recompute_tail"})
    text = written(config.model_copy(update={"serving": serving}), "dynamo")
    assert "No prompt is reused: TensorRT-LLM 1.3.0rc29 runs no tail of it again" in text
    args = yaml.safe_load(next(yaml.safe_load_all(text))["data"]["llm_args.yaml"])
    assert "context_recompute_tail" not in args["speculative_config"]
    assert args["kv_cache_config"]["enable_block_reuse"] is False


@pytest.mark.parametrize("engine", ENGINES)
def test_several_nodes_are_refused(pair: Path, engine: str) -> None:
    config = made(pair, hardware="gb300-nvl72-slice", gpus=8)
    wide = config.engine.model_copy(update={"args": {"tensor_parallel_size": 8}})
    with pytest.raises(ConfigError, match="a node of gb300-nvl72-slice has 4"):
        written(config.model_copy(update={"engine": wide}), engine)


def test_what_an_engine_does_not_run_is_refused(pair: Path) -> None:
    samples = Path(__file__).parents[1] / "samples"
    for name, form in (("speculators-full", "speculators"), ("deepspec-dflash", "DeepSpec")):
        for engine in ("sglang", "trtllm-serve"):
            with pytest.raises(PairError, match=f"{engine} does not read drafters in the {form}"):
                written(made(pair, samples / name), engine)
    full = samples / "speculators-full"
    assert str(full) in written(made(pair, full), "vllm")
    for name in ("deepspec-dflash", "speculators-reduced"):
        with pytest.raises(PairError, match="vllm runs no DFlash drafter whose anchor's place"):
            written(made(pair, samples / name), "vllm")


def test_the_command_prints_the_script(pair: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(made(pair).model_dump_json(exclude_none=True, exclude={"serving"}))
    code, out, _ = run("export", "sglang", file)
    assert code == 0
    assert out.startswith("#!/usr/bin/env bash\n")
    code, _, err = run("export", "llama.cpp", file)
    assert code == 2
    assert "'llama.cpp' is not one of" in err
    assert all(engine in err for engine in ("vllm", "sglang", "trtllm-serve", "dynamo"))
    with pytest.raises(ConfigError, match="says nothing of GPUs"):
        written(config_of(pair), "vllm")
