"""Write what deploys a `tensorrt_llm` build: a Dockerfile and Kubernetes manifests.

```
deploy/   Dockerfile, start.sh, probe.sh; fetch.sh where the target is on the Hub; leader.sh and
          worker.sh over several nodes
deploy/kubernetes/   a kustomize base: Deployment or LeaderWorkerSet, Service, PodMonitor, ...
```

Each file says how it is used, and what was not tried.
"""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.roofline import Machine
from dflash_trt.triton import CHANGES

TEMPLATES = Path(__file__).with_name("templates")
EVERYWHERE = ("Dockerfile", "probe.sh", "start.sh")
MANIFESTS = ("cache", "disruptionbudget", "kustomization", "podmonitor", "service")
LONGEST_NAME = 45  # of what Kubernetes takes 63; the controller appends to it


def write_deployment(directory: Path, config: BuildConfig, machine: Machine, ranks: int) -> None:
    """Write `directory/deploy`; the same arguments give the same bytes.

    ranks: GPUs that one instance takes, over nodes where it is more than one has.
    Nothing is written with `engine.checkpoints: link`: links into this machine's checkpoints do
    not travel.
    """
    engine = config.engine
    assert isinstance(engine, TensorRTLLM)
    if engine.checkpoints == "link":
        return
    per_node = min(ranks, machine.gpus)
    name = resource_name(config.name)
    upstream = config.serving.style == "llmapi"  # TensorRT-LLM's own Triton model
    values = {
        "build": config.name,
        "name": name,
        "image": f"{name}:{engine.version}",
        "image_name": name,
        "image_tag": engine.version,
        "version": engine.version,
        "hub": engine.checkpoints == "hub",
        "gpus": per_node,
        "nodes": -(-ranks // per_node),
        "major": machine.gpu.sm // 10,
        "minor": machine.gpu.sm % 10,
        "closed": ",".join(CHANGES),
        "model": "tensorrt_llm" if upstream else "dflash",
        "max_tokens": "sampling_param_max_tokens" if upstream else "max_tokens",
    }
    several = values["nodes"] != 1
    files = [*EVERYWHERE, *(("leader.sh", "worker.sh") if several else ())]
    files += ["fetch.sh"] if values["hub"] else []
    workload = "leaderworkerset" if several else "deployment"
    files += [f"kubernetes/{kind}.yaml" for kind in (*MANIFESTS, workload)]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for file in files:
        at = directory / "deploy" / file
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(environment.get_template(file).render(values), encoding="utf-8")
        if file.endswith(".sh"):
            at.chmod(0o755)


def resource_name(name: str) -> str:
    """A build's name as Kubernetes takes it: small letters, digits and hyphens, a letter first."""
    name = re.sub(r"[._-]+", "-", name)[:LONGEST_NAME].strip("-")
    return name if name[0].isalpha() else f"dflash-{name}"
