"""Export of the same deployment for other engines: `dflash-trt export`.

Prints a shell script; for Dynamo manifests, after its `profiler/templates/dgd/trtllm/agg.yaml`
(1.6.1). Ranks, lengths and batch size are those of `build`, so that results are comparable; prefix
caching is on if `serving.prefix_cache` is. No option changes what is said. They are documented in
vLLM's `vllm/config/speculative.py` (0.33.0), SGLang's `sglang/srt/arg_groups` (0.5.23) and
TensorRT-LLM's `tests/unittest/api_stability/references/trtllm_serve_cli.yaml` (029e223d).
"""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dflash_trt.builder.deployment import render_template, resource_name
from dflash_trt.builder.tensorrt_llm import open_pair
from dflash_trt.checkpoints import FROM_ANCHOR, NotKnown, Report, drafter_format, locate_config
from dflash_trt.checkpoints.drafter import DFLASH2
from dflash_trt.checks import drafter_layout, engine_kinds, pair_findings, warnings_of
from dflash_trt.config import BuildConfig, Source
from dflash_trt.errors import ConfigError, PairError
from dflash_trt.tensorrt_llm import Context, LlmArgs, check_args, choose_args, env_vars

Options = Sequence[tuple[str, object]]  # None: an option without a value
# options for: commit, ranks, expert ranks, sequence length, batch size, no prefix caching
FLAGS = {
    "vllm": "--revision --tensor-parallel-size --enable-expert-parallel --max-model-len "
    "--max-num-seqs --no-enable-prefix-caching",
    "sglang": "--revision --tp-size --ep-size --context-length --max-running-requests "
    "--disable-radix-cache",
}
SGLANG_DRAFTS = {  # block: counts the anchor too
    "dflash": "DFLASH --speculative-dflash-block-size {block}",
    "eagle3": "EAGLE3 --speculative-num-steps {drafts} --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens {block}",
    "ngram": "NGRAM --speculative-num-draft-tokens {block}",
}
# sampled drafts, accepted as a block
VLLM_DFLASH = {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
DYNAMO = "1.6.1"
DYNAMO_LLM = "1.3.0rc29"  # the TensorRT-LLM of its image
TOKENIZER_ARGS = ("skip_tokenizer_init", "tokenizer")  # our server has the texts, others need them
NEWER = "context_recompute_tail"  # what that does not have, so that it reuses no prompt


def export(config: BuildConfig, engine: str, report: Report) -> str:
    """Return the script; raises ConfigError, CheckpointError, or PairError if unsupported."""
    with TemporaryDirectory(prefix="dflash-trt-export-") as scratch:
        return _export(config, engine, report, Path(scratch))


def _export(config: BuildConfig, engine: str, report: Report, scratch: Path) -> str:
    for role, source in config.sources.items():
        if source.gguf is not None:
            problem = f"the {role} is a GGUF file; scripts for other engines name safetensors"
            raise ConfigError(problem, f"Give {role}.path, or {role}.hub and {role}.revision")
    machine = config.llm.machine
    target = locate_config(config.target, "target", report, scratch)
    drafter = None
    pinned = config.drafter
    if pinned is not None:
        drafter = locate_config(pinned, "drafter", report, scratch)
        pinned = pinned.pinned(drafter.commit)
    changed = {"target": config.target.pinned(target.commit), "drafter": pinned}
    config = config.model_copy(update=changed)
    context = Context(config, open_pair(config, target, drafter))
    pair = context.pair
    args = choose_args(context)
    if args.tensor_parallel_size > machine.gpus:
        raise ConfigError(
            f"one instance takes {args.tensor_parallel_size} GPUs, a node of {machine.name} has "
            f"{machine.gpus}; scripts for other engines are for one node",
            f"Set engine.gpus to at most {machine.gpus}",
        )
    form = drafter_format(pair.drafter)
    layout = drafter_layout(pair)
    if engine != "vllm" and form != "z-lab":
        raise PairError(f"{engine} does not read drafters in the {form} format", layout.fix)
    if form == "DeepSpec" or any(pair.drafter.values.get(name) for name in FROM_ANCHOR):
        problem = f"{engine} runs no DFlash drafter whose anchor's place drafts"
        raise PairError(problem, "Use a drafter of which only the masks draft")
    lines = ENGINES[engine](context, args)
    method = config.speculation.method
    head = [f"# {config.name} on {engine}, method {method}, by `dflash-trt export`; never run."]
    if args.enable_attention_dp and (engine == "vllm" or (engine, method) == ("sglang", "ngram")):
        head.append(
            f"# For TensorRT-LLM it has attention-DP; {engine} gets tensor parallelism only."
        )
    if engine in FLAGS and args.kv_cache_config.enable_block_reuse:
        head.append(f"# {engine} runs no tail of a reused prompt again: acceptance may drop.")
    if engine == "dynamo" and args.value(f"speculative_config.{NEWER}"):
        head.append(f"# No prompt is reused: TensorRT-LLM {DYNAMO_LLM} runs no tail of it again.")
    if engine != "dynamo":
        head = ["#!/usr/bin/env bash", *head, "set -euo pipefail"]
    return "\n".join([*head, *lines]) + "\n"


def _shared(engine: str, config: BuildConfig, args: LlmArgs) -> Iterator[tuple[str, object]]:
    experts = args.moe_expert_parallel_size or 1
    expert_ranks = None if experts == 1 else experts
    if expert_ranks is not None and engine == "vllm":
        expert_ranks = ""
    # with attention-DP each rank has its own max_batch_size
    batches = args.tensor_parallel_size if args.enable_attention_dp else 1
    values = (  # "": the option has none, None: there is no option
        config.target.revision,
        args.tensor_parallel_size,
        expert_ranks,
        args.max_seq_len,
        args.max_batch_size and args.max_batch_size * batches,
        None if args.kv_cache_config.enable_block_reuse else "",
    )
    for option, value in zip(FLAGS[engine].split(), values, strict=True):
        if value is not None:
            yield option, None if value == "" else value
    if args.trust_remote_code:
        yield "--trust-remote-code", None


def _vllm(context: Context, args: LlmArgs) -> list[str]:
    config = context.config
    pair = context.pair
    method = context.method
    drafter: dict[str, object] = {"method": method, "num_speculative_tokens": args.drafts}
    if config.drafter is not None:
        drafter["model"] = _name(config.drafter)
        if config.drafter.revision:
            drafter["revision"] = config.drafter.revision
    else:
        drafter["prompt_lookup_max"] = args.value("speculative_config.max_matching_ngram_size")
    options = [*_shared("vllm", config, args)]
    notes = ["# needs vllm>=0.33"]
    if method == "dflash":  # as in the drafters' published recipes
        # Gemma 4 needs a backend that always masks causally; drafts need one that does not
        gemma = pair.target.architecture.startswith("Gemma4")
        if gemma:
            drafter["attention_backend"] = "flash_attn"
        options.append(("--attention-backend", "triton_attn" if gemma else "flash_attn"))
        drafter |= VLLM_DFLASH | _vllm_verification(context, args, gemma)
        with suppress(NotKnown):
            limit = pair.drafter.number("max_position_embeddings")
            if (args.max_seq_len or 0) > limit:
                notes.append(
                    f"# The drafter knows {limit} positions. Where its RoPE is scaled (YaRN), "
                    "vLLM's V2 runner lowers max_model_len to them."
                )
    options.append(("--max-num-batched-tokens", 32768))
    if args.drafts:
        options.append(("--speculative-config", json.dumps(drafter)))
    return [*notes, *_command(["vllm", "serve", _name(config.target)], options)]


def _vllm_verification(context: Context, args: LlmArgs, gemma: bool) -> dict[str, object]:
    """Return how many drafts vLLM verifies: by the schedule, or for many users what pays."""
    schedule = args.speculative_config.draft_len_schedule
    if schedule:
        ranges = []
        first = 1
        for last, drafts in sorted((int(batch), drafts) for batch, drafts in schedule.items()):
            ranges.append([first, last, drafts])
            first = last + 1
        return {"num_speculative_tokens_per_batch_size": ranges}
    # FlashAttention 2 has no graphs for it; at few users it loses (vllm-project/vllm 52362)
    graphs = gemma or context.gpu.sm // 10 in (9, 10)
    pays = context.engine.objective != "latency"
    if context.config.speculation.policy == "adaptive" and pays and graphs:
        return {"enable_adaptive_verification": True}
    return {}


def _sglang(context: Context, args: LlmArgs) -> list[str]:
    config = context.config
    method = context.method
    options = [("--model-path", _name(config.target)), *_shared("sglang", config, args)]
    if args.drafts:
        text = f"--speculative-algorithm {SGLANG_DRAFTS[method]}"
        words = text.format(drafts=args.drafts, block=args.drafts + 1).split()
        options += zip(words[::2], words[1::2], strict=True)
    if args.enable_attention_dp and method != "ngram":
        options.append(("--attn-dp-size", args.tensor_parallel_size))
        if method == "dflash":
            options.append(("--enable-dp-lm-head", None))
    if context.drafter.architecture == DFLASH2:  # the only drafts that SGLang samples
        options.append(("--speculative-use-block-verification", None))
    if config.drafter is not None:
        options.append(("--speculative-draft-model-path", _name(config.drafter)))
        options += _revision_option("--speculative-draft-model-revision", config.drafter)
        # otherwise SGLang assumes that the drafter is quantized like the target
        if "quantization_config" in context.target.values:
            options.append(("--speculative-draft-model-quantization", "unquant"))
    return _command(["python", "-m", "sglang.launch_server"], options)


def _trtllm_serve(context: Context, args: LlmArgs) -> list[str]:
    config = context.config
    values = _llm_args(context, args)
    fetch: list[str] = []
    if config.drafter is not None:
        # SGLang reads a DFlash drafter's config.json from a directory only
        folder, fetch = _local(config.drafter, "drafter")
        values["speculative_config"]["speculative_model"] = folder
    environment = env_vars(context).items()
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    options = [*_revision_option("--revision", config.target), ("--config", "llm_args.yaml")]
    return [
        f"# needs tensorrt-llm=={args.version}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment)),
        *fetch,
        f"cat > llm_args.yaml <<'EOF'\n{text}EOF",
        *_command(["trtllm-serve", "serve", _name(config.target)], options),
    ]


def _dynamo(context: Context, args: LlmArgs) -> list[str]:
    """Return a ConfigMap with the arguments, and a DynamoGraphDeployment of one worker."""
    config = context.config
    llm_args = _llm_args(context, args)
    models: dict[str, Source] = {"target": config.target}
    if config.drafter is not None:
        models["drafter"] = config.drafter
        llm_args["speculative_config"]["speculative_model"] = "/models/drafter"
        if llm_args["speculative_config"].pop(NEWER, None):
            llm_args["kv_cache_config"]["enable_block_reuse"] = False
    for role, source in models.items():
        if source.hub is None:
            raise ConfigError(
                f"the {role} is a directory of this machine, which a cluster does not have",
                f"Give {role}.hub and {role}.revision",
            )
    text = render_template(
        "export/dynamo.yaml",
        name=resource_name(config.name),
        models=models,
        llm_args=yaml.safe_dump(llm_args, sort_keys=False, allow_unicode=True),
        environment=env_vars(context),
        gpus=args.tensor_parallel_size,
        dynamo=DYNAMO,
        version=DYNAMO_LLM,
    )
    return [text.rstrip("\n")]


def _llm_args(context: Context, args: LlmArgs) -> dict[str, Any]:
    """Return a build's arguments without the model's; PairError or ConfigError if invalid."""
    for kind in engine_kinds(context.pair, list(pair_findings(context.pair))):
        if kind["kind"] == "tensorrt_llm" and kind["reasons"]:
            raise PairError(kind["reasons"][0], "Export it for vllm or sglang")
    warnings_of(check_args(context, args), ConfigError)
    # on the command line, and what a build alone does without
    left_out = {"model", "revision", *({*TOKENIZER_ARGS} - context.engine.args.keys())}
    return {name: value for name, value in args.given.items() if name not in left_out}


def _local(source: Source, folder: str) -> tuple[str, list[str]]:
    """Return a directory, and commands that download it from the Hub if needed."""
    if source.hub is None:
        return str(source.path), []
    options: Options = [("--revision", source.revision), ("--local-dir", folder)]
    return folder, _command(["hf", "download", source.hub], options)


def _name(source: Source) -> str:
    return source.hub or str(source.path)


def _revision_option(option: str, source: Source) -> Options:
    return [(option, source.revision)] if source.revision else []


def _command(words: Sequence[str], options: Options) -> list[str]:
    """Return one command over several lines, each argument quoted for the shell."""
    lines = [shlex.join(words)]
    lines += [
        shlex.join([option] if value is None else [option, str(value)]) for option, value in options
    ]
    return [" \\\n  ".join(lines)]


ENGINES: dict[str, Callable[[Context, LlmArgs], list[str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm-serve": _trtllm_serve,
    "dynamo": _dynamo,
}
