"""One deployment (`Context`), and the arguments of `LLM(...)` that `engine.args` leaves open.

Paths in comments are those of NVIDIA/TensorRT-LLM.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import SLIDING, Drafter, Model, NotKnown, Pair, Target, is_converted
from dflash_trt.config import CHAIN, RECOMPUTE_TAIL, BuildConfig, Method, TensorRTLLM
from dflash_trt.errors import CheckpointError, ConfigError
from dflash_trt.hardware import Gpu, Machine
from dflash_trt.planning import (
    POOL_FRACTION,
    Deployment,
    Layout,
    ModelSize,
    Values,
    drafter_size,
    section,
    target_size,
)
from dflash_trt.tensorrt_llm.schema import DECODING_TYPES, LlmArgs, refusal
from dflash_trt.weights import INDEX, MODELOPT_FILE, read_json

# kernels of the drafter's attention by compute capability: `attention_backend` of
# DFlashDecodingConfig (1.4.0rc0); pull requests 16914 and 18553
DRAFTER_KERNELS = {90: "FA4", 100: "TRTLLM", 103: "TRTLLM"}
CONTEXT = 4096  # tokens of a sequence, prompt included, that batch sizes are for
TAIL = 2048  # tokens; the usual window of z-lab's drafters
# folders beside llm_args.yaml
TARGET = "target"
DRAFTER = "drafter"
BUILT_TOKENIZER = "../../tokenizer"
MAX_SEQ_LEN = 131072  # tokens, if the models support more
BATCH = {"latency": 8, "balanced": 64, "throughput": 256}
# docs/source/deployment-guide/deployment-guide-for-gpt-oss-on-trtllm.md
BEST_FOR_GPT_OSS = {90: "TRITON", 100: "TRTLLM", 103: "TRTLLM"}
# Open MPI 5 binds one or two ranks to a core each, more to NUMA nodes, whichever their GPUs have.
# TensorRT-LLM binds them better (docs/source/deployment-guide/configuring-cpu-affinity.md@08314e8e;
# its OMPI_MCA_hwloc_base_binding_policy does nothing in Open MPI 5.0.11)
BINDING = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "TLLM_NUMA_AWARE_WORKER_AFFINITY": "1",
}


@dataclass(frozen=True)
class Context:
    config: BuildConfig
    pair: Pair
    hardware: Machine | None = None  # overrides the config's

    @property
    def engine(self) -> TensorRTLLM:
        return self.config.llm

    @property
    def machine(self) -> Machine:
        return self.hardware or self.engine.machine

    @property
    def gpu(self) -> Gpu:
        return self.machine.gpu

    @property
    def gpus(self) -> int:
        """GPUs of one instance; ConfigError if the machine has fewer."""
        requested = self.engine.gpus
        limit = self.machine.all_gpus
        if requested is not None and requested > limit:
            raise ConfigError(
                f"engine.gpus is {requested}, but {self.machine.name} has {limit}",
                f"Set it to at most {limit}, or leave it out",
            )
        return requested or limit

    @property
    def method(self) -> Method:
        return self.config.speculation.method

    @property
    def is_dflash(self) -> bool:
        return self.method == "dflash"

    @property
    def target(self) -> Target:
        return self.pair.target

    @property
    def drafter(self) -> Drafter:
        return self.pair.drafter

    @cached_property
    def is_gpt_oss(self) -> bool:
        return self.target.architecture.startswith("GptOss")

    @cached_property
    def experts(self) -> int | None:
        """Experts per layer of the target; None: dense."""
        return self.target.number_or_none("num_local_experts", "num_experts", "n_routed_experts")

    @cached_property
    def two_sided_windows(self) -> bool:
        """Whether drafter layers have windows before and after a token."""
        if self.drafter.read is not None:
            return any(layer.window and not layer.causal for layer in self.drafter.layers)
        values = self.drafter.values
        kinds = values.get("layer_types")
        windows = isinstance(kinds, list) and SLIDING in kinds
        return windows and False in (values.get("is_causal"), values.get("causal"))

    @property
    def reuses_prefixes(self) -> bool:
        return self.config.serving.prefix_cache == RECOMPUTE_TAIL

    @property
    def trained_draft_len(self) -> int:
        return self.drafter.number("block_size") - 1

    @cached_property
    def target_size(self) -> ModelSize:
        """The target's size; NotKnown if its config.json does not state it."""
        try:
            return target_size(target_values(self.target.directory, self.target.values))
        except CheckpointError as error:
            raise NotKnown(str(error)) from None

    @cached_property
    def drafter_size(self) -> ModelSize:
        """A DFlash drafter's size; NotKnown if a config.json does not state it."""
        try:
            return drafter_size(self.drafter.values, self.target_size)
        except CheckpointError as error:
            raise NotKnown(str(error)) from None


