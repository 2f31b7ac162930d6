"""Writer of a Triton model repository: the models of `model_repository/`, filled in for a build."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from dflash_trt.chat import turn_end_ids
from dflash_trt.checkpoints import Pair, TargetSpec, eos_token_ids, sampling_defaults
from dflash_trt.config import BuildConfig
from dflash_trt.tensorrt_llm import KIND
from dflash_trt.wire import Settings, as_parameters

# from a model's folder
TOKENIZER = "../../tokenizer"
ENGINES = "../../engines"
PUBLIC = ("dflash", "dflash_infer")
INTERNAL = ("draft_verify", "verify", "draft")  # only for the request handler
MODELS = (*PUBLIC, *INTERNAL)
TEMPLATES = Path(__file__).parents[1] / "model_repository"  # in a checkout a link to it


def write_repository(
    directory: Path, config: BuildConfig, target: TargetSpec, block_size: int
) -> None:
    """Write `directory/model_repository`; max_seq_len must be filled in, the tokenizer be there."""
    serving = config.serving
    assert serving.max_seq_len is not None
    settings = Settings(
        tokenizer=TOKENIZER,
        engines=ENGINES,
        mode=serving.mode,
        eos_token_ids=text_ends(directory, target.eos_token_ids, target.vocab_size),
        slots=serving.slots,
        max_queue=serving.max_queue,
        max_seq_len=serving.max_seq_len,
        prefill_chunk=serving.prefill_chunk,
        block_size=block_size,
        speculation=config.speculation,
        max_per_client=serving.max_per_client,
        prefix_cache=serving.prefix_cache_mib,
        sampling=request_defaults(config, directory),
    )
    parameters = {
        "dflash": settings.to_parameters(),
        "verify": {"engine": f"{ENGINES}/target"},
        "draft": {"engine": f"{ENGINES}/drafter"},
    }
    for model in MODELS if serving.mode == "ensemble" else PUBLIC:
        _write_model(directory / "model_repository", model, config.name, parameters.get(model, {}))


def write_llm_repository(directory: Path, config: BuildConfig, pair: Pair) -> None:
    """Write `directory/model_repository`; its public models read `llm_args.yaml` as they start."""
    target = pair.target
    vocab_size = target.number("vocab_size")
    ends = text_ends(directory, eos_token_ids(target.directory, vocab_size), vocab_size)
    parameters = {
        "mode": KIND,
        "tokenizer": TOKENIZER,
        "engines": ENGINES,
        "eos_token_ids": sorted(ends),
        "max_queue": config.serving.max_queue,
        "max_per_client": config.serving.max_per_client,
        "sampling": request_defaults(config, directory),
    }
    for model in PUBLIC:
        chosen = as_parameters(parameters) if model == "dflash" else {}
        _write_model(directory / "model_repository", model, config.name, chosen)


def text_ends(directory: Path, stated: Iterable[int], vocab_size: int) -> frozenset[int]:
    """Return the tokens that end a text: those stated, and the chat template's end of a turn."""
    return frozenset(stated) | frozenset(turn_end_ids(directory / "tokenizer", vocab_size))


def request_defaults(config: BuildConfig, directory: Path) -> dict[str, int | float]:
    if config.serving.sampling_defaults != "model":
        return {}
    defaults, _ = sampling_defaults(directory / "tokenizer")
    return defaults


def read_config(path: Path) -> Any:
    """Read a config.pbtxt as the protobuf message `inference.ModelConfig`."""
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def _write_model(repository: Path, model: str, build: str, parameters: Mapping[str, str]) -> None:
    template = TEMPLATES / model
    directory = repository / model
    message = read_config(template / "config.pbtxt")
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    version = directory / "1"
    version.mkdir(parents=True)
    for file in (template / "1").iterdir():
        if file.is_file():
            shutil.copyfile(file, version / file.name)
    # an empty file, so that nobody can add compiled code that Python would run
    (version / "__pycache__").touch()
    text = f"# {build}: written by `dflash-trt build`.\n" + text_format.MessageToString(message)
    (directory / "config.pbtxt").write_text(text, encoding="utf-8")
