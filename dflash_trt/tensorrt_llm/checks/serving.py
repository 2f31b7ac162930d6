"""Graphs, releases, the target, and what does not go with speculation."""

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.tensorrt_llm.arguments import LlmArgs, has
from dflash_trt.tensorrt_llm.context import Context
from dflash_trt.tensorrt_llm.faults import look_up
from dflash_trt.tensorrt_llm.rules import TARGET


@check("warning")
def graphs_padded(context: Context, args: LlmArgs) -> Found:
    """A batch between two sizes runs without a graph; a schedule turns padding on anyway."""
    graphs = args.cuda_graph_config
    padded = graphs is None or graphs.enable_padding
    return Found(
        padded or args.value("speculative_config.draft_len_schedule") is not None,
        f"cuda_graph_config.enable_padding is {str(padded).lower()}",
        "Set engine.args.cuda_graph_config.enable_padding: true",
    )


@check("error")
def graph_sizes_agree(context: Context, args: LlmArgs) -> Found:
    """Upstream refuses a max_batch_size that is not the largest of batch_sizes."""
    sizes = args.value("cuda_graph_config.batch_sizes")
    asked = args.value("cuda_graph_config.max_batch_size") or 0
    what = f"cuda_graph_config.max_batch_size is {asked}"
    what += f", the largest of batch_sizes {max(sizes)}" if sizes else ""
    return Found(not sizes or asked in (0, max(sizes)), what, "Give one of the two")


@check("warning")
def graphs_cover_batch(context: Context, args: LlmArgs) -> Found:
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


@check("warning")
def lora(context: Context, args: LlmArgs) -> Found:
    """Untested with speculation upstream; the drafter knows nothing of the adapter."""
    on = args.enable_lora or args.lora_config is not None
    fix = "Merge the adapter into the target, or see that acceptance is still good"
    return Found(not on, f"LoRA is {'on' if on else 'off'}", fix)


@check("error")
def real_weights(context: Context, args: LlmArgs) -> Found:
    """Weights that nobody loaded."""
    ok = args.load_format.lower() == "auto"
    return Found(ok, f"load_format is {args.load_format}", "Leave it out")


@check("note")
def acceptance_per_request(context: Context, args: LlmArgs) -> Found:
    """Before pull request 17082 (August 2026) the figures of a request are zero."""
    fix = "Take 1.3.0rc27 or later, or read acceptance from the server's metrics only"
    return Found(has(args.version, "1.3.0rc27"), f"engine.version is {args.version}", fix)


@check("warning")
def faults_known(context: Context, args: LlmArgs) -> Found:
    """What others met with this version, GPU and feature: faults.yaml, from public threads."""
    return look_up(args, [context.gpu.sm], context.target.architecture)


@check("error")
def guided_of_version(context: Context, args: LlmArgs) -> Found:
    """Before pull request 19455 (late September 2026) warming up with a drafter deadlocks."""
    backend = args.guided_decoding_backend
    what = f"guided_decoding_backend is {backend}, engine.version {args.version}"
    fix = "Set engine.version to 1.4.0rc1 or later, or leave guided_decoding_backend out"
    return Found(not backend or has(args.version, "1.4.0rc1"), what, fix)


@check("warning")
def guided_of_channels(context: Context, args: LlmArgs) -> Found:
    """gpt-oss opens a channel first: only a structural tag, xgrammar's, lets JSON wait for it.

    `_response_format_to_guided_decoding_params` of `tensorrt_llm/serve/openai_protocol.py`. The
    server refuses JSON and regular expressions, and takes grammars that have the channels in them.
    """
    backend = args.guided_decoding_backend
    what = f"guided_decoding_backend is {backend}, the target {context.target.architecture}"
    wrong = context.is_gpt_oss and backend == "llguidance"
    return Found(not wrong, what, "Set engine.args.guided_decoding_backend: xgrammar")


@check("error")
def hub_target(context: Context, args: LlmArgs) -> Found:
    """`checkpoints: hub` names the target by its id, which a directory does not have."""
    kept, hub = context.engine.checkpoints, context.config.target.hub
    return Found(
        kept != "hub" or hub is not None,
        f"engine.checkpoints is {kept}, the target {hub or 'a directory'}",
        "Give target: {hub: ORG/NAME, revision: COMMIT}, or set engine.checkpoints to copy or link",
    )


@check("error")
def target_as_checked(context: Context, args: LlmArgs) -> Found:
    """Another target than the one that was checked, or another revision of it."""
    target = context.config.target
    return Found(
        args.model == TARGET or (args.model, args.revision) == (target.hub, target.revision),
        f"model is {args.model}" + (f" at {args.revision}" if args.revision else ""),
        "Set the config's target, and leave engine.args.model and revision out",
    )
