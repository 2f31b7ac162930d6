"""Deployment files of a build: a Dockerfile, Kubernetes manifests, and KServe's.
```
deploy/   Dockerfile, kserve.yaml; of kind tensorrt_llm start.sh, probe.sh, of a target on the Hub
  fetch.sh
deploy/kubernetes/   Deployment and Service, HorizontalPodAutoscaler
```

Each file says how it is used, and what was not tried. Several nodes get no manifests.
"""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import dflash_trt
from dflash_trt.build.repository import CHANGES
from dflash_trt.config import BuildConfig, OnnxRuntime, TensorRT, TensorRTLLM
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
LONGEST_NAME = 45  # of Kubernetes' 63; the controller appends to it
GIB = 1 << 30
THREADS = 2  # initial CPU request of an engine in a cluster, if not configured


def write_deployment(directory: Path, config: BuildConfig, ranks: int) -> None:
    """Write `directory/deploy`, reproducibly; ranks: GPUs of one instance, on any nodes."""
    engine, name = config.engine, resource_name(config.name)
    values: dict[str, Any] = {"build": config.name, "name": name}
    if isinstance(engine, TensorRTLLM):
        values |= _bundle(config, engine, ranks)
    else:
        by_cuda = isinstance(engine, OnnxRuntime) and engine.device != "cpu"
        if by_cuda or ranks > 1:  # one Triton cannot serve plans of several GPUs
            return
        values |= _graphs(directory / "engines", config, engine)
    values["image"] = f"{name}:{values['image_tag']}"
    kind = "tensorrt_llm/" if values["llm"] else "serve/"
    for template in ENVIRONMENT.list_templates():
        file = template.removeprefix(kind)
        left_out = "export/", "serve/", "tensorrt_llm/", *([] if values["hub"] else ["fetch.sh"])
        if file.startswith(left_out) or (values["nodes"] > 1 and file.endswith(".yaml")):
            continue
        at = directory / "deploy" / file
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(render_template(template, **values), encoding="utf-8")
        if file.endswith(".sh"):
            at.chmod(0o755)


def _bundle(config: BuildConfig, engine: TensorRTLLM, ranks: int) -> dict[str, Any]:
    per_node = min(ranks, engine.machine.gpus)
    return {
        "llm": True,
        "image_tag": engine.version,
        "version": engine.version,
        "hub": engine.checkpoints == "hub",
        "gpus": per_node,
        "cpus": per_node * 2,
        "limited": False,
        "memory": per_node * 32,
        "nodes": -(-ranks // per_node),
        "capabilities": [divmod(engine.machine.gpu.sm, 10)],
        "closed": ",".join(CHANGES),
        # upstream's image pins versions; its own engine needs neither of these
        "requirements": [
            name
            for each in _server_requirements("")
            if (name := re.split("[<>=]", each)[0]) not in ("llguidance", "onnxruntime")
        ],
    }


def _graphs(engines: Path, config: BuildConfig, engine: OnnxRuntime | TensorRT) -> dict[str, Any]:
    infos = read_infos(engines)
    weights = size_of(engines)
    caches = sum(info.token_bytes * info.slots * info.cache_len for info in infos)
    caches += sum(info.states.slot_bytes * info.slots for info in infos if info.states)
    kept = config.serving.prefix_cache_mib << 20
    # weights have 16 bits and are computed in 32; the rest are processes
    wide = 2 if isinstance(engine, OnnxRuntime) and engine.quantize in (None, "none") else 1
    plan = infos[0].plan
    return {
        "llm": False,
        "image_tag": dflash_trt.__version__,
        "hub": False,
        "gpus": 0 if plan is None else 1,
        "cpus": (infos[0].threads or THREADS) + 1,
        "limited": infos[0].threads is None,  # otherwise engines would use all cores of the node
        "memory": -(-(wide * weights + caches + kept) // GIB) + 2,
        "nodes": 1,
        "capabilities": [] if plan is None else [x.split(".") for x in plan.compute_capabilities],
        "requirements": _server_requirements(plan.library if plan else ""),
    }


def _server_requirements(plan_library: str) -> list[str]:
    extras = "server", {"tensorrt_rtx": "rtx"}.get(plan_library, plan_library)
    markers = "", *(f"extra == '{extra}'" for extra in extras)
    left_out = {"jsonschema", "onnx", "onnx-ir", "nvidia-pytriton"}  # build; Triton's own image
    found = []
    for each in metadata.requires("dflash-trt") or ():
        requirement, _, marker = each.partition("; ")
        project = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if marker in markers and project not in left_out:
            found.append(requirement)
    return sorted(found)


def render_template(template: str, **values: Any) -> str:
    return ENVIRONMENT.get_template(template).render(values)


def resource_name(name: str) -> str:
    """Return a build's name for Kubernetes: lowercase letters, digits, hyphens; a letter first."""
    name = re.sub(r"[._-]+", "-", name)[:LONGEST_NAME].strip("-")
    return name if name[0].isalpha() else f"dflash-{name}"
