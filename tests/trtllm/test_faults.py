"""Known faults: each touches what it says, and not its neighbor."""

import re
from typing import Any

import pytest

from dflash_trt.tensorrt_llm import LlmArgs, argument_checks
from dflash_trt.tensorrt_llm.argument_checks import look_up

PAGED = {"speculative_config": {"decoding_type": "DFlash", "attention_backend": "TRTLLM"}}
EVICTS = {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}
EAGLE3 = {"speculative_config": {"decoding_type": "Eagle3"}}
# arguments, compute capability and target that the fault touches, and a neighbor that it does not
TOUCHED: dict[str, tuple[tuple[dict[str, Any], int, str], tuple[dict[str, Any], int, str]]] = {
    "16827": ((EVICTS, 100, "GptOss"), ({}, 100, "GptOss")),
    "18891": (
        ({**EVICTS, "guided_decoding_backend": "xgrammar"}, 100, "GptOss"),
        ({"guided_decoding_backend": "xgrammar"}, 100, "GptOss"),
    ),
    "17371": (
        ({**PAGED, "cache_transceiver_config": {"backend": "NIXL"}}, 100, "GptOss"),
        ({"cache_transceiver_config": {"backend": "NIXL"}}, 100, "GptOss"),
    ),
    "16448": (({"kv_connector_config": {"connector": "kvbm"}}, 90, "Llama"), ({}, 90, "Llama")),
    "v1.4.0rc1": (
        ({"guided_decoding_backend": "xgrammar"}, 100, "Qwen3MoeForCausalLM"),
        ({"guided_decoding_backend": "xgrammar"}, 100, "LlamaForCausalLM"),
    ),
    "v1.3.0rc24": (
        ({"tensor_parallel_size": 8}, 103, "GptOssForCausalLM"),
        ({"tensor_parallel_size": 8}, 103, "Qwen3MoeForCausalLM"),
    ),
    "v1.3.0rc26": (
        (EAGLE3, 103, "GptOssForCausalLM"),
        ({**EAGLE3, "kv_cache_config": {"use_kv_cache_manager_v2": False}}, 103, "GptOss"),
    ),
    "2939": ((PAGED, 103, "GptOss"), (PAGED, 100, "GptOss")),
}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_checks, "_installed_version", {"flashinfer-python": "0.6.7"}.get)


@pytest.mark.parametrize("link", TOUCHED)
def test_a_fault_touches_what_it_says(link: str) -> None:
    touched, beside = TOUCHED[link]
    args, sm, target = touched
    found = look_up(LlmArgs(args), [sm], target)
    assert not found.ok
    assert re.search(rf"\(https://github\.com/\S+/{re.escape(link)}, .*2026", found.what)
    assert found.fix
    args, sm, target = beside
    assert look_up(LlmArgs(args), [sm], target).ok


def test_another_package_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_checks, "_installed_version", lambda name: "0.6.8")
    assert look_up(LlmArgs(PAGED), [103], "GptOss").ok
