"""What a client sends and what it gets back, free of Triton's types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.decoding.sampling import Sampling
from dflash_trt.decoding.sequence import Request
from dflash_trt.errors import RequestError
from dflash_trt.serving.settings import Settings

MAX_TOKENS = 128  # when the client does not say and the prompt leaves room


@dataclass(frozen=True)
class Part:
    """One response: the new text and tokens, and the totals so far. Fields are the tensor names."""

    text_output: str
    token_ids: list[int]
    finish_reason: str  # "" until the last part
    prompt_tokens: int
    completion_tokens: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_length: float


def parse_request(
    inputs: Mapping[str, np.ndarray[Any, Any]], tokenizer: Tokenizer, settings: Settings
) -> tuple[Request, bool]:
    """A request and whether it wants a stream, from the input tensors; raises `RequestError`."""

    def value(name: str, default: Any) -> Any:
        return inputs[name].item() if name in inputs else default

    try:
        text: str = value("text_input", b"").decode()
    except UnicodeDecodeError as error:
        raise RequestError("text_input is not UTF-8", "Encode the prompt as UTF-8") from error
    prompt: list[int] = tokenizer.encode(text).ids if text else []
    if not prompt:
        raise RequestError("text_input is empty", "Send a prompt of at least one token")
    room = settings.max_seq_len - len(prompt)
    max_tokens = value("max_tokens", max(1, min(MAX_TOKENS, room)))
    temperature, top_k, top_p = value("temperature", 0.0), value("top_k", 0), value("top_p", 1.0)
    seed = value("seed", 0)
    _require(max_tokens >= 1, "max_tokens", max_tokens, "at least 1")
    _require(0 <= temperature < np.inf, "temperature", temperature, "0 (greedy) or more")
    _require(top_k >= 0, "top_k", top_k, "0 (all tokens) or more")
    _require(0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1")
    _require(seed < 2**63, "seed", seed, "less than 2**63")
    stop_ids = frozenset[int]() if value("ignore_eos", False) else settings.eos_token_ids
    request = Request(prompt, max_tokens, Sampling(temperature, top_k, top_p, seed), stop_ids)
    return request, bool(value("stream", False))


def _require(holds: bool, name: str, value: Any, range_: str) -> None:
    if not holds:  # a NaN fails every comparison and ends here too
        raise RequestError(f"{name} is {value}", f"It must be {range_}")
