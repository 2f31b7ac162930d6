"""Planning: memory of a model and time of a round, from config.json files and data sheets."""

from dflash_trt.planning.capacity import OVERHEAD, POOL_FRACTION, Deployment
from dflash_trt.planning.model_size import (
    Layer,
    ModelSize,
    Values,
    drafter_size,
    feature_size,
    section,
    state_bytes,
    target_size,
)
from dflash_trt.planning.one_gpu import OneGpu, as_stored, token_bytes
from dflash_trt.planning.published import (
    lowest_believed,
    published_config,
    published_data,
    published_models,
)
from dflash_trt.planning.rounds import (
    PLAIN,
    Constants,
    Layout,
    Method,
    Runtime,
    dflash,
    expected_acceptance,
    fit_errors,
    round_time,
)
