"""Builds of kinds `onnxruntime` and `tensorrt`: both models as graphs, or plans of them."""

import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_trt.build.deployment import write_deployment
from dflash_trt.build.job import Input, Job, Written
from dflash_trt.build.repository import write_repository
from dflash_trt.chat import CHAT_CHECKS
from dflash_trt.checkpoints import (
    Drafter,
    DrafterSpec,
    Located,
    Report,
    Target,
    TargetSpec,
    card_files,
    check_pair,
    copy_tokenizer,
    drafter_shapes,
    for_length,
    load_drafter,
    load_target,
    load_tokenizer,
    target_shapes,
    tokenizer_files,
)
from dflash_trt.config import BuildConfig, OnnxRuntime, TensorRT
from dflash_trt.errors import ConfigError
from dflash_trt.graphs import check_even

if TYPE_CHECKING:
    from dflash_trt.engines.accuracy import Accuracy

DEFAULT_MAX_SEQ_LEN = 4096
BITS: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}


def prepare(
    config: BuildConfig, target_at: Located, drafter_at: Located | None, report: Report
) -> Job:
    """Check a pair, or a target alone, for our graphs.

    Raises ConfigError, CheckpointError or PairError.
    """
    target = load_target(target_at.directory)
    speculation, serving = config.speculation, config.serving
    drafter = load_drafter(drafter_at.directory) if drafter_at else None
    spec = drafter.spec if drafter else None
    asked = speculation.draft_tokens, serving.max_seq_len
    warnings = check_pair(target, drafter, *asked, CHAT_CHECKS)
    config, asked_for = _with_max_seq_len(config, target.spec, spec), bool(_precision(config))
    config = _with_precision(config, target)
    length = config.serving.max_seq_len or 0
    target, drafter = for_length(target, length), drafter and for_length(drafter, length)
    _check_even(config, target.spec, spec)
    return Job(
        config,
        Input(
            target_at,
            [*_files(target), *tokenizer_files(target.directory)],
            asdict(target.spec),
        ),
        Input(drafter_at, _files(drafter), asdict(drafter.spec) | _precision(config))
        if drafter_at and drafter
        else None,
        warnings,
        partial(
            _write,
            config=config,
            target=target,
            drafter=drafter,
            measure=asked_for,
            report=report,
        ),
    )


def _with_precision(config: BuildConfig, target: Target) -> BuildConfig:
    """Fill in the precision of both models for a quantized GGUF file, unless configured."""
    engine, bits = config.engine, target.weights.stored_bits
    if not isinstance(engine, OnnxRuntime) or engine.device == "cuda":
        return config
    if engine.quantize is not None or bits is None:
        return config
    changed: dict[str, Any] = {"engine": engine.model_copy(update={"quantize": f"int{bits}"})}
    if config.drafter is not None and config.drafter.quantize is None:
        changed["drafter"] = config.drafter.model_copy(update={"quantize": "int8"})
    return config.model_copy(update=changed)


def _precision(config: BuildConfig) -> dict[str, str]:
    """Return `quantize` of the drafter if it differs from the engine's."""
    asked = config.drafter.quantize if config.drafter else None
    return {"quantize": asked} if asked else {}


def _files(model: Target | Drafter) -> list[Path]:
    files = [model.directory / "config.json", *model.weights.files]
    return [*files, *card_files(model.directory)]


def _with_max_seq_len(
    config: BuildConfig, target: TargetSpec, drafter: DrafterSpec | None
) -> BuildConfig:
    """Fill in max_seq_len and other defaults; without a drafter rounds run in process."""
    longest, asked = target.max_position_embeddings, config.serving.max_seq_len
    known = min(longest, drafter.max_position_embeddings) if drafter else longest
    least = drafter.block_size if drafter else 1
    length = min(known, DEFAULT_MAX_SEQ_LEN) if asked is None else asked
    if not least < length <= longest:
        raise ConfigError(
            f"serving.max_seq_len is {length}, but this pair takes {least + 1} to "
            f"{longest} (block size to the longest text that the target knows)",
            "Correct it, or leave it out",
        )
    chosen: dict[str, Any] = {"max_seq_len": length}
    chosen |= {"prefix_cache": config.serving.prefix_cache_mib}
    chosen |= {} if drafter else {"mode": "in_process"}
    serving = config.serving.model_copy(update=chosen)
    return config.model_copy(update={"serving": serving})


def _check_even(config: BuildConfig, target: TargetSpec, drafter: DrafterSpec | None) -> None:
    if isinstance(config.engine, TensorRT):
        check_even(target, "target", config.engine.tensor_parallel_size)
        if drafter is not None:
            check_even(drafter, "drafter", config.engine.drafter_ranks)


