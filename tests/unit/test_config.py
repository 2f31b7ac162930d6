"""Build configs: defaults, paths, and errors that name file, line, field and fix."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.config import BuildConfig, TensorRT, TensorRTLLM, json_schema, load_config, variants
from dflash_trt.errors import ConfigError
from dflash_trt.planning import Machine

HUB = "name: x\ntarget: {hub: org/a, revision: main}\ndrafter: {path: b}\n"
RTX = "engine:\n  kind: tensorrt\n  library: tensorrt_rtx\n"
GOOD = "name: x\ntarget: {path: a}\ndrafter: {path: b}\n"
ALIASES = [f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 9)]
BOMB = "".join(["a0: &a0 [x]\n", *ALIASES])
LLM = GOOD + "engine:\n  kind: tensorrt_llm\n"
MACHINE = """\
  hardware:
    name: x
    gpus: 8
    gpu: {name: y, sm: 90, memory_bytes: 1, bandwidth: 1, flops: {bf16: 1}, link_bandwidth: 1}
"""


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_smallest_config_has_the_documented_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.engine.model_dump() == {
        "kind": "onnxruntime",
        "device": "cpu",
        "threads": None,
        "quantize": None,
    }
    assert config.speculation.draft_tokens is None
    assert config.serving.model_dump() == {
        "mode": "ensemble",
        "slots": 4,
        "max_seq_len": None,
        "prefill_chunk": 256,
        "prefix_cache": None,
        "max_queue": 64,
        "max_per_client": None,
        "sampling_defaults": "model",
    }


def test_only_tensorrt_llm_computes_a_tail_again(tmp_path: Path) -> None:
    reuse = "serving: {prefix_cache: recompute_tail}\n"
    assert load_config(write(tmp_path, LLM + reuse)).serving.prefix_cache == "recompute_tail"
    with pytest.raises(ConfigError, match=r"recompute_tail needs engine\.kind tensorrt_llm"):
        load_config(write(tmp_path, GOOD + reuse))


@pytest.mark.parametrize(("given", "mib"), [("", 1024), ("prefix_cache: 0", 0), ("slots: 2", 1024)])
def test_our_engines_keep_prefixes_within_a_size(tmp_path: Path, given: str, mib: int) -> None:
    serving = f"serving: {{{given}}}\n"
    assert load_config(write(tmp_path, GOOD + serving)).serving.prefix_cache_mib == mib
    with pytest.raises(ConfigError, match=r"prefix_cache in MiB has no effect with engine\.kind"):
        load_config(write(tmp_path, LLM + "serving: {prefix_cache: 64}\n"))
    with pytest.raises(ConfigError, match=r"serving\.prefix_cache"):
        load_config(write(tmp_path, GOOD + "serving: {prefix_cache: -1}\n"))


def test_tensorrt_llm_looks_nothing_up(tmp_path: Path) -> None:
    for given in ("", "speculation: {lookup: false}\n"):
        speculation = load_config(write(tmp_path, LLM + given)).speculation
        assert (speculation.policy, speculation.lookup) == ("adaptive", False)
    with pytest.raises(ConfigError, match=r"lookup has no effect with engine\.kind tensorrt_llm"):
        load_config(write(tmp_path, LLM + "speculation: {lookup: true}\n"))


def test_a_machine_is_a_name_or_a_description(tmp_path: Path) -> None:
    engine = load_config(write(tmp_path, LLM)).engine
    assert isinstance(engine, TensorRTLLM)
    assert (engine.version, engine.hardware) == ("1.4.0rc1", "dgx-b300")
    engine = load_config(write(tmp_path, LLM + MACHINE)).engine
    assert isinstance(engine, TensorRTLLM)
    assert isinstance(engine.hardware, Machine)
    assert engine.hardware.gpu.flops.bf16 == 1


def test_compute_capabilities_may_be_numbers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD + RTX + "  compute_capabilities: [8.9, 12.0]\n"))
    assert isinstance(config.engine, TensorRT)
    assert config.engine.compute_capabilities == ["8.9", "12.0"]
    assert config.engine.dtype == "bf16"


def test_paths_are_relative_to_the_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    path = write(
        tmp_path / "configs", "name: x\ntarget: {path: ../a}\ndrafter: {path: /models/b}\n"
    )
    monkeypatch.chdir("/")
    config = load_config(path)
    assert config.target.path == tmp_path / "a"
    assert config.drafter.path == Path("/models/b")


def test_a_source_may_be_on_the_hub(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, HUB))
    assert (config.target.hub, config.target.revision) == ("org/a", "main")
    assert config.target.path is None
    assert config.drafter.path == tmp_path / "b"


def test_a_home_that_is_not_there_is_no_home(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD.replace("path: a", "path: ~no-such-user/a")))
    assert config.target.path == tmp_path / "~no-such-user" / "a"


WRONG = yaml.safe_load(Path(__file__).with_name("wrong_configs.yaml").read_text())


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong['line']}: {wrong['field']}")
def test_errors_name_file_line_field_and_fix(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = write(tmp_path, wrong["text"])
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert f"{path}:{wrong['line']}:" in message
    assert wrong["field"] in message
    assert wrong["fix"] in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "- a\n", "name\n", b"name: \xff\n"])
def test_what_is_not_a_mapping_is_refused(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"pair\.yaml"):
        load_config(write(tmp_path, text))


def test_schema_describes_every_field() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(BuildConfig.model_fields)
    assert schema["required"] == ["name", "target"]
    assert schema["additionalProperties"] is False
    sections = {"OnnxRuntime", "TensorRT", "TensorRTLLM", "Serving", "Source"}
    assert sections < set(schema["$defs"])
    for section, fields in schema["$defs"].items():
        for name, field in fields["properties"].items():
            assert field["description"], f"{section}.{name}"


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "serving: {slots: two, slot: 1}\nspeculaton: {}\n")
    with pytest.raises(ConfigError, match=r"has 3 mistakes") as caught:
        load_config(path)
    first, *lines, last = str(caught.value).splitlines()
    assert first == f"{path} has 3 mistakes:"
    assert [line.split(": ")[0] for line in (*lines, last)] == [f"{path}:{n}" for n in (4, 4, 5)]
    assert "unknown field 'serving.slot'. Did you mean 'slots'?" in lines[1]
    with pytest.raises(ConfigError, match=r"has 2 mistakes"):
        load_config(write(tmp_path, GOOD + GOOD.replace("name: x\n", "")))


MISTAKES = """\
name: X
target: {path: a}
target: {path: a}
drafter: {path: b, hub: c/d}
engine:
  kind: tensorrt_llm
  version: "0"
  hardware: dgx-1
