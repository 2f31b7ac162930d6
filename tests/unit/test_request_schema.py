"""The one schema of a request: whoever has its fields elsewhere has the same."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.builder.repository import read_config
from dflash_trt.decoding import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.request_schema import (
    ChatTemplate,
    GenerateRequest,
    WithTensorRTLLM,
    check_names,
    encode,
    fields_with_tensorrt_llm,
    from_tensors,
    tensors,
)
from dflash_trt.serving.http.fields import UNSUPPORTED, ChatFields, TextFields
from dflash_trt.serving.model.requests import SAMPLING

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import public_tensors

OTHERWISE = {"stop_words": "stop", "exclude_input_in_output": "echo", "include_drafting": None}
PROMPT = {"text_input", "input_ids", "messages", "stream"}
VALUES: dict[str, Any] = {
    "max_tokens": 5,
    "temperature": 0.5,
    "seed": 2**63 - 1,
    "stop_words": ["é", "b"],
    "stop_token_ids": [1, 2],
    "logit_bias": {"5": -1.5},
    "messages": [{"role": "user", "content": "é"}],
    "tool_choice": "required",
    "chat_template_kwargs": {"a": [1]},
    "drafting": False,
    "cache_salt": "a",
}


def test_each_field_says_what_tensorrt_llm_does_with_it() -> None:
    """None is dropped silently: `llm.py` reads those of sampling that are named here."""
    assert fields_with_tensorrt_llm(*WithTensorRTLLM) == [*GenerateRequest.model_fields]
    read_here = {*fields_with_tensorrt_llm(WithTensorRTLLM.HERE)}
    parameters = {field.name for field in dataclasses.fields(SamplingParams)}
    assert read_here & parameters == {"temperature", "include_drafting"}


def array(name: str, value: Any) -> np.ndarray:
    datatype, shape, content = encode(name, value)
    if datatype == "BYTES":
        texts, at = [], 0
        for _ in range(*shape):
            size = int.from_bytes(content[at : at + 4], "little")
            texts.append(content[at + 4 : at + 4 + size])
            at += 4 + size
        return np.array(texts, object)
    dtypes = {"BOOL": bool, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
    return np.frombuffer(content, dtypes[datatype]).reshape(shape)


def test_the_config_files_have_its_tensors() -> None:
    """Run scripts/public_tensors.py when they do not."""
    for file, text in public_tensors.configs().items():
        assert file.read_text(encoding="utf-8") == text


def test_what_is_written_into_tensors_is_read_from_them() -> None:
    request = from_tensors({name: array(name, value) for name, value in VALUES.items()})
    assert {name: getattr(request, name) for name in VALUES} == VALUES
    assert request.model_fields_set == VALUES.keys()
    named = {"type": "function", "function": {"name": "f"}}
    assert from_tensors({"tool_choice": array("tool_choice", named)}).tool_choice == named
    shapes = {name for name, tensor in tensors().items() if tensor.is_list}
    assert shapes == {"input_ids", "stop_token_ids", "bad_words", "guided_choice", "stop_words"}
    assert {tensors()[name].datatype for name in ("seed", "n", "top_p", "stream", "tools")} == {
        *("UINT64", "INT32", "FP32", "BOOL", "BYTES")
    }


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", np.array([-1.0]), "temperature is -1.0 and must be greater"),
        ("temperature", np.array([np.nan]), "temperature is nan and must be a finite number"),
        ("n", np.array([65]), "n is 65 and must be less than or equal to 64"),
        ("n", np.array([1, 2]), "n has 2 elements. Send one."),
        ("seed", np.array([2**63], np.uint64), "seed is 9223372036854775808 and must be less than"),
        ("stop_words", np.array([b"a"] * 65, object), "stop_words must have at most 64 items"),
        ("stop_words", np.array([b"\xff"], object), "stop_words is not UTF-8"),
        ("stop_words", np.array([b"w" * 257], object), r"stop_words\[0\] must have at most 256"),
        ("stop_token_ids", np.array([1] * 65), "stop_token_ids must have at most 64 items"),
        ("guided_choice", np.array([b"a" * 2**15], object), "guided_choice must have at most"),
        ("logit_bias", np.array([b'{"5": 101}'], object), "logit_bias.5 is 101 and must be less"),
        ("logit_bias", np.array([b"{"], object), "logit_bias is not JSON"),
        ("messages", np.array([b"{}"], object), "messages must be a valid list"),
        ("messages", np.array([b"[" * 100_000], object), "messages is not JSON"),
        ("messages", np.array([b"[1]"], object), r"messages\[0\] is 1 and must be"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: np.ndarray, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        from_tensors({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", np.inf), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1),
     ("min_p", 2.0), ("repetition_penalty", 0.0), ("presence_penalty", np.nan), ("min_tokens", -1),
     ("logprobs", 21), ("logprobs", -1), ("n", 0)],
)  # fmt: skip
def test_a_number_out_of_its_range_is_named(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value} and must be"):
        from_tensors({name: np.array([value])})


def test_the_text_is_the_first_output() -> None:
    """Clients of Triton's `infer` that name no output read the first."""
    for file in public_tensors.configs():
        assert read_config(file).output[0].name == "text_output"


def test_parameters_that_ask_for_nothing() -> None:
    """Triton makes parameters of fields of tensorrtllm_backend's `generate`."""
    check_names({"pad_id": 2, "end_id": 50256, "beam_width": 1, "return_log_probs": False})
    for name, value in {"beam_width": 2, "return_log_probs": True, "max_token": 5}.items():
        with pytest.raises(RequestError, match=name):
            check_names({name: value})


def test_empty_words_ask_for_nothing() -> None:
    """Clients of tensorrtllm_backend send all of a model's tensors, documents too."""
    words = np.array([b"", b"a"], object)
    asked = from_tensors({"stop_words": words, "bad_words": words[:1]})
    assert (asked.stop_words, asked.bad_words) == (["a"], [])
    for name in ("tools", "tool_choice", "response_format", "logit_bias", "messages"):
        assert from_tensors({name: words[:1]}) == from_tensors({})


def test_defaults_are_those_of_sampling_params() -> None:
    neutral = dataclasses.asdict(SamplingParams())
    assert {"temperature", "top_k", "logprobs"} <= {*SAMPLING}
    for name in SAMPLING:
        default = GenerateRequest.model_fields[name].default
        assert default == (None if name == "seed" else neutral[name])


def test_every_option_is_known_to_the_openai_api() -> None:
    text, chat = TextFields.model_fields, ChatFields.model_fields
    for name in GenerateRequest.model_fields.keys() - PROMPT:
        here = OTHERWISE.get(name, name)
        assert here is None or here in chat, name
        assert here is None or here in text or name in ChatTemplate.model_fields, name
    assert not UNSUPPORTED["both"].keys() & (text.keys() | chat.keys())
