"""`speculative_config` with `decoding_type: DFlash`."""

from typing import Annotated, Literal

from pydantic import Field

from dflash_trt.tensorrt_llm.schema.base import (
    DEPRECATED,
    PROTOTYPE,
    RC27,
    RC140,
    Fraction,
    NonNegative,
    Positive,
    Since,
    Upstream,
)
from dflash_trt.tensorrt_llm.schema.execution import MoeBackend


class DFlashDecodingConfig(Upstream):
    """`DFlashDecodingConfig`, its base class included."""

    decoding_type: Literal["DFlash"] = "DFlash"
    max_draft_len: NonNegative | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | None = None
    # before, it is taken and has no effect: only EAGLE-3 had dynamic lengths
    max_concurrency: Annotated[Positive | None, RC27] = None
    draft_len_schedule: Annotated[
        Annotated[dict[Positive, NonNegative], Field(min_length=1)] | None, RC27
    ] = None
    load_format: str | None = None
    acceptance_rate_window_size: Annotated[NonNegative | None, RC27] = None
    acceptance_rate_threshold: Annotated[Fraction | None, RC27] = None
    use_rejection_sampling: Annotated[bool, PROTOTYPE] = False
    allow_advanced_sampling: Annotated[bool, DEPRECATED] = False
    advanced_sampling_mode: Annotated[
        Literal["full", "no_topk", "no_topp", "no_topk_no_topp"], RC27
    ] = "full"
    enable_penalty: Annotated[bool, PROTOTYPE, RC27] = False
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    attention_backend: Annotated[
        Literal["VANILLA", "TRTLLM", "FA4"], RC27, Since("1.3.0rc27", "FA4")
    ] = "VANILLA"
    context_recompute_tail: Annotated[int | None, RC140] = 0
    skip_ctx_buffer_budget_check: Annotated[bool, RC140] = False
    moe_backend: Annotated[MoeBackend | None, RC140] = Field(default=None)
    spec_dec_variant: Annotated[Positive | None, RC140] = None
