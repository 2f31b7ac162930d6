"""How one request draws its tokens."""

import json as jsons
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from dflash_trt.decoding import Grammar
from dflash_trt.decoding import SamplingParams as OurParams


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """One constraint of a text. Pydantic models as `json` are left out."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        guides = sum(bool(getattr(self, each.name)) for each in fields(self))
        if guides > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {guides}.")

    def _ours(self, backend: str) -> Grammar | None:
        """Return the constraint for our engines, or raise what the backend's factory raises.

        As tensorrt_llm/_torch/pyexecutor/grammar_matcher.py@0fccc5b: the grammar is Lark for
        llguidance and EBNF for xgrammar, which alone has structural tags.
        """
        if self.structural_tag is not None and backend != "xgrammar":
            raise ValueError("Unsupported guide type: GuideType.STRUCTURAL_TAG.")
        if self.structural_tag is not None or (self.grammar is not None and backend == "xgrammar"):
            raise NotImplementedError("the stand-in has no xgrammar")
        if self.json_object:
            return Grammar("json_schema", '{"type": "object"}')
        if self.json is not None:
            text = self.json if isinstance(self.json, str) else jsons.dumps(self.json)
            return Grammar("json_schema", text)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return None if self.grammar is None else Grammar("lark", self.grammar)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The parameters that dflash-trt sets. Upstream has more, which are refused here."""

    max_tokens: int = 32
    end_id: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    return_perf_metrics: bool = False

    def __post_init__(self) -> None:
        hints = get_type_hints(SamplingParams)
        for each in fields(self):
            _check_type(each.name, getattr(self, each.name), hints[each.name])
        if self.guided_decoding is not None:
            self.guided_decoding._validate()
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")

    @property
    def _greedy(self) -> bool:
        nothing = self.temperature is None and self.top_p is None and self.top_k is None
        return nothing or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0

    def _ours(self) -> OurParams:
        """The same for our engines."""
        greedy = 0.0 if self._greedy else None
        return OurParams(
            temperature=greedy if greedy is not None else self.temperature or 1.0,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed or 0,
        )

    def _refused_with_a_drafter(self, enable_penalty: bool) -> str | None:
        """Return what the one-model speculative sampler says to a request that it cannot run."""
        changed = self.repetition_penalty not in (None, 1.0)
        if (changed or self.presence_penalty or self.frequency_penalty) and not enable_penalty:
            return "penalties require 'enable_penalty: true' in the speculative decoding config"
        return None


def _check_type(name: str, value: Any, hint: Any) -> None:
    if hint is Any:
        return
    for kind in get_args(hint) or (hint,):
        plain = getattr(kind, "__origin__", kind)  # list of list[int]
        if plain is float and type(value) in (int, float):
            return
        if type(value) is plain:
            inner = get_args(kind)
            if all(type(each) is inner[0] for each in (value if inner else ())):
                return
    raise TypeError(f"SamplingParams.{name} is {value!r}, not {hint}")
