"""The metrics of a server: names, labels, buckets. docs/metrics.md has the same table."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.decoding.speculation import VERIFIED

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
TALLY = "histogram as counters"  # for values by the thousand a second: see docs/metrics.md

PHASES = ("verify", "draft", "hop", "scheduler")
REASONS = ("stop", "length", "cancelled", "error", "refused")

DRAFT_TOKENS = "trtllm_spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "trtllm_spec_decode_num_accepted_tokens_total"
DRAFTED_AT = "trtllm_spec_decode_drafted_tokens_total"
ACCEPTED_AT = "trtllm_spec_decode_accepted_tokens_total"
ACCEPTANCE_LENGTH = "dflash_acceptance_length"
REQUEST_ACCEPTANCE = "dflash_request_acceptance_length"
ROUNDS = "dflash_rounds_total"
CHOICES = "dflash_choices_total"
ROUND_SECONDS = "dflash_round_seconds_total"
PROMPT_TOKENS = "trtllm_prompt_tokens_total"
PREFILL_SECONDS = "dflash_prefill_seconds_total"
GENERATION_TOKENS = "trtllm_generation_tokens_total"
QUEUE_TIME = "trtllm_request_queue_time_seconds"
FIRST_TOKEN = "trtllm_time_to_first_token_seconds"
INTER_TOKEN = "dflash_inter_token_latency_seconds"
REQUESTS = "dflash_requests_total"
ACTIVE = "trtllm_num_requests_running"
WAITING = "trtllm_num_requests_waiting"
KV_ROWS = "dflash_kv_rows_used"
CACHED_TOKENS = "dflash_cached_prompt_tokens_total"
CACHE_BYTES = "dflash_prefix_cache_bytes"
COST_SECONDS = "dflash_cost_seconds"
# only who runs the rounds knows these
OF_ROUNDS = (
    *(ROUNDS, CHOICES, ROUND_SECONDS, PREFILL_SECONDS, KV_ROWS, COST_SECONDS, CACHE_BYTES),
)

# bucket bounds, in seconds below
MEANS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)  # tokens: texts differ most in the first
GAPS = tuple(n * 10.0**e for e in range(-4, 1) for n in (1.0, 2.5, 5.0))[:-1]
WAITS = (*GAPS[3:], 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True)
class Family:
    """A metric, with the values of its first label or its bucket bounds."""

    name: str
    kind: str
    unit: str
    description: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    more: tuple[str, ...] = ()  # labels of series that are made when their values are known
    buckets: tuple[float, ...] = ()


def families(max_drafts: int, rounds: bool = True) -> tuple[Family, ...]:
    """All metrics of a server; max_drafts: of a sequence in a round.

    rounds: whether it runs the rounds itself; otherwise `OF_ROUNDS` are not known.
    """
    positions = ("token_position", tuple(map(str, range(max_drafts))))
    committed = "Tokens a sequence committed in a round: accepted drafts and the bonus token"
    by_kind = "Rounds of single sequences, by what was verified"
    cost = "A step with few tokens in the cache, as measured on this machine"
    of_text = "Tokens committed in a round, the mean of a text that ended"
    lengths = tuple(map(float, range(1, max_drafts + 2)))
    table = (
        Family(DRAFT_TOKENS, COUNTER, "tokens", "Draft tokens proposed"),
        Family(ACCEPTED_TOKENS, COUNTER, "tokens", "Draft tokens accepted"),
        Family(DRAFTED_AT, COUNTER, "tokens", "Draft tokens proposed, by position", *positions),
        Family(ACCEPTED_AT, COUNTER, "tokens", "Draft tokens accepted, by position", *positions),
        Family(ACCEPTANCE_LENGTH, TALLY, "tokens", committed, buckets=lengths),
        Family(REQUEST_ACCEPTANCE, HISTOGRAM, "tokens", of_text, buckets=MEANS),
        Family(ROUNDS, COUNTER, "rounds", "Rounds of verify and draft, each of all sequences"),
        Family(CHOICES, COUNTER, "rounds", by_kind, "verified", VERIFIED),
        Family(ROUND_SECONDS, COUNTER, "seconds", "Time in rounds, by phase", "phase", PHASES),
        Family(PROMPT_TOKENS, COUNTER, "tokens", "Prompt tokens processed"),
        Family(CACHED_TOKENS, COUNTER, "tokens", "Those of them that were reused, not computed"),
        Family(PREFILL_SECONDS, COUNTER, "seconds", "Time in prompt chunks"),
        Family(GENERATION_TOKENS, COUNTER, "tokens", "Tokens committed and given to requests"),
        *(
            Family(name, HISTOGRAM, "seconds", f"From a request to its first {what}", buckets=WAITS)
            for name, what in ((QUEUE_TIME, "chunk"), (FIRST_TOKEN, "token"))
        ),
        Family(INTER_TOKEN, TALLY, "seconds", "Between two tokens of a request", buckets=GAPS),
        Family(REQUESTS, COUNTER, "requests", "Requests ended", "finished_reason", REASONS),
        Family(ACTIVE, GAUGE, "requests", "Sequences that hold a slot"),
        Family(WAITING, GAUGE, "requests", "Sequences that wait for a slot"),
        Family(KV_ROWS, GAUGE, "rows", "Slots in use"),
        Family(CACHE_BYTES, GAUGE, "bytes", "KV cache kept for prompts to come"),
        Family(COST_SECONDS, GAUGE, "seconds", cost, "step", (), ("rows", "tokens")),
    )
    return tuple(each for each in table if rounds or each.name not in OF_ROUNDS)


def bounds(buckets: Sequence[float]) -> tuple[str, ...]:
    """Bucket bounds as Prometheus writes them."""
    return (*(f"{bound:g}" for bound in buckets), "+Inf")
