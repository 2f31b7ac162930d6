"""Graphs, sampling and what does not go with speculation."""

from dflash_trt.checkpoints.checks import Found
from dflash_trt.tensorrt_llm.case import Case
from dflash_trt.tensorrt_llm.checks.arguments import marked
from dflash_trt.tensorrt_llm.choices import TARGET
from dflash_trt.tensorrt_llm.chosen import LlmArgs
from dflash_trt.tensorrt_llm.schema import has

SPECULATIVE = "engine.args.speculative_config"


def graphs_on(case: Case, args: LlmArgs) -> Found:
    """Without them each of a step's thousands of kernels is launched by Python."""
    return Found(
        args.cuda_graph_config is not None,
        f"CUDA graphs are {'on' if args.cuda_graph_config else 'off'}",
        "Leave engine.args.cuda_graph_config out",
    )


def graphs_padded(case: Case, args: LlmArgs) -> Found:
    """A batch between two sizes runs without a graph; a schedule turns padding on anyway."""
    graphs = args.cuda_graph_config
    padded = graphs is None or graphs.enable_padding
    return Found(
        padded or args.speculative_config.draft_len_schedule is not None,
        f"cuda_graph_config.enable_padding is {str(padded).lower()}",
        "Set engine.args.cuda_graph_config.enable_padding: true",
    )


def graph_sizes_agree(case: Case, args: LlmArgs) -> Found:
    """Upstream refuses a max_batch_size that is not the largest of batch_sizes."""
    graphs = args.cuda_graph_config
    sizes = graphs.batch_sizes if graphs else None
    asked = graphs.max_batch_size if graphs else 0
    return Found(
        not sizes or asked in (0, max(sizes)),
        f"cuda_graph_config.max_batch_size is {asked}"
        + (f", the largest of batch_sizes {max(sizes)}" if sizes else ""),
        "Give one of the two",
    )


def graphs_cover_batch(case: Case, args: LlmArgs) -> Found:
    """Larger batches than the largest graph run without one, when it matters most."""
    graphs, batch = args.cuda_graph_config, args.max_batch_size or 0
    if graphs is None:
        return Found(True, "there are no CUDA graphs")
    largest = max(graphs.batch_sizes or [graphs.max_batch_size or 128])
    return Found(
        largest >= batch,
        f"the largest CUDA graph is for {largest} sequences, max_batch_size is {batch}",
        f"Add {batch} to engine.args.cuda_graph_config.batch_sizes",
    )


def overlap(case: Case, args: LlmArgs) -> Found:
    """Without overlap the GPU waits for the host between steps."""
    return Found(
        not args.disable_overlap_scheduler,
        f"disable_overlap_scheduler is {str(args.disable_overlap_scheduler).lower()}",
        "Leave it out",
    )


def rejection_with_guided(case: Case, args: LlmArgs) -> Found:
    """Upstream refuses the two together."""
    rejection = args.speculative_config.use_rejection_sampling
    guided = args.guided_decoding_backend
    return Found(
        not rejection or guided is None,
        f"use_rejection_sampling is {str(rejection).lower()}, guided_decoding_backend {guided}",
        "Leave out one of the two",
    )


def sampled_requests(case: Case, args: LlmArgs) -> Found:
    """Else a draft counts only if it is the very token that the target draws: few are."""
    rejection = args.speculative_config.use_rejection_sampling
    return Found(
        rejection,
        f"use_rejection_sampling is {str(rejection).lower()}"
        + ("" if rejection else ": requests with a temperature accept fewer drafts"),
        f"For them set {SPECULATIVE}.use_rejection_sampling: true (a prototype; FlashInfer)",
    )


def penalties(case: Case, args: LlmArgs) -> Found:
    """Upstream refuses requests with a penalty unless it has been turned on."""
    on = args.speculative_config.enable_penalty
    return Found(
        on,
        f"enable_penalty is {str(on).lower()}"
        + ("" if on else ": requests with a repetition, presence or frequency penalty are refused"),
        f"For them set {SPECULATIVE}.enable_penalty: true (a prototype)",
    )


def logits_processors(case: Case, args: LlmArgs) -> Found:
    """They see one token a step; speculation verifies many."""
    return Found(
        args.batched_logits_processor is None,
        "batched_logits_processor is "
        + ("given" if args.batched_logits_processor is not None else "not given"),
        "Leave it out: upstream does not run it with speculation",
    )