def recompute_tail(drafter: ModelSize) -> int:
    """Return how many tokens of a reused prompt run again, for the drafter to see."""
    # with windows in all layers it cannot see more in any case
    windows = [layer.window or 0 for layer in drafter.layers]
    return max(windows) if all(windows) else TAIL


def target_values(directory: Path, values: Values) -> Values:
    """Return config.json with the quantization that ModelOpt writes beside it."""
    file = directory / MODELOPT_FILE
    if not file.is_file():
        return values
    stated = section(read_json(file), "quantization") | section(values, "quantization_config")
    return {**values, "quantization_config": stated}


def kv_bytes(values: Values, dtype: object) -> float:
    """Return bytes per number in the target's KV cache; dtype: of kv_cache_config."""
    if dtype == "auto":
        dtype = section(values, "quantization_config").get("kv_cache_quant_algo")
    return {"fp8": 1.0, "nvfp4": 0.5 + 1 / 16}.get(str(dtype).lower(), 2.0)


def layout_of(args: Values) -> Layout:
    return Layout(
        args["tensor_parallel_size"],
        attention_dp=bool(args["enable_attention_dp"]),
        experts_parallel=(args["moe_expert_parallel_size"] or 1) > 1,
    )


def ranks_divide_heads(context: Context, ranks: int) -> bool:
    """Check both models; KV heads may be repeated. NotKnown if a config.json says too little."""
    for model in (context.target, context.drafter):
        if model.absent:
            continue
        query = model.number("num_attention_heads")
        kv = model.number_or_none("num_key_value_heads") or query
        if model.read is not None:
            kv = model.layers[0].num_key_value_heads  # if layers differ, the first's
        if min(query, kv) < 1:
            raise NotKnown(f"the {model.role} has {query} heads on {kv} KV heads")
        if query % ranks or (kv % ranks and ranks % kv):
            return False
    linear = context.target.number_or_none("linear_num_key_heads")  # of hybrids
    return not linear or linear % ranks == 0


def weight_bytes(model: Model[Any]) -> int:
    """Add them up by index (weights may be on the Hub) or by file; NotKnown without either."""
    index = model.directory / INDEX
    about = read_json(index).get("metadata") if index.is_file() else None
    total = about.get("total_size") if isinstance(about, dict) else None
    if isinstance(total, int) and total > 0:
        return total
    files = model.stored.files if model.stored else model.directory.glob("model*.safetensors")
    total = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
    if not total:
        raise NotKnown(f"the {model.role} has no weights here")
    return total


def target_bytes(context: Context) -> float:
    """Return the bytes of the target's weights: of its files, or as its config.json says."""
    if context.engine.quantize is None:
        with suppress(NotKnown):
            return weight_bytes(context.target)
    return context.target_size.weight_bytes


# --- choices -------------------------------------------------------------------------------------


def choose_args(context: Context) -> LlmArgs:
    """Return arguments, model paths relative to their file; ConfigError for refused ones."""
    _check_given(context)
    args = _choose(context)
    refused = refusal(args, context.method)
    if refused:  # because of values in the checkpoints
        raise ConfigError(
            f"{refused.name} would be {refused.value!r}, which TensorRT-LLM does not take",
            "Check the config.json of target and drafter, or give it in engine.args",
        )
    return LlmArgs(args)


