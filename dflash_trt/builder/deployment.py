"""Deployment files of a build: a Dockerfile, Kubernetes manifests, and KServe's.
```
requirements.txt   packages of the image
deploy/   Dockerfile, kserve.yaml; of a target on the Hub fetch.sh
deploy/kubernetes/   Deployment, Service, claim; NetworkPolicy, PodDisruptionBudget
deploy/kubernetes/scaling/   HorizontalPodAutoscaler, PodMonitor
```

Each file says how it is used, and what was not tried. Several nodes get no manifests.
`write_digest` puts the build's digest where zeros stand for it.
"""

import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dflash_trt.builder.manifest import NO_DIGEST, SHORT
from dflash_trt.builder.package_lock import read_package_lock
from dflash_trt.builder.program import program
from dflash_trt.config import COPIED, BuildConfig, GraphEngine, TensorRTLLM
from dflash_trt.engines import read_infos
from dflash_trt.files import size_of

TEMPLATES = Path(__file__).with_name("templates")
ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
PYTHON_IMAGE = "python:3.12.12-slim-trixie"
# of the month of the PyTorch image that TensorRT-LLM's is made of
TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:26.08-py3"
TENSORRT_LLM_IMAGE = "nvcr.io/nvidia/tensorrt-llm/release"
FRONTEND_IMAGE = "docker/dockerfile:1"  # that reads the Dockerfile
# Triton's Python backend of 2024 reads arrays of NumPy 2 wrong, a newer one was not tried
NUMPY = "1.26.4"
REQUIREMENTS = "requirements.txt"
KEY_FOLDER = "/run/secrets/dflash"
CACHE = "/home/dflash/.cache"
LONGEST_NAME = 45  # of Kubernetes' 63; the controller appends to it
GIB = 1 << 30
THREADS = 2  # initial CPU request of an engine in a cluster, if not configured


def write_deployment(directory: Path, config: BuildConfig, ranks: int = 1) -> None:
    """Write `directory/deploy`, reproducibly; ranks: GPUs of one instance, on any nodes."""
    engine, name = config.engine, resource_name(config.name)
    short = NO_DIGEST[:SHORT]
    values: dict[str, Any] = {
        "build": config.name,
        "name": name,
        "image": f"{name}:{short}",
        "short": short,
        "digest": NO_DIGEST,
        "commit": program().commit,
        "locked": config.package_lock is not None,
        "python_image": PYTHON_IMAGE,
        "triton_image": TRITON_IMAGE,
        "key_folder": KEY_FOLDER,
        "key_file": f"{KEY_FOLDER}/key",
        "cache": CACHE,
    }
    if isinstance(engine, TensorRTLLM):
        values |= _bundle(config, engine, ranks)
    else:
        values |= _graphs(directory / "engines", config, engine)
    kind = "tensorrt_llm/" if values["llm"] else "serve/"
    left_out = ["export/", "parts/", "serve/", "tensorrt_llm/"]
    if not values["hub"]:
        left_out.append("fetch.sh")
    for template in ENVIRONMENT.list_templates():
        file = template.removeprefix(kind)
        of_one_node = file.endswith(".yaml")
        if file.startswith(tuple(left_out)) or (of_one_node and values["nodes"] > 1):
            continue
        path = directory / "deploy" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_template(template, **values), encoding="utf-8")
        if file.endswith(".sh"):
            path.chmod(0o755)
    lines = "\n".join(image_requirements(config).values())
    (directory / REQUIREMENTS).write_text(lines + "\n", encoding="utf-8")


def base_images(config: BuildConfig) -> list[str]:
    """Return the images that a build's Dockerfile names."""
    engine = config.engine
    if isinstance(engine, TensorRTLLM):
        return [FRONTEND_IMAGE, f"{TENSORRT_LLM_IMAGE}:{engine.version}", TRITON_IMAGE]
    return [FRONTEND_IMAGE, PYTHON_IMAGE, TRITON_IMAGE]


