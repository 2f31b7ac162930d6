"""The table of known faults: each row touches something that can be built, not its neighbour."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlparse

import pytest

from dflash_trt.tensorrt_llm import faults as module
from dflash_trt.tensorrt_llm.arguments import VERSIONS, LlmArgs, find, nest, typed_args
from dflash_trt.tensorrt_llm.faults import Fault, faults, look_up

NOT_NULL: dict[str, Any] = {
    "torch_compile_config": {},
    "kv_connector_config": {"connector": "kvbm"},
    "guided_decoding_backend": "xgrammar",
}
TARGETS = ("GptOssForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "LlamaForCausalLM")


def deployed(fault: Fault) -> tuple[LlmArgs, list[int], str]:
    """What the fault touches."""
    given = {name: NOT_NULL[name] if of == "not_null" else of[0] for name, of in fault.args.items()}
    if any(name.startswith("speculative_config.") for name in given):
        given = {"speculative_config.decoding_type": "DFlash"} | given
    args = {"model": "target", "tensor_parallel_size": fault.ranks}
    version = next(
        v for v in VERSIONS[::-1]
        if (not fault.versions or v in fault.versions)
        and (fault.before is None or VERSIONS.index(v) < VERSIONS.index(fault.before))
    )  # fmt: skip
    target = next(t for t in TARGETS if fault.target.removeprefix("^").split("|")[0] in t)
    return typed_args(version, nest(given) | args), [*fault.sm, 90][:1], target


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_installed", {"flashinfer-python": "0.6.7"}.get)


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.link.rpartition("/")[2])
def test_a_row_touches_what_it_says(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    args, sm, target = deployed(fault)
    assert fault.touches(args, sm, target)
    found = look_up(args, sm, target)
    assert not found.ok
    assert fault.link in found.what
    assert fault.fix in found.fix
    if fault.versions or fault.before:
        other = {*VERSIONS} - {*fault.versions} if fault.versions else {fault.before}
        assert not fault.touches(replace(args, version=min(other)), sm, target)
    if fault.sm:
        assert not fault.touches(args, [89], target)
    if fault.target:
        assert not fault.touches(args, sm, "LlamaForCausalLM")
    if fault.ranks > 1:
        alone = typed_args(args.version, args.to_dict() | {"tensor_parallel_size": 1})
        assert not fault.touches(alone, sm, target)
    for name in fault.args:
        without = typed_args(args.version, {"model": "target", "tensor_parallel_size": fault.ranks})
        assert find(name).default == without.value(name) or without.value(name) is None
        assert not fault.touches(without, sm, target)
    if fault.packages:
        monkeypatch.setattr(module, "_installed", lambda name: "0.6.8")
        assert not fault.touches(args, sm, target)


def test_rows_say_where_they_are_from() -> None:
    for fault in faults():
        link = urlparse(fault.link)
        assert (link.scheme, link.netloc) == ("https", "github.com")
        assert "202" in fault.seen
        assert not fault.fault.endswith(".")
        assert not fault.fix.endswith(".")


def test_a_plain_deployment_is_touched_by_none() -> None:
    assert look_up(typed_args("1.4.0rc1", {"model": "target"}), [103], "GptOssForCausalLM").ok
