"""The report of a pair, and each named check on a pair made wrong in exactly its way."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssConfig

from dflash_trt.builder.pipeline import build
from dflash_trt.checkpoints import Pair, load_target, open_drafter, open_target
from dflash_trt.checks import inspect, pair_findings
from dflash_trt.checks.pair import PAIR_CHECKS
from dflash_trt.checks.target import TARGET_CHECKS
from dflash_trt.errors import CheckpointError, PairError
from tests.support.builds import config_of, edit, edit_weights
from tests.support.commands import run
from tests.support.families import to_speculators
from tests.support.pairs import Pair as Directories
from tests.support.pairs import make_pair

DEMO = Path(__file__).parents[2] / "examples" / "pycode"
Spoil = Callable[[Path, Path], object]  # of the target's and the drafter's directory


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    make_pair(directory, layers=9, taps=(1, 4, 6), tied=False, rope_theta=10000.0)
    return directory


def results(pair: Path, **config: int) -> dict[str, str]:
    models = open_target(pair / "target"), open_drafter(pair / "drafter")
    return {finding.name: finding.result for finding in pair_findings(Pair(*models, **config))}


def bad(pair: Path, **config: int) -> dict[str, str]:
    return {n: r for n, r in results(pair, **config).items() if r in ("error", "warning")}


def dflash(drafter: Path, **changes: object) -> None:
    """Set fields of dflash_config; None removes one."""
    config = json.loads((drafter / "config.json").read_text())["dflash_config"] | changes
    edit(drafter, dflash_config={k: v for k, v in config.items() if v is not None})


def swap_two_tokens(target: Path, drafter: Path) -> None:
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (drafter / "tokenizer.json").write_text(json.dumps(tokenizer))


YARN: dict[str, object] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
YARN |= {"original_max_position_embeddings": 256}
# the check, how a sound pair is spoiled, and which checks see the same fault too
CASES: dict[str, tuple[Spoil, set[str]]] = {
    "hidden-size": (lambda t, d: edit(d, hidden_size=32), {"drafter-tensors"}),
    "vocabulary": (lambda t, d: edit(d, vocab_size=384), set()),
    "target-layers": (lambda t, d: edit(d, num_target_layers=10), set()),
    "taps-in-range": (lambda t, d: dflash(d, target_layer_ids=[1, 4, 8]), set()),
    "taps-off-by-one": (lambda t, d: dflash(d, target_layer_ids=[2, 5, 7]), set()),
    "mask-in-vocabulary": (lambda t, d: dflash(d, mask_token_id=320), set()),
    "mask-is-reserved": (lambda t, d: dflash(d, mask_token_id=65), set()),
    "tokenizer-fits": (lambda t, d: (edit(t, vocab_size=319, eos_token_id=None),
                                     edit(d, vocab_size=319), dflash(d, mask_token_id=318)),
                       {"target-tensors", "mask-is-reserved"}),
    "sampling-recommended": (
        lambda t, d: (t / "generation_config.json").write_text('{"temperature": "hot"}'), set()),
    "tokenizer": (lambda t, d: (t / "tokenizer.json").unlink(), set()),
    "same-tokenizer": (swap_two_tokens, set()),
    "context-length": (lambda t, d: edit(t, max_position_embeddings=1024), set()),
    "no-own-vocabulary": (
        lambda t, d: edit_weights(d, lambda w: w.update({"lm_head.weight": torch.ones(320, 64)})),
        {"drafter-tensors"}),
    "target-tensors": (lambda t, d: edit_weights(t, lambda w: w.update(x=torch.ones(1))), set()),
    "drafter-tensors": (lambda t, d: edit_weights(d, lambda w: w.pop("norm.weight")), set()),
    "rope": (lambda t, d: edit(d, rope_parameters={"rope_theta": 1e6}), set()),
    "embedding-scale": (lambda t, d: edit(d, input_embedding_scale=8.0), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_check_fires_on_its_fault(pair: Path, name: str) -> None:
    assert bad(pair) == {}
    spoil, others = CASES[name]
    spoil(pair / "target", pair / "drafter")
    assert bad(pair).keys() == {name, *others}


@pytest.mark.parametrize(
    ("mask", "says"), [(318, "the target's eos_token_id"), (400, "no token; the first free id is")]
)
def test_a_mask_is_no_end_and_nothing_between(pair: Path, mask: int, says: str) -> None:
    edit(pair / "target", vocab_size=512)
    edit(pair / "drafter", vocab_size=512)
    dflash(pair / "drafter", mask_token_id=mask)
    models = open_target(pair / "target"), open_drafter(pair / "drafter")
    found = {each.name: each for each in pair_findings(Pair(*models))}["mask-is-reserved"]
    assert (found.result, says in found.found) == ("warning", True)


def test_a_head_that_is_stored_counts(pair: Path) -> None:
    """transformers uses it whatever tie_word_embeddings says."""
    edit(pair / "target", tie_word_embeddings=True)
    assert bad(pair) == {}
    assert not load_target(pair / "target").spec.tie_word_embeddings


def test_faults_that_need_more_than_one_pair(pair: Path) -> None:
    assert bad(pair, draft_tokens=8) == {"draft-tokens": "error"}
    assert bad(pair, draft_tokens=7, max_seq_len=512) == {}
    assert bad(pair, max_seq_len=513) == {"context-length": "warning"}


def test_refused_models_are_checked_as_far_as_they_can_be_read(pair: Path) -> None:
    edit(pair / "target", architectures=["Qwen3NextForCausalLM"], rope_parameters=YARN)
    found = results(pair)
    assert found["rope"] == "warning"
    assert found["hidden-size"] == found["mask-in-vocabulary"] == "passed"
    assert found["target-tensors"] == "not checked"


def test_every_check_has_a_case() -> None:
    assert sorted(check.name for check in (*TARGET_CHECKS, *PAIR_CHECKS)) == sorted(
        CASES.keys() | {"draft-tokens"}
    )


def test_a_scaled_rope_ends_where_its_scaling_does(pair: Path) -> None:
    edit(pair / "target", rope_parameters=YARN)
    edit(pair / "drafter", rope_parameters=YARN | {"factor": 1.5})
    assert bad(pair)["context-length"] == "warning"


def test_the_demo_pair_passes() -> None:
    code, out, err = run("inspect", DEMO / "target", DEMO / "drafter", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert {check["result"] for check in report["checks"]} == {"passed", "not checked"}
    target, drafter = report["target"], report["drafter"]
    tensors = load_file(DEMO / "target" / "model.safetensors")
    assert target["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert target["memory_bytes"]["bfloat16"] == 2 * target["parameters"]
    assert target["weights"]["tensors"] == {"BF16": len(tensors)}
    # 8 layers, keys and values of 2 heads of 64
    assert target["kv_bytes_per_token"]["float32"] == 8 * 2 * 2 * 64 * 4
    assert (drafter["format"], drafter["block_size"], drafter["mask_token_id"]) == ("z-lab", 8, 1)
    assert drafter["taps"] == [1, 3, 5, 6]
    kinds = {kind["kind"]: kind for kind in report["engine_kinds"]}
    assert kinds["onnxruntime"]["fits"]
    assert [*kinds] == ["onnxruntime", "pytorch", "tensorrt", "tensorrt_llm"]


def test_the_text_names_every_check_and_kind() -> None:
    code, out, _ = run("inspect", DEMO / "target", DEMO / "drafter")
    assert code == 0
    for check in (*TARGET_CHECKS, *PAIR_CHECKS):
        assert check.name in out
    assert "\x1b" not in out  # plain, off a terminal
    assert "float32 14,566,144" in out
    code, out, _ = run("inspect", DEMO / "target")
    assert code == 0
    assert "target-tensors" in out
    assert "hidden-size" not in out


def test_a_refused_model_is_described_with_the_reason(pair: Path) -> None:
    directory = pair / "target"
    config = GptOssConfig(num_hidden_layers=4, hidden_size=64).to_dict()
    config |= {"architectures": ["Unknown\x1b[2J\ud800"], "layer_types": ["linear_attention"] * 4}
    (directory / "config.json").write_text(json.dumps(config))
    code, out, _ = run("inspect", directory, pair / "drafter", "--json")
    report = json.loads(out)
    assert code == 1
    assert "Unknown" in report["target"]["refused"]["problem"]
    assert report["target"]["num_hidden_layers"] == 4
    assert report["target"]["parameters"] > 0  # from the headers
    assert not any(kind["fits"] for kind in report["engine_kinds"])
    code, out, _ = run("inspect", directory)
    assert code == 1
    assert "refused" in out
    assert "\x1b" not in out


def test_the_kinds_say_why_not(pair: Path) -> None:
    target, drafter = pair / "target", pair / "drafter"

    def reasons(kind: str) -> str:
        kinds = {found["kind"]: found for found in inspect(target, drafter)["engine_kinds"]}
        return " ".join(kinds[kind]["reasons"])

    assert reasons("onnxruntime") == reasons("tensorrt") == reasons("tensorrt_llm") == ""
    edit(drafter, speculators_model_type="dflash")
    assert "speculators format" in reasons("tensorrt_llm")
    edit(drafter, speculators_model_type=None)
    edit(target, architectures=["Gemma3ForCausalLM"])
    assert "no hidden states of Gemma3ForCausalLM" in reasons("tensorrt_llm")
    edit(target, architectures=["KimiK25ForConditionalGeneration"])
    assert "KimiK25" in reasons("onnxruntime")
    assert reasons("tensorrt_llm") == ""
    edit(target, architectures=["LlamaForCausalLM"])
    dflash(drafter, mask_token_id=320)
    for kind in ("onnxruntime", "tensorrt", "tensorrt_llm"):
        assert "mask-in-vocabulary" in reasons(kind)


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ 9 ** (9 ** 9) }}"])
def test_what_build_refuses_of_a_chat_template_fits_no_kind(pair: Path, template: str) -> None:
    (pair / "target" / "chat_template.jinja").write_text(template)
    code, out, _ = run("inspect", pair / "target", pair / "drafter", "--json")
    assert (code, [kind["fits"] for kind in json.loads(out)["engine_kinds"]]) == (1, [False] * 4)
    with pytest.raises(CheckpointError, match="chat template"):
        build(config_of(pair), pair / "built", lambda *_: None)


def test_inspect_prints_what_the_template_shows(pair: Path) -> None:
    source = "{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}"
    (pair / "target" / "chat_template.jinja").write_text(source)
    _, out, _ = run("inspect", pair / "target", pair / "drafter")
    assert re.search(r"developer +developer_as_system\n", out)
    assert re.search(r"end-of-turn +the chat template writes no token", out)


def test_taps_of_speculators_count_from_1(pair: Path) -> None:
    drafter, own = pair / "drafter", pair / "zlab"
    drafter.rename(own)
    to_speculators(Directories(pair / "target", own), drafter, from_anchor=False, ids=range(320))
    assert bad(pair) == {}
    # ids that count from 0, as in the other format
    edit(drafter, aux_hidden_state_layer_ids=[1, 4, 6])
    assert bad(pair) == {"taps-off-by-one": "warning"}


def test_what_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    for argument in (tmp_path, tmp_path / "none", "org/name"):
        code, out, err = run("inspect", argument)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_a_config_in_a_models_place_is_told() -> None:
    code, out, err = run("inspect", DEMO.parents[1] / "build_configs" / "pycode.yaml")
    assert (code, out) == (1, "")
    assert "is a config, which names a target and a drafter" in err


def test_build_stops_at_errors_and_hands_on_warnings(pair: Path) -> None:
    config = config_of(pair)
    dflash(pair / "drafter", mask_token_id=65)
    result = build(config, pair / "built", lambda *_: None)
    assert [warning.name for warning in result.warnings] == ["mask-is-reserved"]
    dflash(pair / "drafter", mask_token_id=320)
    with pytest.raises(PairError, match="mask_token_id 320 is outside"):
        build(config, pair / "other", lambda *_: None)
