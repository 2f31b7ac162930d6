"""Checkpoints: read a target or drafter directory and check that the pair belongs together."""

from dflash_trt.checkpoints.directory import (
    CARD,
    MORE_TEMPLATES,
    Spell,
    copy_tokenizer,
    load_tokenizer,
    read_bytes,
    read_card,
    read_json,
    special_tokens,
    speller,
    tokenizer_files,
)
from dflash_trt.checkpoints.drafter import (
    draft_token_ids,
    drafter_format,
    drafter_shapes,
    load_drafter,
    open_drafter,
)
from dflash_trt.checkpoints.fields import SLIDING
from dflash_trt.checkpoints.gguf import BITS, Blocks
from dflash_trt.checkpoints.model import NO_DRAFTER, Drafter, Model, Pair, Target, for_length
from dflash_trt.checkpoints.model_checks import drafter_layout
from dflash_trt.checkpoints.pair import (
    NO_PLAN,
    READER_CHECKS,
    TENSORRT_LLM_CHECKS,
    check_pair,
    engine_kinds,
    inspect,
    pair_findings,
)
from dflash_trt.checkpoints.source import (
    Located,
    Report,
    locate,
    locate_argument,
    locate_config,
    packaged_config,
    small_files,
)
from dflash_trt.checkpoints.spec import (
    Convolution,
    DecoderSpec,
    DeltaNet,
    DrafterSpec,
    Experts,
    LayerSpec,
    Rope,
    Selector,
    TargetSpec,
)
from dflash_trt.checkpoints.stored import MODELOPT_FILE, Span
from dflash_trt.checkpoints.target import (
    eos_token_ids,
    load_target,
    open_target,
    sampling_defaults,
    target_shapes,
)
from dflash_trt.checkpoints.weights import INDEX, Weights, open_files
