"""The same deployment for other engines: what `dflash-trt export` prints.

A shell script; for NVIDIA Dynamo a DynamoGraphDeployment, after examples/backends/trtllm/deploy of
ai-dynamo/dynamo (2ac51dda).

Ranks, lengths and batch are those that `build` would choose, so that like is compared with like;
prefixes are kept by all where `serving.prefix_cache` asks for it, else by none. The options are
published in vLLM's `vllm/config/speculative.py` (002e77c1), SGLang's
`sglang/srt/server_args.py` (0.5.20) and TensorRT-LLM's
`tests/unittest/api_stability/references/trtllm_serve_cli.yaml` (029e223d).
"""

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from dflash_trt.build.deployment import render, resource_name
from dflash_trt.build.tensorrt_llm import summarize, warnings_of
from dflash_trt.checkpoints import (
    Pair,
    Report,
    drafter_layout,
    engine_kinds,
    locate,
    pair_findings,
)
from dflash_trt.config import BLOCKS, DRAFTERLESS, BuildConfig, Method, Source, TensorRTLLM
from dflash_trt.errors import ConfigError, PairError
from dflash_trt.roofline import Machine, machine
from dflash_trt.tensorrt_llm import LlmArgs, check_args, choose_args, env_vars

DYNAMO = "1.3.1"
Options = Sequence[tuple[str, object]]  # None: the option alone
MATCH = "speculative_config.max_matching_ngram_size"


def export(config: BuildConfig, engine: str, report: Report) -> str:
    """Write the script; of sources on the Hub only JSON files are fetched.

    Raises ConfigError, CheckpointError, or PairError for what the engine does not run.
    """
    made_for = _machine(config)
    target = locate(config.target, "target", report, weights=False)
    drafter, pinned = None, config.drafter
    if pinned is not None:
        drafter = locate(pinned, "drafter", report, weights=False)
        pinned = pinned.pinned(drafter.commit)
    changed = {"target": config.target.pinned(target.commit), "drafter": pinned}
    config = config.model_copy(update=changed)
    pair = summarize(config, target, drafter)
    args = choose_args(config, pair, made_for)
    if args.tensor_parallel_size > made_for.gpus:
        raise ConfigError(
            f"one instance takes {args.tensor_parallel_size} GPUs, a node of {made_for.name} has "
            f"{made_for.gpus}; scripts for other engines are for one node",
            f"Set engine.gpus to at most {made_for.gpus}",
        )
    if engine != "vllm" and (layout := drafter_layout(pair)).fix:
        raise PairError(f"{engine} does not read drafters in the speculators format", layout.fix)
    lines = ENGINES[engine](config, pair, args)
    head = [
        f"# {config.name} on {engine}, method {config.speculation.method}, by `dflash-trt export`; "
        "whoever wrote it has not run it.",
        *_caveats(engine, args),
    ]
    if engine != "dynamo":
        head = ["#!/usr/bin/env bash", *head, "set -euo pipefail"]
    return "\n".join([*head, *lines]) + "\n"


def _machine(config: BuildConfig) -> Machine:
    if not isinstance(config.engine, TensorRTLLM):
        raise ConfigError(
            f"engine.kind is {config.engine.kind}, which says nothing of GPUs",
            "Use engine: {kind: tensorrt_llm}",
        )
    return machine(config.engine.hardware)


def _caveats(engine: str, args: LlmArgs) -> list[str]:
    if engine in ("trtllm-serve", "dynamo"):
        return []
    found = []
    if args.enable_attention_dp:
        found.append(
            f"# Built for TensorRT-LLM it has attention-DP; {engine} gets tensor parallelism only."
        )
    if args.kv_cache_config.enable_block_reuse:
        found.append(f"# {engine} runs no tail of a reused prompt again: acceptance may drop.")
    return found


