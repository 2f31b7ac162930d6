"""Every config of build_configs/<machine>/ with stand-ins of its models (`published.py`): built as
`dflash-trt build` does, exported for the other engines, or refused as its first line says.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import yaml
from huggingface_hub import constants

from dflash_trt.builder import manifest, provenance
from dflash_trt.builder.export import ENGINES, export
from dflash_trt.builder.pipeline import build
from dflash_trt.checkpoints import load_tokenizer
from dflash_trt.checks import inspect
from dflash_trt.config import BuildConfig, TensorRT, load_config, variants
from dflash_trt.engines import read_info
from dflash_trt.errors import ConfigError, DflashError, PairError
from dflash_trt.files import Entry
from dflash_trt.graphs.builder import DataFile
from dflash_trt.planning import published_config
from dflash_trt.tensorrt_llm import bundle
from dflash_trt.tensorrt_llm.plan import make_plan
from tests.support.builds import quiet
from tests.support.exported import PUBLISHED, assert_published, assert_shell_agrees
from tests.support.published import COMMIT, FILES, PAIRS, is_hybrid, write_pair

pytestmark = pytest.mark.models

FOLDER = Path(__file__).parents[2] / "build_configs"
CONFIGS = sorted(FOLDER.glob("*/*.yaml"))
REFUSED = re.compile(r"# Refused by build: (.*)\n")
NEVER_TAKEN = re.compile(r"\.py$|\.png$|\.bin$|original/|metal/|docs/")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Fill a Hub cache with every model at its config's revision, and block the Hub."""
    directory = tmp_path_factory.mktemp("hub")
    for file in CONFIGS:
        config = load_config(file)
        sources = (config.target, *config.drafters.values())
        revisions = {str(source.hub): str(source.revision) for source in sources}
        write_pair(directory, PAIRS[file.stem], revisions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(directory))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        # to hash and copy the holes would take minutes and show nothing
        for module in (manifest, provenance):
            patch.setattr(module, "manifest_entry", lambda file: {"size": file.stat().st_size})
        patch.setattr(bundle, "copy_file", os.link)
        yield directory


def directories(cache: Path, name: str) -> list[Path]:
    pair = PAIRS[name]
    models = [f"models--{hub.replace('/', '--')}" for hub in (pair.target.hub, pair.drafter_hub)]
    return [next((cache / model / "snapshots").iterdir()) for model in models]


def test_every_published_pair_has_a_config() -> None:
    configs = [load_config(file) for file in FOLDER.glob("dgx-b300/*.yaml")]
    published = {pair.drafter_hub for pair in PAIRS.values()}
    assert {config.drafter and config.drafter.hub for config in configs} == published
    for file in CONFIGS:
        config, pair = load_config(file), PAIRS[file.stem]
        known = {"dflash": pair.drafter_hub} | ({"eagle3": pair.head["hub"]} if pair.head else {})
        assert config.target.hub == pair.target.hub
        assert {method: source.hub for method, source in config.drafters.items()} == known
        assert config.name == f"{file.stem}-{file.parent.name}"
        assert config.engine.hardware == file.parent.name


NAMES = [f"{file.parent.name}/{file.stem}" for file in CONFIGS]
every_config = pytest.mark.parametrize("file", CONFIGS, ids=NAMES)
DECODING = {"dflash": "DFlash", "eagle3": "Eagle3", "ngram": "NGram"}


@every_config
def test_each_method_builds_or_is_refused_as_it_says(
    cache: Path, tmp_path: Path, file: Path
) -> None:
    made, published = variants(load_config(file)), PAIRS[file.stem]
    refused = REFUSED.match(file.read_text())
    assert {*made} == {"dflash", "ngram", "none"} | ({"eagle3"} if published.head else set())
    if refused is not None:
        for method in refused_methods(file):
            with pytest.raises(DflashError) as caught:
                build(made.pop(method), tmp_path / "built", quiet)
            assert caught.value.problem.endswith(refused[1])
        assert not (tmp_path / "built").exists()
    for method, config in made.items():
        result = build(config, tmp_path / method, quiet)
        engine = result.directory / "engines" / "tensorrt_llm"
        args = yaml.safe_load((engine / "llm_args.yaml").read_text())
        drafts = args.get("speculative_config", {})
        assert drafts.get("decoding_type") == DECODING.get(method)
        ranks = json.loads((engine / "engine.json").read_text())["gpus"]
        assert args["tensor_parallel_size"] == ranks
        assert args["max_seq_len"] == config.serving.max_seq_len
        assert len(args["revision"]) == 40
        tokenizer = load_tokenizer(result.directory / "tokenizer")
        if published.files.get("tokenizer") == "kimi":
            assert args["skip_tokenizer_init"]
            assert tokenizer.encode("中文English混合").ids == [16717, 44372, 13935]
        assert (result.directory / "deploy" / "kubernetes" / "deployment.yaml").is_file()
        assert result.manifest["config"]["speculation"]["method"] == method
        assert (engine / "drafter" / "config.json").is_file() == (config.drafter is not None)
        taken = result.manifest["inputs"].values()
        files = [path for role in taken for path in role]
        assert files
        assert not [path for path in files if NEVER_TAKEN.search(path)]
        if method == "dflash":
            assert drafts["max_draft_len"] == published.drafter["block_size"] - 1
        if config.drafter is not None:
            hub = published.drafter_hub if method == "dflash" else published.head["hub"]
            assert result.manifest["hub"]["drafter"]["id"] == hub


def refused_methods(file: Path) -> list[str]:
    """Without hidden states no drafter works."""
    return ["dflash"] if REFUSED.match(file.read_text()) else []


HYBRIDS = [name for name, pair in PAIRS.items() if is_hybrid(pair.target)]


