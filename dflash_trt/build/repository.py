"""Write a Triton model repository: the models of `model_repository/`, filled in for one build."""

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from dflash_trt.build.llmapi import model_yaml
from dflash_trt.build.settings import Settings
from dflash_trt.checkpoints import DrafterSpec, Pair, TargetSpec, eos_token_ids
from dflash_trt.config import BuildConfig
from dflash_trt.errors import BuildError
from dflash_trt.tensorrt_llm import KIND
from dflash_trt.triton import INTERNAL, LLMAPI

TOKENIZER, ENGINES = "../../tokenizer", "../../engines"  # from a model's folder
PUBLIC = ("dflash", "dflash_infer")
MODELS = (*PUBLIC, *INTERNAL)


def write_repository(
    directory: Path,
    *,
    name: str,
    target: TargetSpec,
    drafter: DrafterSpec,
    config: BuildConfig,
    max_seq_len: int,
) -> None:
    """Writes `directory/model_repository`; the same arguments give the same bytes.

    The models find `directory/engines/{target,drafter}` and `directory/tokenizer` by relative
    paths, so a built directory can be moved.
    """
    settings = Settings(
        tokenizer=TOKENIZER,
        engines=ENGINES,
        mode=config.serving.mode,
        eos_token_ids=frozenset(target.eos_token_ids),
        slots=config.serving.slots,
        max_queue=config.serving.max_queue,
        max_seq_len=max_seq_len,
        prefill_chunk=config.serving.prefill_chunk,
        block_size=drafter.block_size,
        speculation=config.speculation,
        max_per_client=config.serving.max_per_client,
    )
    parameters = {
        "dflash": settings.to_parameters(),
        "verify": {"engine": f"{ENGINES}/target"},
        "draft": {"engine": f"{ENGINES}/drafter"},
    }
    for model in MODELS if config.serving.mode == "ensemble" else PUBLIC:
        _write_model(directory / "model_repository", model, name, parameters.get(model, {}))


def write_llm_repository(directory: Path, config: BuildConfig, pair: Pair) -> None:
    """Writes `directory/model_repository` over TensorRT-LLM; its `llm_args.yaml` is there already.

    The public models read it when they start. With `serving.style: llmapi`, TensorRT-LLM's own
    model instead.
    """
    repository = directory / "model_repository"
    if config.serving.style == "llmapi":
        _write_model(repository, LLMAPI, config.name, {})
        text = model_yaml(directory)
        (repository / LLMAPI / "1" / "model.yaml").write_text(text, encoding="utf-8")
        return
    target = pair.target
    ends = eos_token_ids(target.directory, target.values, target.number("vocab_size"))
    parameters = {
        "mode": KIND,
        "tokenizer": TOKENIZER,
        "engines": ENGINES,
        "eos_token_ids": " ".join(map(str, sorted(set(ends)))),
        "max_queue": str(config.serving.max_queue),
        "max_per_client": str(config.serving.max_per_client or ""),
    }
    for model in PUBLIC:
        _write_model(repository, model, config.name, parameters if model == "dflash" else {})


def templates() -> Path:
    """The repository as people read it: inside a wheel, at the top of a source checkout."""
    spec = importlib.util.find_spec("dflash_trt")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    for directory in (package / "model_repository", package.parent / "model_repository"):
        if (directory / "dflash" / "config.pbtxt").is_file():
            return directory
    raise BuildError(
        f"the Triton model templates are missing beside {package}", "Install dflash-trt again"
    )


def read_config(path: Path) -> Any:
    """A config.pbtxt as the protobuf message `inference.ModelConfig`."""
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def _write_model(repository: Path, model: str, name: str, parameters: Mapping[str, str]) -> None:
    """A model's template with its parameters; name: the build's."""
    template, directory = templates() / model, repository / model
    message = read_config(template / "config.pbtxt")
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    version = directory / "1"
    version.mkdir(parents=True)
    for file in (template / "1").iterdir():
        if file.is_file():
            shutil.copyfile(file, version / file.name)
    text = f"# {name}: written by `dflash-trt build`.\n" + text_format.MessageToString(message)
    (directory / "config.pbtxt").write_text(text, encoding="utf-8")
