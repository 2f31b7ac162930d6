"""Ways to decode: plain, with an EAGLE-3-like chain of draft tokens, and with DFlash."""

from dataclasses import dataclass, replace
from statistics import mean
from typing import Literal

from dflash_trt.roofline.passes import BF16, Runtime, Step, forward, head
from dflash_trt.roofline.published import acceptance as published_acceptance
from dflash_trt.roofline.shape import Shape, eagle_shape

EAGLE_CHAIN = 3  # draft tokens of an EAGLE-3 chain, TensorRT-LLM's usual max_draft_len
# gpt-oss-120b with three draft tokens: TensorRT-LLM's reference for its own accuracy test
EAGLE_ACCEPTANCE = 2.8943
CHANCE = 0.8  # of a draft to be accepted, where nothing is published for a drafter


@dataclass(frozen=True)
class Method:
    """How to draft.

    acceptance: tokens that a round commits with `draft_tokens` drafts, the target's own included.
    block: tokens that a DFlash drafter fills, however few of them are verified.
    """

    name: Literal["plain", "EAGLE-3", "DFlash"]
    draft_tokens: int = 0
    acceptance: float = 1.0
    drafter: Shape | None = None
    block: int = 0

    def shortened(self, draft_tokens: int) -> "Method":
        """The same with fewer drafts. Each draft is taken to be accepted as often as the others."""
        if draft_tokens == self.draft_tokens:
            return self
        chance = accepted(self.acceptance, self.draft_tokens)
        tau = sum(chance**i for i in range(draft_tokens + 1))
        return replace(self, draft_tokens=draft_tokens, acceptance=tau)


PLAIN = Method("plain")


def eagle(target: Shape, acceptance: float, draft_tokens: int = EAGLE_CHAIN) -> Method:
    return Method("EAGLE-3", draft_tokens, acceptance, eagle_shape(target))


def dflash(drafter: Shape, acceptance: float, draft_tokens: int) -> Method:
    return Method("DFlash", draft_tokens, acceptance, drafter, draft_tokens + 1)


def accepted(acceptance: float, draft_tokens: int) -> float:
    """How often a draft is accepted whose predecessors were: sum of p^i, i = 0 .. n, is tau."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**i for i in range(draft_tokens + 1)) < acceptance:
            low = middle
        else:
            high = middle
    return high


def expected(drafter: str, draft_tokens: int) -> tuple[float, str]:
    """The tokens of a round with so many drafts, and where that is from; drafter: its Hub id."""
    chance, source = CHANCE, f"taken: {CHANCE:.0%} of drafts accepted"
    if (table := published_acceptance(drafter)) is not None:
        # of each draft: fewer may be asked for than were measured
        chance = accepted(mean(table.tau.values()), table.draft_tokens)
        source = f"published ({table.source}), mean of {len(table.tau)} tasks"
    return sum(chance**i for i in range(draft_tokens + 1)), source


def round_time(target: Shape, method: Method, runtime: Runtime, rows: int, context: float) -> Step:
    """Seconds of a round of `rows` sequences of one instance, `context` tokens long each."""
    tokens = method.draft_tokens + 1
    step = forward(target, runtime, rows, tokens, context, runtime.kv_bytes)
    step += head(target, runtime, rows, tokens)
    if method.drafter is None or not method.draft_tokens:
        return step
    step += Step(host=runtime.constants.host[runtime.software])
    if method.name == "DFlash":  # a pass over the whole block, and the target's head
        step += forward(method.drafter, runtime, rows, method.block, context, BF16)
        return step + head(target, runtime, rows, method.block - 1)
    each = forward(method.drafter, runtime, rows, 1, context, BF16)
    return step + method.draft_tokens * (each + head(method.drafter, runtime, rows, 1))


def tokens_per_second(
    target: Shape, method: Method, runtime: Runtime, rows: int, context: float
) -> float:
    """Of one sequence."""
    return method.acceptance / round_time(target, method, runtime, rows, context).seconds