def test_nine_pairs_are_hybrids() -> None:
    assert len(HYBRIDS) == 9


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_is_built_for_our_own_engine(
    cache: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the weights themselves: 54 GB of the 27B."""

    def hole(data: DataFile, file: Path, _: object) -> Entry:
        with file.open("wb") as stream:
            stream.truncate(data._size)
        return {"size": data._size}

    monkeypatch.setattr(DataFile, "write", hole)
    target, drafter = directories(cache, name)
    report = inspect(target, drafter)
    kinds = {kind["kind"]: kind for kind in report["engine_kinds"]}
    assert [kind for kind, about in kinds.items() if about["fits"]] == [
        "onnxruntime",
        "pytorch",
        "tensorrt_llm",
    ]
    assert "LinearAttention" in " ".join(kinds["tensorrt"]["reasons"])
    assert not [check for check in report["checks"] if check["result"] == "error"]
    config = load_config(FOLDER / "dgx-b300" / f"{name}.yaml")
    sizes = {"slots": 2, "max_seq_len": 4096}
    ours = BuildConfig(name=name, target=config.target, drafter=config.drafter, serving=sizes)
    built = build(ours, tmp_path / "built", quiet).directory
    info = read_info(built / "engines" / "target")
    layers = report["target"]["num_hidden_layers"]
    assert info.states is not None
    assert (info.states.layers, len(info.caches)) == (layers * 3 // 4, layers // 4)
    assert info.states.slot_bytes == report["target"]["state_bytes"]["slot"]
    assert info.states.kept_bytes == report["target"]["state_bytes"]["kept"]
    # every tensor of the text is in the graph once, the casts to float32 not counted
    weights = (built / "engines" / "target" / "model.onnx.data").stat().st_size
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert weights == pytest.approx(index["metadata"]["text_size"], rel=0.01)
    graph = onnx.load(built / "engines" / "target" / "model.onnx", load_external_data=False)
    assert sum(node.op_type == "If" for node in graph.graph.node) == info.states.layers
    with pytest.raises(ConfigError, match="plugin"):
        build(
            ours.model_copy(
                update={
                    "engine": TensorRT(
                        kind="tensorrt", library="tensorrt_rtx", compute_capabilities=["8.9"]
                    )
                }
            ),
            tmp_path / "no",
            quiet,
        )


@every_config
def test_it_can_be_planned(cache: Path, tmp_path: Path, file: Path) -> None:
    models = directories(cache, file.stem)
    found = make_plan(load_config(file), *models)
    index = json.loads((models[0] / "model.safetensors.index.json").read_text())
    sizes = {
        "target": index["metadata"]["text_size"],
        "drafter": sum(shard.stat().st_size for shard in models[1].glob("*.safetensors")),
    }
    known = FILES["drafters"][PAIRS[file.stem].drafter_hub]
    assert sizes["drafter"] / (1 << 30) == pytest.approx(known[0], abs=0.02)
    for role, size in sizes.items():
        assert found[role]["weight_bytes"] == pytest.approx(size, rel=0.02)
    assert found["machine"]["name"] == file.parent.name
    assert any(layout["sequences"][32768] for layout in found["memory"])
    # what the package has of the two config.json says the same
    config, bare = load_config(file), tmp_path
    for role, hub in {"target": config.target.hub, "drafter": PAIRS[file.stem].drafter_hub}.items():
        (bare / role).mkdir()
        (bare / role / "config.json").write_text(json.dumps(published_config(str(hub))))
    packaged = make_plan(config, bare / "target", bare / "drafter")
    for part in ("target", "drafter", "assumed", "speed"):
        assert packaged[part] == found[part]
    # but for the bytes of the files, which it does not have: those of hybrids hold more than text
    of_text = index["metadata"]["text_size"] / index["metadata"]["total_size"]
    for with_index, without in zip(found["memory"], packaged["memory"], strict=True):
        target, free = (
            [row[name] for row in (with_index, without)] for name in ("target_bytes", "free_bytes")
        )
        assert target[1] == pytest.approx(target[0] * of_text, rel=0.02)
        assert free[1] - free[0] == pytest.approx(target[0] - target[1], abs=2)
        if of_text == 1:
            assert without["sequences"] == pytest.approx(with_index["sequences"], rel=0.05)


@every_config
def test_it_can_be_compared_with_other_engines(cache: Path, file: Path, tmp_path: Path) -> None:
    refused, scripts = REFUSED.match(file.read_text()), dict[str, str]()
    reason = re.escape(refused[1]) if refused else ""
    for method, config in variants(load_config(file)).items():
        for engine in ENGINES:
            if method in refused_methods(file) and engine in ("trtllm-serve", "dynamo"):
                with pytest.raises(PairError, match=reason):
                    export(config, engine, quiet)
            else:
                script = export(config, engine, quiet)
                assert_pinned(script, config)
                if engine != "dynamo":
                    scripts[f"{method}-{engine}"] = script
                if engine in PUBLISHED:
                    assert_published(script, engine)
    assert_shell_agrees(scripts, tmp_path)


@every_config
def test_it_is_exported_without_the_hub_as_with_it(
    cache: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(file)
    refused = refused_methods(file)
    engines = [name for name in ENGINES if not refused or name not in ("trtllm-serve", "dynamo")]
    online = {engine: export(config, engine, quiet) for engine in engines}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for engine, script in online.items():
        offline = export(config, engine, quiet)
        # nothing says which commit `main` is
        assert offline.replace("main", COMMIT) == script.replace("main", COMMIT)


def assert_pinned(script: str, config: BuildConfig) -> None:
    assert config.target.hub is not None
    assert config.target.hub in script
    assert config.drafter is None or str(config.drafter.hub) in script
    assert "main" not in script.replace("name: main", "")  # a container's, of Dynamo
