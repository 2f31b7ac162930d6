"""How much memory a model takes and how long a round is, by config.json files and data sheets."""

from dflash_trt.roofline.hardware import PRESETS, Gpu, Machine, machine
from dflash_trt.roofline.memory import (
    ARENA_SHARE,
    OVERHEAD,
    Memory,
    arena_slot,
    fit_memory,
)
from dflash_trt.roofline.model_size import (
    Layer,
    ModelSize,
    Values,
    drafter_size,
    section,
    target_size,
)
from dflash_trt.roofline.published import (
    lowest_believed,
    published_acceptance,
    published_data,
    published_rows,
    tau_of,
)
from dflash_trt.roofline.rounds import (
    EAGLE_CHAIN,
    PLAIN,
    Constants,
    Layout,
    Method,
    Runtime,
    Step,
    dflash,
    eagle,
    expected_acceptance,
    expected_eagle,
    fastest,
    fit_errors,
    prefill_time,
    round_time,
)
