"""How tritonserver is started: the binary, the directories and the environment it needs.

The binary of the `nvidia-pytriton` wheel runs in place, but its Python backend needs this Python's
stub beside the backend library: a runtime directory of symbolic links provides that.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.errors import ServerError
from dflash_trt.serving import tracing
from dflash_trt.serving.keys import CLIENT, CLIENT_KEY
from dflash_trt.serving.ports import LOOPBACK, Ports, in_url
from dflash_trt.serving.security import Security, server_version
from dflash_trt.serving.tracing import CONTEXT, HEADER

TRACES_FROM = (2, 58)  # older ones unlock a mutex twice: triton-inference-server/server#8144
# Triton sends a client away that pings more often than every 5 minutes while it waits for an answer
PINGS = "--grpc-http2-max-ping-strikes=0"
# each of many threads' heaps keeps what a drafter's update under load needed: 40 MB in ten minutes
FEW_HEAPS = {"MALLOC_ARENA_MAX": "2"}
EXIT_TIMEOUT = 5  # seconds tritonserver waits for running requests when it stops


@dataclass(frozen=True)
class Binary:
    path: Path
    arguments: tuple[str, ...] = ()  # that it needs beyond its container's defaults
    libraries: tuple[Path, ...] = ()


def find_binary(runtime: Path) -> Binary:
    """Return the wheel's tritonserver, or the one on PATH; `runtime`: a directory for links."""
    package = importlib.util.find_spec("pytriton")  # found, not imported
    if package is not None and package.submodule_search_locations:
        root = Path(package.submodule_search_locations[0]) / "tritonserver"
        if (root / "bin" / "tritonserver").is_file():
            return _wheel_binary(root, runtime)
    program = shutil.which("tritonserver")
    if program is None:
        raise ServerError(
            "there is no tritonserver: neither the nvidia-pytriton wheel nor one on PATH",
            "Run: pip install 'dflash-trt[server]'",
        )
    return Binary(Path(program))


def _wheel_binary(root: Path, runtime: Path) -> Binary:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServerError(
            f"the nvidia-pytriton wheel has no Triton Python backend for Python {version}",
            "Use Python 3.11 to 3.13",
        )
    backend = runtime / "backends" / "python"
    backend.mkdir(parents=True)
    library = root / "backends" / "python"
    for file in (library / "libtriton_python.so", library / "triton_python_backend_utils.py", stub):
        (backend / file.name).symlink_to(file)
    (runtime / "caches").mkdir()
    return Binary(
        root / "bin" / "tritonserver",
        (
            f"--backend-directory={runtime / 'backends'}",
            f"--cache-directory={runtime / 'caches'}",
            "--allow-gpu-metrics=false",
        ),
        (root.parent.parent / "nvidia_pytriton.libs",),
    )


def command(
    binary: Binary, repository: Path, ports: Ports, shm_prefix: str, security: Security
) -> list[str]:
    return [
        str(binary.path),
        f"--model-repository={repository}",
        *binary.arguments,
        "--model-control-mode=explicit",  # `end_readiness` loads a model
        "--load-model=*",
        f"--http-address={LOOPBACK}",
        f"--grpc-address={in_url(security.host)}",
        f"--metrics-address={LOOPBACK}",
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        f"--exit-timeout-secs={EXIT_TIMEOUT}",
        PINGS,
        f"--grpc-header-forward-pattern={'|'.join((HEADER, *CONTEXT))}",
        f"--http-header-forward-pattern={'|'.join((HEADER, CLIENT, CLIENT_KEY, *CONTEXT))}",
        "--disable-auto-complete-config",  # it would import every Python model twice
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        *security.arguments(),
        *_arguments_for_triton_spans(binary.path),
    ]


def _arguments_for_triton_spans(binary: Path) -> list[str]:
    url = tracing.traces_url()
    if url is None or server_version(binary) < TRACES_FROM:
        return []
    service = os.environ.get("OTEL_SERVICE_NAME") or tracing.SERVICE
    exporter = (f"opentelemetry,url={url}", f"opentelemetry,resource=service.name={service}")
    settings = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", *exporter)
    return [f"--trace-config={setting}" for setting in settings]


def environment(binary: Binary, surrounding: Mapping[str, str] = os.environ) -> dict[str, str]:
    first = {
        # the embedded interpreter takes its prefix from the first `python3` on PATH
        "PATH": [Path(sys.prefix) / "bin"],
        # the directory of libpython3.x.so
        "LD_LIBRARY_PATH": [*binary.libraries, sysconfig.get_config_var("LIBDIR")],
    }
    return {**surrounding} | {
        name: os.pathsep.join(str(path) for path in (*paths, surrounding.get(name)) if path)
        for name, paths in first.items()
    }


def working_directory(runtime: Path) -> Path:
    """Make a directory with links to packages that the models import from elsewhere.

    The embedded interpreter ignores PYTHONPATH, but its path starts with the working directory: it
    holds this `dflash_trt`, then the contents of PYTHONPATH's directories.
    """
    package = importlib.util.find_spec("dflash_trt")
    assert package is not None
    assert package.submodule_search_locations
    directory = runtime / "python"
    directory.mkdir()
    (directory / "dflash_trt").symlink_to(package.submodule_search_locations[0])
    for path in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        for entry in Path(path).resolve().glob("*"):
            link = directory / entry.name
            if not link.is_symlink():
                link.symlink_to(entry)
    return directory