def _check_given(context: Context) -> None:
    given = context.engine.args
    name = "speculative_config"
    if context.method == "none" and given.get(name) is not None:
        raise ConfigError(
            f"engine.args.{name} is given, but speculation.method is none",
            "Leave it out, or set the method",
        )
    if context.method != "none" and name in given and not isinstance(given[name], Mapping):
        raise ConfigError(
            f"engine.args.{name} turns speculation off",
            "Leave it out, or set speculation.method: none",
        )
    whole = {"model": TARGET} | given
    if context.method != "none":
        whole[name] = {"decoding_type": DECODING_TYPES[context.method]} | given.get(name, {})
    refused = refusal(whole, context.method)
    if refused:
        raise ConfigError(f"engine.args.{refused.name}: {refused.why:.200}", refused.fix)


class _Choices:
    """Arguments under construction; values from `engine.args` are not changed."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.args = copy.deepcopy(dict(given))

    def set(self, name: str, value: Any) -> None:
        """Set an argument by its dotted name, unless it is given, or its section is null."""
        *sections, last = name.split(".")
        inner: Any = self.args
        for part in sections:
            inner = inner.setdefault(part, {})
        if isinstance(inner, dict):
            inner.setdefault(last, value)

    def __getitem__(self, name: str) -> Any:
        """Return the value, or upstream's default."""
        return LlmArgs(self.args).value(name)


def _choose(context: Context) -> dict[str, Any]:
    engine = context.engine
    config = context.config
    args = _Choices(engine.args)
    for name in ("max_batch_size", "max_num_tokens"):
        # null is the default: `normalize_optional_fields_to_defaults` of llm_args.py
        if args.args.get(name, 0) is None:
            del args.args[name]
            args.args[name] = args[name]

    hub = config.target.hub if engine.checkpoints == "hub" else None
    args.set("model", hub or TARGET)
    if args["model"] != TARGET:
        args.set("revision", config.target.revision)  # the one that was checked

    # the drafter is sharded like the target (modeling_dflash.py@009d8fa4); KV heads may be repeated
    with suppress(NotKnown):
        ranks = next(n for n in range(context.gpus, 0, -1) if ranks_divide_heads(context, n))
        args.set("tensor_parallel_size", ranks)
    ranks = args["tensor_parallel_size"]
    if context.gpus > context.machine.gpus:  # an instance spans nodes
        args.set("gpus_per_node", context.machine.gpus)
    _choose_experts(context, args, ranks)

    _choose_tokenizer(context, args)

    # upstream's default for Gemma 4 is FlashInfer, with one token a sequence (user reports)
    if context.target.architecture.startswith("Gemma4"):
        args.set("attn_backend", "TRTLLM")
    if context.method != "none":
        _choose_speculation(context, args)
    _choose_cache(context, args)
    _choose_sizes(context, args, ranks)

    # a batch size between two graphs would run without one
    # (examples/configs/curated/gpt-oss-120b-latency.yaml)
    args.set("cuda_graph_config.enable_padding", True)
    largest = args["cuda_graph_config.max_batch_size"] or args["max_batch_size"]
    args.set("cuda_graph_config.batch_sizes", _graph_sizes(largest))
    args.set("return_perf_metrics", True)  # acceptance per request (pull request 17082)
    if engine.objective == "throughput":
        # examples/configs/curated/gpt-oss-120b-throughput.yaml
        args.set("stream_interval", 20)
    return args.args


def _choose_tokenizer(context: Context, args: _Choices) -> None:
    """Let TensorRT-LLM run no tokenizer of the checkpoint's code: it gets ids and returns them."""
    if not is_converted(context.target.directory):
        return
    if args["guided_decoding_backend"] is None:
        args.set("skip_tokenizer_init", True)
    elif args["tokenizer"] is None:  # grammars need the tokens' texts
        args.set("tokenizer", BUILT_TOKENIZER)


