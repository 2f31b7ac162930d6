"""Build configs: defaults, paths, and errors that name file, line, field and fix."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.config import BuildConfig, config_text, json_schema, load_config, variants
from dflash_trt.errors import ConfigError

GOOD = "name: x\ntarget: {path: a}\ndrafter: {path: b}\n"
ALIASES = [f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 9)]
BOMB = "".join(["a0: &a0 [x]\n", *ALIASES])
LLM = GOOD + "engine:\n  kind: tensorrt_llm\n"


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_prefixes_and_lookup_are_of_the_kinds_that_have_them(tmp_path: Path) -> None:
    reuse, size = "serving: {prefix_cache: recompute_tail}\n", "serving: {prefix_cache: 64}\n"
    assert load_config(write(tmp_path, LLM + reuse)).serving.prefix_cache == "recompute_tail"
    assert load_config(write(tmp_path, GOOD)).serving.prefix_cache_mib == 1024
    assert load_config(write(tmp_path, GOOD + size)).serving.prefix_cache_mib == 64
    assert load_config(write(tmp_path, LLM)).speculation.lookup is False
    for text, says in (
        (GOOD + reuse, r"recompute_tail needs engine\.kind tensorrt_llm"),
        (LLM + size, r"prefix_cache in MiB has no effect with engine\.kind"),
        (LLM + "speculation: {lookup: true}\n", r"lookup has no effect with engine\.kind"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config(write(tmp_path, text))


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
    schema["properties"].pop("extends")  # read before the fields are
    assert set(schema["properties"]) == set(BuildConfig.model_fields)
    assert schema["anyOf"][0]["required"] == ["name", "target"]
    assert schema["additionalProperties"] is False
    assert {"OnnxRuntime", "TensorRT", "TensorRTLLM", "Serving", "Source"} < set(schema["$defs"])
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
    ("engine", "drafters"),
    [
        ("onnxruntime", {"dflash": "/b", "ngram": None, "none": None}),
        ("tensorrt_llm", {"dflash": "/b", "eagle3": "/e", "ngram": None, "none": None}),
    ],
)
def test_a_config_has_a_variant_of_each_method(
    engine: str, drafters: dict[str, str | None]
) -> None:
    values = {"name": "x", "target": {"path": "/a"}, **HEADS, "engine": {"kind": engine}}
    found = variants(BuildConfig.model_validate(values))
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


def test_a_config_extends_another(tmp_path: Path) -> None:
    """Sections are merged, and paths start where they were written."""
    (tmp_path / "machines").mkdir()
    base = {
        "name": "base",
        "target": {"path": "target"},
        "drafter": {"path": "drafter"},
        "serving": {"slots": 2, "max_queue": 3},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    over = tmp_path / "machines" / "small.yaml"
    over.write_text("extends: ../base.yaml\nname: small\nserving: {slots: 1}\n")
    config = load_config(over)
    assert (config.name, config.serving.slots, config.serving.max_queue) == ("small", 1, 3)
    assert config.target.path == tmp_path / "target"
    whole = tmp_path / "machines" / "whole.yaml"
    whole.write_text(config_text(over))
    assert load_config(whole) == config
    assert config_text(tmp_path / "base.yaml") == (tmp_path / "base.yaml").read_text()


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("extends: other.yaml\n", r"base\.yaml extends another config itself"),
        ("name: base\n", r"base\.yaml has 2 mistakes|base\.yaml:1: field 'target' is missing"),
        (None, r"cannot read the config .*base\.yaml"),
    ],
)
def test_a_base_is_a_whole_config(tmp_path: Path, base: str | None, problem: str) -> None:
    if base is not None:
        (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "over.yaml").write_text("extends: base.yaml\nname: over\n")
    with pytest.raises(ConfigError, match=problem):
        load_config(tmp_path / "over.yaml")


def test_what_is_extended_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text("extends: [a]\nname: over\n")
    with pytest.raises(ConfigError, match=r"extends is \['a'\], and no path of a config"):
        load_config(tmp_path / "over.yaml")