def _vllm(config: BuildConfig, pair: Pair, args: LlmArgs) -> list[str]:
    method, drafts = config.speculation.method, {"num_speculative_tokens": args.drafts}
    blocks = method in BLOCKS
    drafter: dict[str, object] = {"method": "dflash" if blocks else method, **drafts}
    if config.drafter is not None:
        drafter["model"] = _name(config.drafter)
        drafter |= {"revision": config.drafter.revision} if config.drafter.revision else {}
    else:
        drafter["prompt_lookup_max"] = args.value(MATCH)
    # Gemma 4 needs a backend that always masks causally; drafts need one that does not
    gemma = pair.target.architecture.startswith("Gemma4")
    if gemma and blocks:
        drafter["attention_backend"] = "flash_attn"
    backend = "triton_attn" if gemma else "flash_attn"
    options: Options = [
        *_revision("--revision", config.target),
        ("--tensor-parallel-size", args.tensor_parallel_size),
        *_experts(args, "--enable-expert-parallel", None),
        ("--max-model-len", args.max_seq_len),
        ("--max-num-seqs", _sequences(args)),
        *_without_reuse(args, "--no-enable-prefix-caching"),
        # as in the drafters' published recipes
        *([("--attention-backend", backend)] if blocks else []),
        ("--max-num-batched-tokens", 32768),
        *([("--speculative-config", json.dumps(drafter))] if args.drafts else []),
    ]
    return [
        "# Take a release from after July 2026: older ones accept hardly any draft on Blackwell.",
        *_command(["vllm", "serve", _name(config.target)], options),
    ]


def _sglang(config: BuildConfig, pair: Pair, args: LlmArgs) -> list[str]:
    quantised = "quantization_config" in pair.target.values
    options: Options = [
        ("--model-path", _name(config.target)),
        *_revision("--revision", config.target),
        ("--tp-size", args.tensor_parallel_size),
        *_experts(args, "--ep-size", args.moe_expert_parallel_size),
        ("--context-length", args.max_seq_len),
        ("--max-running-requests", _sequences(args)),
        *_without_reuse(args, "--disable-radix-cache"),
        *_sglang_drafts(config.speculation.method, args.drafts),
    ]
    if config.drafter is not None:
        options = [
            *options,
            ("--speculative-draft-model-path", _name(config.drafter)),
            *_revision("--speculative-draft-model-revision", config.drafter),
            # otherwise SGLang takes the drafter to be quantized as the target is
            *([("--speculative-draft-model-quantization", "unquant")] if quantised else []),
        ]
    return _command(["python", "-m", "sglang.launch_server"], options)


def _sglang_drafts(method: Method, drafts: int) -> Options:
    """Its counts include the anchor."""
    named = {"draft_model": "STANDALONE", **dict.fromkeys(BLOCKS, "DFLASH")}
    algorithm = ("--speculative-algorithm", named.get(method, method.upper()))
    tokens = ("--speculative-num-draft-tokens", drafts + 1)
    if method in ("eagle3", "draft_model"):
        chain: Options = [("--speculative-num-steps", drafts), ("--speculative-eagle-topk", 1)]
        return [algorithm, *chain, tokens]
    if method in BLOCKS:
        return [algorithm, ("--speculative-dflash-block-size", drafts + 1)]
    return [algorithm, tokens] if drafts else []


def _trtllm_serve(config: BuildConfig, pair: Pair, args: LlmArgs) -> list[str]:
    values = _llm_args(config, pair, args)
    fetch: list[str] = []
    if config.drafter is not None:
        # a Hub id is not resolved where a DFlash drafter's config.json is read
        values["speculative_config"]["speculative_model"], fetch = _local(config.drafter, "drafter")
    environment = env_vars(config, pair, _machine(config))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    options: Options = [
        *_revision("--revision", config.target),
        ("--config", "llm_args.yaml"),
    ]
    return [
        f"# needs tensorrt-llm=={args.version}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())),
        *fetch,
        f"cat > llm_args.yaml <<'EOF'\n{text}EOF",
        *_command(["trtllm-serve", "serve", _name(config.target)], options),
    ]


def _dynamo(config: BuildConfig, pair: Pair, args: LlmArgs) -> list[str]:
    """A ConfigMap with the arguments, and a DynamoGraphDeployment of one worker."""
    models: dict[str, Source] = {"target": config.target}
    llm_args = _llm_args(config, pair, args)
    if config.drafter is not None:
        models["drafter"] = config.drafter
        llm_args["speculative_config"]["speculative_model"] = "/models/drafter"
    if local := [role for role, source in models.items() if source.hub is None]:
        raise ConfigError(
            f"the {local[0]} is a directory of this machine, which a cluster does not have",
            f"Give {local[0]}.hub and {local[0]}.revision",
        )
    text = render(
        "export/dynamo.yaml",
        name=resource_name(config.name),
        models=models,
        llm_args=yaml.safe_dump(llm_args, sort_keys=False, allow_unicode=True),
        environment=env_vars(config, pair, _machine(config)),
        gpus=args.tensor_parallel_size,
        version=args.version,
        dynamo=DYNAMO,
        image=f"registry.example.com/tensorrtllm-runtime:{DYNAMO}-trtllm{args.version}",
    )
    return [text.rstrip("\n")]