def _choose_experts(context: Context, args: _Choices, ranks: int) -> None:
    throughput = context.engine.objective == "throughput"
    # examples/configs/curated/gpt-oss-120b-throughput.yaml
    if throughput and context.experts is not None and ranks > 1:
        args.set("enable_attention_dp", True)
    if args["enable_attention_dp"]:
        args.set("attention_dp_config.enable_balance", True)
        args.set("attention_dp_config.batching_wait_iters", 50)
        args.set("attention_dp_config.timeout_iters", 1)
    if context.experts is not None and ranks > 1:
        # as in gpt-oss-120b-latency.yaml; examples/configs/database/openai/gpt-oss-120b/B200 has
        # one per rank
        is_whole = context.engine.objective == "latency" or context.experts % ranks
        args.set("moe_expert_parallel_size", 1 if is_whole else ranks)
    if context.is_gpt_oss and context.gpu.sm in BEST_FOR_GPT_OSS:
        args.set("moe_config.backend", BEST_FOR_GPT_OSS[context.gpu.sm])


def _choose_speculation(context: Context, args: _Choices) -> None:
    drafter = context.drafter
    method = context.method
    args.set("speculative_config.decoding_type", DECODING_TYPES[method])
    if method != "ngram":
        args.set("speculative_config.speculative_model", DRAFTER)  # must be local
    drafts = context.config.speculation.draft_tokens
    with suppress(NotKnown):
        if drafts is None:
            # the whole block (_torch/speculative/dflash.py@00679c66), or as in upstream's examples
            drafts = context.trained_draft_len if context.is_dflash else CHAIN
        args.set("speculative_config.max_draft_len", drafts)
    if context.is_dflash:
        # upstream reads only `dflash_config`, and falls back silently (llm_args.py@00043967)
        with suppress(NotKnown):
            args.set("speculative_config.mask_token_id", drafter.number("mask_token_id"))
        with suppress(NotKnown):
            args.set("speculative_config.target_layer_ids", list(drafter.taps))
        args.set("speculative_config.attention_backend", drafter_backend(context))
    if method == "eagle3":
        # upstream's defaults are layers at the beginning, middle and end
        layers = section(drafter.values, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
        if isinstance(layers, list) and layers:
            args.set("speculative_config.eagle3_layers_to_capture", list(layers))
    if method == "ngram":
        # docs/source/features/speculative-decoding.md@04c8822c
        args.set("speculative_config.max_matching_ngram_size", 4)
        # never draft one client's text for another
        args.set("speculative_config.is_public_pool", False)
        # drafts are made between two steps of the target (same page)
        args.set("disable_overlap_scheduler", True)


def _choose_cache(context: Context, args: _Choices) -> None:
    # reused tokens have no hidden states, so the drafter misses them
    # (tests/unittest/_torch/speculative; vllm-project/vllm issue 47930)
    args.set("kv_cache_config.enable_block_reuse", context.reuses_prefixes)
    # as in 1.4.0rc1 (pull request 17495); "auto" asks the model's class, and may fall back. V1
    # recomputes no tail if a layer has a window (TestV1WindowedLayerGate)
    short_of_memory = context.is_gpt_oss and context.method == "eagle3"  # see `_faults`
    args.set("kv_cache_config.use_kv_cache_manager_v2", not short_of_memory)
    if context.reuses_prefixes and context.is_dflash:
        with suppress(NotKnown):
            tail = recompute_tail(context.drafter_size)
            args.set("speculative_config.context_recompute_tail", tail)
    # in a pool of another dtype than bfloat16 the drafter finds no place
    # (_torch/speculative/dflash.py@00679c66)
    args.set("kv_cache_config.dtype", "auto")
    # as in examples/configs/database/openai/gpt-oss-120b/B200; of what an arena leaves
    args.set("kv_cache_config.free_gpu_memory_fraction", POOL_FRACTION)


def _choose_sizes(context: Context, args: _Choices, ranks: int) -> None:
    objective = context.engine.objective
    with suppress(NotKnown):
        args.set("max_seq_len", _max_seq_len(context))
    length = args["max_seq_len"]
    verified = 1 + (args["speculative_config.max_draft_len"] or 0)

    batches = ranks if args["enable_attention_dp"] else 1
    batch = ceil((context.engine.concurrency or BATCH[objective]) / batches)
    backend = args["speculative_config.attention_backend"]
    if context.is_dflash and backend != "TRTLLM" and length is not None:
        with suppress(NotKnown):
            chosen = LlmArgs(args.args)
            planned = deployment(context, chosen, backend, verified)
            fits = planned.fit(layout_of(chosen.complete), min(CONTEXT, length), length)
            batch = max(1, min(batch, fits // batches))
    args.set("max_batch_size", batch)

    # examples/configs/curated/gpt-oss-120b-latency.yaml; one step verifies every sequence
    minimum = 8192 if objective == "latency" else 16384
    args.set("max_num_tokens", max(minimum, args["max_batch_size"] * verified))
    if length is None or length > args["max_num_tokens"]:
        # docs/source/features/feature-combination-matrix.md@01edceae
        args.set("enable_chunked_prefill", True)


def _max_seq_len(context: Context) -> int:
    requested = context.config.serving.max_seq_len
    if requested is not None:
        return requested
    limit = min(MAX_SEQ_LEN, context.target.number("max_position_embeddings"))
    if context.is_dflash:  # an EAGLE-3 head states its trained length, mostly 2048
        limit = min(limit, context.drafter.number("max_position_embeddings"))
    return limit


def _graph_sizes(largest: int) -> list[int]:
    """Return batch sizes to capture: few, yet close enough that padding costs little."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, largest, 64)
    return [size for size in sizes if size < largest] + [largest]


def drafter_backend(context: Context) -> str:
    """Return the kernels of a DFlash drafter's attention; VANILLA is flash-attn's."""
    # the others have no two-sided windows (pull request 19159; for FA4 nothing says that it has)
    if context.two_sided_windows:
        return "VANILLA"
    return DRAFTER_KERNELS.get(context.gpu.sm, "VANILLA")


def deployment(context: Context, args: LlmArgs, backend: str, block: int) -> Deployment:
    """Return what is to fit on the machine; NotKnown if a config.json does not state the sizes.

    backend: of the drafter's attention; block: most tokens of a round.
    """
    values = target_values(context.target.directory, context.target.values)
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    # then upstream estimates nothing before it makes the pool (`_kv_cache_estimation_runs`)
    skipped = (args.env_overrides or {}).get("TRTLLM_SKIP_KV_CACHE_ESTIMATION") == "1"
    return Deployment(
        machine=context.machine,
        gpus=context.gpus,
        target=context.target_size,
        drafter=context.drafter_size,
        block=block,
        kv_bytes=kv_bytes(values, args.kv_cache_config.dtype),
        backend=backend,
        pool_fraction=0.9 if fraction is None else fraction,  # 0.9: upstream's default
        pool_first=skipped or args.attn_backend == "VANILLA" or args.cp_config is not None,
        stored_bytes=target_bytes(context),
    )


def env_vars(context: Context) -> dict[str, str]:
    """Return environment variables for the process that makes the `LLM`, and for its ranks."""
    # otherwise LLM() reports usage to NVIDIA; engine.args takes precedence
    variables = dict(BINDING)
    if "telemetry_config" not in context.engine.args:
        variables["TRTLLM_NO_USAGE_STATS"] = "1"
    # as in upstream's recipes (examples/configs/database/openai/gpt-oss-120b/B200)
    if context.gpu.sm >= 100:
        variables["TRTLLM_ENABLE_PDL"] = "1"  # programmatic dependent launch
    if context.gpus > 1:
        variables["NCCL_GRAPH_REGISTER"] = "0"
    return variables
