"""The one table of request fields: whoever has them elsewhere has the same."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from dflash_trt.request_fields import FIELDS, Field, Options, Prompt, _table
from dflash_trt.serving.openai.fields import UNSUPPORTED, ChatFields, TextFields

from dflash_trt.decoding import SamplingParams
from dflash_trt.serving.front.requests import SAMPLING

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import public_tensors

OTHERWISE = {"stop_words": "stop", "exclude_input_in_output": "echo", "include_drafting": None}


def test_the_config_files_have_its_tensors() -> None:
    """Run scripts/public_tensors.py when they do not."""
    for file, text in public_tensors.configs().items():
        assert file.read_text(encoding="utf-8") == text


def test_a_type_says_datatype_and_shape() -> None:
    class Some(TypedDict, total=False):
        text: Annotated[str | None, Field("")]
        texts: Annotated[Sequence[str] | None, Field("")]
        number: Annotated[float | None, Field("")]
        document: Annotated[Mapping[str, Any] | None, Field("")]
        documents: Annotated[Sequence[Mapping[str, Any]] | None, Field("")]
        either: Annotated[str | Mapping[str, Any] | None, Field("")]
        long: Annotated[int | None, Field("", datatype="UINT64")]
        beside: int

    found = {
        name: (field.datatype, field.is_list, field.json_type)
        for name, field in _table(Some).items()
    }
    assert found == {
        "text": ("BYTES", False, None),
        "texts": ("BYTES", True, None),
        "number": ("FP32", False, None),
        "document": ("BYTES", False, dict),
        "documents": ("BYTES", False, list),
        "either": ("BYTES", False, object),
        "long": ("UINT64", False, None),
    }


def test_defaults_are_those_of_sampling_params() -> None:
    neutral = dataclasses.asdict(SamplingParams())
    assert {"temperature", "top_k", "logprobs"} <= {*SAMPLING}
    for name in SAMPLING:
        assert FIELDS[name].default == (None if name == "seed" else neutral[name])


def test_a_default_is_a_value_that_is_allowed() -> None:
    for field in FIELDS.values():
        assert field.default is None or field.accepts(field.default), field.name


def test_every_option_is_known_to_the_openai_front() -> None:
    text, chat = TextFields.model_fields, ChatFields.model_fields
    for name in FIELDS.keys() - Prompt.__annotations__.keys():
        here = OTHERWISE.get(name, name)
        assert here is None or here in chat, name
        assert here is None or here in text or FIELDS[name].openai == "chat", name
    assert Options.__annotations__.keys() - FIELDS.keys() == {"timeout", "parameters"}


def test_no_field_is_refused_that_would_be_served() -> None:
    for kind, fields in (("chat", ChatFields), ("text", TextFields)):
        refused = UNSUPPORTED["both"].keys() | UNSUPPORTED[kind].keys() | {*UNSUPPORTED["ignored"]}
        served = {name for name, each in FIELDS.items() if each.openai in ("both", kind)}
        assert served <= fields.model_fields.keys()
        assert not served & refused