def _llm_args(config: BuildConfig, pair: Pair, args: LlmArgs) -> dict[str, Any]:
    """The arguments of a build, without the model's; PairError or ConfigError for what fails."""
    checks = list(pair_findings(pair))
    for kind in engine_kinds(pair, checks):
        if kind["kind"] == "tensorrt_llm" and kind["reasons"]:
            raise PairError(kind["reasons"][0], "Export it for vllm or sglang")
    warnings_of(check_args(config, pair, _machine(config), args), ConfigError)
    values = args.to_dict()
    for given in ("model", "revision"):  # on the command line
        values.pop(given, None)
    return values


def _transformers(config: BuildConfig, pair: Pair, args: LlmArgs) -> list[str]:
    """One text, of the prompt that the script is given: transformers' own server drafts nothing."""
    method = config.speculation.method
    if method == "dflash" and config.drafter is not None:
        (target, fetch), (drafter, more) = (
            _local(config.target, "target"),
            _local(config.drafter, "drafter"),
        )
        options: Options = [("--model", target), ("--draft", drafter)]
        options = [*options, ("--block-size", args.drafts + 1)]
        command = _command(["dflash", "generate", "transformers"], options)
        return ["# needs dflash and transformers", *fetch, *more, f'{command[0]} "$@"']
    if method not in (*DRAFTERLESS, "draft_model"):
        raise PairError(f"transformers has no {method}", "Export it for vllm or sglang")
    revision = f", revision={config.target.revision!r}" if config.target.revision else ""
    lookup, assistant = "", ""
    if method == "draft_model" and config.drafter is not None:
        pinned = f", revision={config.drafter.revision!r}" if config.drafter.revision else ""
        assistant = f"""name = {_name(config.drafter)!r}
assistant = AutoModelForCausalLM.from_pretrained(name{pinned}, dtype="auto", device_map="auto")
assistant.generation_config.num_assistant_tokens = {args.drafts}
assistant.generation_config.num_assistant_tokens_schedule = "constant"
"""
        lookup = ", assistant_model=assistant"
    elif args.drafts:
        lookup = f", prompt_lookup_num_tokens={args.drafts}"
        lookup += f", max_matching_ngram_size={args.value(MATCH)}"
    code = f"""import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
name = {_name(config.target)!r}
tokenizer = AutoTokenizer.from_pretrained(name{revision})
model = AutoModelForCausalLM.from_pretrained(name{revision}, dtype="auto", device_map="auto")
{assistant}messages = [{{"role": "user", "content": sys.argv[1]}}]
chat = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt")
inputs = tokenizer.apply_chat_template(messages, **chat).to(model.device)
output = model.generate(**inputs, max_new_tokens=2048, do_sample=False{lookup})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""
    return ["# needs transformers and accelerate", f"""python - "$1" <<'EOF'\n{code}EOF"""]


def _local(source: Source, folder: str) -> tuple[str, list[str]]:
    """A directory, and what fetches it where it is on the Hub."""
    if source.hub is None:
        return str(source.path), []
    options: Options = [("--revision", source.revision), ("--local-dir", folder)]
    return folder, _command(["hf", "download", source.hub], options)


def _sequences(args: LlmArgs) -> int | None:
    """Sequences of all ranks: with attention-DP each rank has its own max_batch_size."""
    ranks = args.tensor_parallel_size if args.enable_attention_dp else 1
    return args.max_batch_size * ranks if args.max_batch_size else None


def _name(source: Source) -> str:
    return source.hub or str(source.path)


def _revision(option: str, source: Source) -> Options:
    return [(option, source.revision)] if source.revision else []


def _without_reuse(args: LlmArgs, option: str) -> Options:
    return [] if args.kv_cache_config.enable_block_reuse else [(option, None)]


def _experts(args: LlmArgs, option: str, value: object) -> Options:
    return [(option, value)] if (args.moe_expert_parallel_size or 1) > 1 else []


def _command(words: Sequence[str], options: Options) -> list[str]:
    """One command over several lines, each argument quoted for the shell."""
    lines = [shlex.join(words)]
    lines += [
        shlex.join([option] if value is None else [option, str(value)]) for option, value in options
    ]
    return [" \\\n  ".join(lines)]


ENGINES: dict[str, Callable[[BuildConfig, Pair, LlmArgs], list[str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm-serve": _trtllm_serve,
    "transformers": _transformers,
    "dynamo": _dynamo,
}