def _bundle(config: BuildConfig, engine: TensorRTLLM, ranks: int) -> dict[str, Any]:
    per_node = min(ranks, engine.machine.gpus)
    return {
        "llm": True,
        "version": engine.version,
        "tensorrt_llm_image": f"{TENSORRT_LLM_IMAGE}:{engine.version}",
        "hub": engine.checkpoints == "hub",
        "gpus": per_node,
        "cpus": per_node * 2,
        "limited": False,
        "memory": per_node * 32,
        "nodes": -(-ranks // per_node),
        "capabilities": [divmod(engine.machine.gpu.sm, 10)],
        "requirements": [re.split("[<>=]", text)[0] for text in server_requirements(config)],
    }


def _graphs(engines: Path, config: BuildConfig, engine: GraphEngine) -> dict[str, Any]:
    infos = read_infos(engines)
    gpus = config.engine_kind.gpus
    facts = config.engine_kind.graphs
    assert facts is not None
    weights = size_of(engines)
    caches = sum(info.token_bytes * info.slots * info.cache_len for info in infos)
    caches += sum(info.states.slot_bytes * info.slots for info in infos if info.states)
    prefix_cache = config.serving.prefix_cache_mib << 20
    # on a CPU weights have 16 bits and are computed in 32; the rest are processes
    wide = 2 if gpus == 0 and engine.options.storage == COPIED else 1
    plan = infos[0].plan
    return {
        "llm": False,
        "hub": False,
        "gpus": gpus,
        "compiles": facts.compiles_kernels,
        "cpus": (infos[0].threads or THREADS) + 1,
        "limited": infos[0].threads is None,  # otherwise engines would use all cores of the node
        "memory": -(-(wide * weights + caches + prefix_cache) // GIB) + 2,
        "nodes": 1,
        "capabilities": [] if plan is None else [x.split(".") for x in plan.compute_capabilities],
    }


def server_requirements(config: BuildConfig) -> list[str]:
    """Return what a server of the build imports, as this package requires it."""
    engine, kind = config.engine, config.engine_kind
    build_only = {"jsonschema", "onnx", "onnx-ir"} - kind.used
    left_out = {*build_only, *kind.unused, "nvidia-pytriton"}  # Triton's own image has it
    extras = ["server"]
    if isinstance(engine, GraphEngine):
        extras.extend(engine.extras)
    more = []
    markers = "", *(f"extra == '{extra}'" for extra in extras)
    for text in metadata.requires("dflash-trt") or ():
        requirement, _, marker = text.partition("; ")
        if marker in markers and Requirement(requirement).name not in left_out:
            more.append(requirement)
    return sorted(more)


def pinned_requirements(config: BuildConfig) -> dict[str, str]:
    """Return pip's requirement of each package of an image, by name.

    Packages that are installed here, and what they need, are pinned to the version here. The index
    is not asked: a build needs no network, and repeats.
    """
    lines: dict[str, str] = {}
    left = [Requirement(text) for text in server_requirements(config)]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in lines:
            continue
        version = NUMPY if name == "numpy" else _installed_version(name)
        lines[name] = str(requirement) if version is None else f"{name}=={version}"
        if version is not None:
            left += _needed(name, requirement.extras)
    return dict(sorted(lines.items()))


def image_requirements(config: BuildConfig) -> dict[str, str]:
    """Return the line of each package in the image's requirements, by name.

    Of a lock where the config has one; then pip takes only files of these hashes.
    """
    pins = pinned_requirements(config)
    if config.package_lock is None:
        return pins
    locked = read_package_lock(config.package_lock, pins)
    return {name: package.line for name, package in locked.items()}


def _installed_version(name: str) -> str | None:
    try:
        # a build for a CPU is a local version, "+cpu", which no index has
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _needed(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield what an installed package needs with these extras."""
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            requirement.marker = None
            yield requirement


def render_template(template: str, **values: Any) -> str:
    return ENVIRONMENT.get_template(template).render(values)


def resource_name(name: str) -> str:
    """Return a build's name for Kubernetes: lowercase letters, digits, hyphens; a letter first."""
    name = re.sub(r"[._-]+", "-", name)[:LONGEST_NAME].strip("-")
    return name if name[0].isalpha() else f"dflash-{name}"
