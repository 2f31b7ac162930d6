"""What the application knows of the build that it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.builder import read_manifest, speculation_of
from dflash_trt.chat import ChatModel, load_chat_template
from dflash_trt.checkpoints import Spell, load_tokenizer, sampling_defaults, speller
from dflash_trt.serving.client import MODEL, AsyncClient
from dflash_trt.serving.http import ApplicationSettings
from dflash_trt.serving.http.build import ServedBuild
from dflash_trt.serving.http.responses import ResponseStore
from dflash_trt.serving.model.llm import limits
from dflash_trt.tensorrt_llm import KIND, read_llm_args
from dflash_trt.wire import max_draft_tokens

UNTOLD = [
    "TensorRT-LLM tells how many rounds an answer took and how many draft tokens were accepted, "
    "not what was proposed or who wrote a token; tokens are shared out evenly among the rounds.",
    "TensorRT-LLM drafts for all requests or none: the same answer by plain decoding is not here.",
]


@dataclass(frozen=True)
class Served:
    models: tuple[str, ...]  # the names a request may give
    max_model_len: int  # tokens of a prompt and its answer
    spell: Spell
    max_draft_tokens: int  # per round
    client: AsyncClient
    client_key: str  # see `keys.client_parameters`
    chat_model: ChatModel
    responses: ResponseStore
    build: ServedBuild
    root_path: str = ""
    page: dict[str, Any] = field(default_factory=dict)  # facts for the page
    # fields whose default is the model's, not the API's
    sampling: Mapping[str, float] = field(default_factory=dict)


def read_served(settings: ApplicationSettings, client: AsyncClient) -> Served:
    """Read the build. Raises BuildError when the directory is no build."""
    manifest = read_manifest(settings.directory)
    config = manifest["config"]
    by_llm = config["engine"]["kind"] == KIND
    serving = read_llm_args(settings.directory / "engines" / KIND) if by_llm else config["serving"]
    directory = settings.directory / "tokenizer"
    recommended = config["serving"].get("sampling_defaults") == "model"
    tokenizer = load_tokenizer(directory)
    if by_llm:
        drafts = (serving.get("speculative_config") or {}).get("max_draft_len") or 0
    else:
        block = manifest.get("drafter", {}).get("block_size", 1)
        drafts = max_draft_tokens(speculation_of(manifest), block, tensorrt_llm=False)
    template = load_chat_template(directory)
    chat_model = ChatModel(tokenizer, template)
    page = {
        "model": manifest["name"],
        "engine": config["engine"]["kind"],
        "slots": int(limits(serving)["slots"]) if by_llm else serving["slots"],
        "max_model_len": serving["max_seq_len"],
        "max_draft_tokens": drafts,
        "chat": template is not None,
        "tools": template is not None and chat_model.dialect.format is not None,
        "schema": not by_llm or bool(serving.get("guided_decoding_backend")),
        "plain": not (by_llm and drafts),  # whether `drafting: false` is possible
        "untold": UNTOLD if by_llm else [],
    }
    return Served(
        models=tuple(dict.fromkeys((manifest["name"], MODEL))),
        max_model_len=serving["max_seq_len"],
        spell=speller(tokenizer),
        chat_model=chat_model,
        responses=ResponseStore(settings.response_store * 2**20),
        max_draft_tokens=drafts,
        client=client,
        client_key=settings.security.client_key,
        build=ServedBuild(settings.directory, settings.since),
        root_path=settings.root_path,
        page=page,
        sampling=sampling_defaults(directory)[0] if recommended else {},
    )