speculation:
  draft_tokens: two
  lookup: true
serving:
  slots: 4
  max_queue: many
"""


def test_mistakes_of_several_sections_are_told_with_their_lines(tmp_path: Path) -> None:
    """Fields are compared with others only where they are right; nothing follows from a mistake."""
    with pytest.raises(ConfigError, match=r"has 7 mistakes") as caught:
        load_config(write(tmp_path, MISTAKES))
    found = [line.split(":")[1] for line in str(caught.value).splitlines()[1:]]
    assert found == ["1", "3", "4", "7", "8", "10", "14"]
    assert "no machine is called 'dgx-1'" in str(caught.value)
    wrong = LLM + "  gpu: 2\nserving: {prefix_cache: recompute_tail}\n"
    with pytest.raises(ConfigError, match=r"^\S+:6: unknown field 'engine.gpu'\. [^\n]+$"):
        load_config(write(tmp_path, wrong))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: " + "[" * 5000, "nested too deeply"),
        ("name: " + "[" * 150 + "]" * 150, "nested too deeply"),
        ("name: &a [*a]\n", "nested too deeply"),
        (BOMB, "more than 100000 values"),
        ("name: !!bool x\n", "a value in it cannot be read"),
        ("name: " + "x" * (1 << 18), "more than 256 KiB"),
        ("? [a]\n: b\n? [a]\n: c\n", "not valid YAML"),
    ],
)
def test_text_that_would_harm_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(write(tmp_path, text))


HEADS = {"drafter": {"path": "/b"}, "drafters": {"eagle3": {"path": "/e"}}}


@pytest.mark.parametrize(
    ("sections", "engine", "drafters"),
    [
        ({}, "onnxruntime", {"dflash": "/b", "ngram": None, "none": None}),
        ({}, "tensorrt_llm", {"dflash": "/b", "eagle3": "/e", "ngram": None, "none": None}),
    ],
)
def test_a_config_has_a_variant_of_each_method(
    sections: dict[str, Any], engine: str, drafters: dict[str, str | None]
) -> None:
    values = {"name": "x", "target": {"path": "/a"}, **HEADS, "engine": {"kind": engine}}
    found = variants(BuildConfig.model_validate(values | sections))
    assert list(found) == list(drafters)
    for method, config in found.items():
        assert config.speculation.method == method
        assert (config.drafter and str(config.drafter.path)) == drafters[method]
        assert variants(config) == found


def test_the_method_picks_its_drafter(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "name: x\ntarget: {path: a}\ndrafter: {path: b}\ndrafters: {eagle3: {path: e}}\n"
        "engine: {kind: tensorrt_llm}\nspeculation: {method: eagle3, draft_tokens: 5}\n"
    )
    config = load_config(file)
    assert config.drafter is not None
    assert config.drafter.path == tmp_path / "e"
    assert config.speculation.draft_tokens == 5
    other = variants(config)["dflash"]
    assert other.drafter is not None
    assert other.drafter.path == tmp_path / "b"
    assert other.speculation.draft_tokens is None