def lora(case: Case, args: LlmArgs) -> Found:
    """Untested with speculation upstream; the drafter knows nothing of the adapter."""
    on = args.enable_lora or args.lora_config is not None
    return Found(
        not on,
        f"LoRA is {'on' if on else 'off'}",
        "Merge the adapter into the target, or see that acceptance is still good",
    )


def scheduler_policy(case: Case, args: LlmArgs) -> Found:
    """Upstream has dropped requests under it (issue 16827)."""
    policy = args.scheduler_config.capacity_scheduler_policy
    return Found(
        policy != "MAX_UTILIZATION",
        f"capacity_scheduler_policy is {policy}",
        "Leave engine.args.scheduler_config.capacity_scheduler_policy out",
    )


def one_server(case: Case, args: LlmArgs) -> Found:
    """A generation server gets a prompt's KV, not its hidden states (pull request 19352)."""
    parted = args.cache_transceiver_config is not None
    return Found(
        not parted,
        f"prefill and generation are {'apart' if parted else 'in one server'}",
        "Leave engine.args.cache_transceiver_config out; texts stay right, but acceptance drops",
    )


def real_weights(case: Case, args: LlmArgs) -> Found:
    """Weights that nobody loaded."""
    return Found(
        args.load_format.lower() == "auto", f"load_format is {args.load_format}", "Leave it out"
    )


def no_remote_code(case: Case, args: LlmArgs) -> Found:
    """Python files of the checkpoint would run as the server."""
    return Found(
        not args.trust_remote_code,
        f"trust_remote_code is {str(args.trust_remote_code).lower()}",
        "Read the checkpoint's Python files first, and pin its revision",
    )


def acceptance_metrics(case: Case, args: LlmArgs) -> Found:
    """Without them nobody sees that acceptance collapsed."""
    return Found(
        args.return_perf_metrics,
        f"return_perf_metrics is {str(args.return_perf_metrics).lower()}",
        "Leave it out of engine.args: it is turned on",
    )


def acceptance_per_request(case: Case, args: LlmArgs) -> Found:
    """Before pull request 17082 (August 2026) the figures of a request are zero."""
    version = case.engine.version
    return Found(
        has(version, "1.3.0rc27"),
        f"engine.version is {version}",
        "Take 1.3.0rc27 or later, or read acceptance from the server's metrics only",
    )


def accuracy_of_release(case: Case, args: LlmArgs) -> Found:
    """Its release notes: experts in few bits on several GPUs may lose much accuracy."""
    version, ranks = case.engine.version, args.tensor_parallel_size
    hit = version == "1.3.0rc24" and case.is_gpt_oss and ranks > 1
    return Found(
        not hit,
        f"engine.version is {version}"
        + (f", whose known issue touches gpt-oss on {ranks} GPUs" if hit else ""),
        "Take another engine.version",
    )


def deprecated_arguments(case: Case, args: LlmArgs) -> Found:
    """Upstream will take them away."""
    found = marked(case, "deprecated")
    return Found(
        not found, f"deprecated in engine.args: {', '.join(found) or 'nothing'}", "Leave them out"
    )


def unstable_arguments(case: Case, args: LlmArgs) -> Found:
    """Upstream may change prototypes with any release."""
    found = marked(case, "prototype")
    return Found(
        not found,
        f"prototypes in engine.args: {', '.join(found) or 'none'}",
        "Pin engine.version, and build again before changing it",
    )


def target_as_checked(case: Case, args: LlmArgs) -> Found:
    """Another target than the one that was checked, or another revision of it."""
    same = args.model == TARGET or (
        args.model == case.config.target.hub and args.revision == case.config.target.revision
    )
    return Found(
        same,
        f"model is {args.model}" + (f" at {args.revision}" if args.revision else ""),
        "Set the config's target, and leave engine.args.model and revision out",
    )


def hub_target(case: Case, args: LlmArgs) -> Found:
    """`checkpoints: hub` names the target by its id, which a directory does not have."""
    by_hub = case.engine.checkpoints == "hub"
    return Found(
        not by_hub or case.config.target.hub is not None,
        f"engine.checkpoints is {case.engine.checkpoints}, the target "
        f"{case.config.target.hub or 'a directory'}",
        "Give target: {hub: ORG/NAME, revision: COMMIT}, or set engine.checkpoints to copy or link",
    )
