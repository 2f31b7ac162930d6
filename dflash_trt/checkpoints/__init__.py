"""Checkpoints: read the directory of a target or a drafter, whatever its format."""

from dflash_trt.checkpoints.directory import (
    CARD,
    MORE_TEMPLATES,
    Spell,
    copy_tokenizer,
    is_converted,
    load_tokenizer,
    read_card,
    special_tokens,
    speller,
    tokenizer_files,
    tokenizer_split,
    write_tokenizer,
)
from dflash_trt.checkpoints.drafter import (
    FROM_ANCHOR,
    draft_token_ids,
    drafter_format,
    drafter_shapes,
    load_drafter,
    open_drafter,
)
from dflash_trt.checkpoints.fields import SLIDING
from dflash_trt.checkpoints.model import (
    NO_DRAFTER,
    Drafter,
    Model,
    NotKnown,
    Pair,
    Target,
    for_length,
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
from dflash_trt.checkpoints.target import (
    eos_token_ids,
    load_target,
    open_target,
    sampling_defaults,
    target_shapes,
)