def _write(
    directory: Path,
    *,
    config: BuildConfig,
    target: Target,
    drafter: Drafter | None,
    measure: bool,
    report: Report,
) -> Written:
    """Write engines and repository; measure: whether the drafter's own precision costs tau."""
    # imported here: it takes most of the time of a build without work
    from dflash_trt.build.engines import build_drafter, build_target  # noqa: PLC0415
    from dflash_trt.graphs import Storage  # noqa: PLC0415

    engine, serving, storage = config.engine, config.serving, Storage()
    threads: int | None = 1
    device: Literal["cpu", "cuda"] = "cpu"
    assert isinstance(engine, OnnxRuntime | TensorRT)
    if isinstance(engine, OnnxRuntime):
        threads, device = engine.threads, engine.device
        storage = Storage(engine.weights == "link", BITS.get(engine.quantize or "none"))
    else:
        from dflash_trt.engines.tensorrt.plan import build_plans, capabilities  # noqa: PLC0415

        capabilities(engine)  # fails now if something is not installed
    plans = engine if isinstance(engine, TensorRT) else None
    engines, ranks = directory / "engines", int(plans.tensor_parallel_size if plans else 1)
    common: dict[str, Any] = {"slots": serving.slots, "max_seq_len": serving.max_seq_len}
    common |= {"threads": threads, "storage": storage, "device": device}
    count = _Counter("building the target engine", len(target_shapes(target.spec)) * ranks, report)
    ours: dict[str, Any] = {**common, "progress": count, "ranks": ranks, "kind": engine.kind}
    spec = drafter.spec if drafter else None
    digests = build_target(target, spec, engines / "target", **ours)
    block_size, at = 1, engines / "drafter"
    step, of_drafter = "building the drafter engine", dict(common)
    if asked := _precision(config).get("quantize"):
        of_drafter["storage"] = Storage(storage.link, BITS.get(asked))
    if drafter is not None:
        block_size = drafter.spec.block_size
        ranks = plans.drafter_ranks if plans else 1
        # 2: shared tables
        count = _Counter(step, (len(drafter_shapes(drafter.spec)) + 2) * ranks, report)
        ours = {**of_drafter, "progress": count, "ranks": ranks}
        digests |= build_drafter(drafter, target, at, **ours)
    if plans:
        build_plans(engines, plans, serving.prefill_chunk, report)
    copy_tokenizer(target.directory, directory)
    write_repository(directory, config, target.spec, block_size)
    write_deployment(directory, config, int(plans.tensor_parallel_size if plans else 1))
    cost = None
    if drafter is not None and measure:
        # imported here: it loads the runtime
        from dflash_trt.build.quantization import measure_drafter  # noqa: PLC0415

        cost = measure_drafter(target, drafter, engines, directory / "measured", report)
    accuracy = storage.bits and _accuracy(engines, target, spec, common, report)
    return Written(digests, accuracy or None, cost)


def _accuracy(
    engines: Path,
    target: Target,
    drafter: DrafterSpec | None,
    common: dict[str, Any],
    report: Report,
) -> "Accuracy":
    """Compare with an unquantized engine, built temporarily beside it."""
    from dflash_trt.build.engines import build_target  # noqa: PLC0415
    from dflash_trt.engines.accuracy import TEXTS, TOKENS, compare, original_logits  # noqa: PLC0415
    from dflash_trt.graphs import COPIED  # noqa: PLC0415

    count = _Counter("measuring the accuracy", len(target_shapes(target.spec)), report)
    original = engines / "original"
    tokens = min(TOKENS, common["max_seq_len"])
    common = {**common, "max_seq_len": tokens, "progress": count}
    build_target(target, drafter, original, **{**common, "storage": COPIED})
    tokenizer = load_tokenizer(target.directory)
    texts = [tokenizer.encode(text).ids[:tokens] or [0] for text in TEXTS]
    found = compare(engines / "target", original_logits(original, texts), texts)
    shutil.rmtree(original, ignore_errors=True)
    return found


class _Counter:
    """Converts an engine's tensor names ("a|b": fused tensors a and b) to counts."""

    def __init__(self, step: str, total: int, report: Report) -> None:
        self._done, self._total, self._report = 0, total, partial(report, step)
        self._report(0, total)

    def __call__(self, name: str) -> None:
        self._done = min(self._done + name.count("|") + 1, self._total)
        self._report(self._done, self._total)
