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
    round_tokens: list[int]  # tokens that each round committed
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
    sampling = Sampling(
        temperature=value("temperature", 0.0),
        top_k=value("top_k", 0),
        top_p=value("top_p", 1.0),
        seed=value("seed", 0),
    )
    stop_ids = frozenset[int]() if value("ignore_eos", False) else settings.eos_token_ids
    return Request(prompt, max_tokens, sampling, stop_ids), bool(value("stream", False))
