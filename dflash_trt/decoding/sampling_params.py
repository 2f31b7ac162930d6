"""How one request samples its tokens."""

import math
from dataclasses import dataclass

from dflash_trt.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples tokens; the defaults are greedy decoding with nothing else asked for.

    As vLLM and Triton's TensorRT-LLM clients mean them: penalties change the logits first
    (repetition looks at prompt and output, the other two at the output), then temperature,
    top_k, top_p and min_p cut the distribution, in this order.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None  # alternatives to report for each token; None: no logprobs
    seed: int = 0
    prompt_logprobs: bool = False  # with `logprobs`: of the prompt's tokens too
    logit_bias: tuple[tuple[int, float], ...] = ()  # what is added to a token's logit, first of all

    def __post_init__(self) -> None:
        """RequestError for a value that no distribution can be made from."""
        inf = math.inf
        for name, holds, fix in (
            ("temperature", 0 <= self.temperature < inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "above 0"),
            ("presence_penalty", abs(self.presence_penalty) < inf, "a number"),
            ("frequency_penalty", abs(self.frequency_penalty) < inf, "a number"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, "0 to 20"),
            ("seed", 0 <= self.seed < 2**63, "an integer from 0 to 2^63 - 1"),
        ):
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)}", f"Give {fix}.")
