"""How one request samples its tokens."""

from dataclasses import dataclass


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
    include_drafting: bool = False  # report how likely drafts were
