"""A server as the tests see it: `dflash-trt serve` as a process, and whether rounds go on."""

import functools
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.serving.log import Log
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.processes import die_with_parent
from dflash_trt.serving.security import Security
from dflash_trt.serving.supervisor import application
from dflash_trt.serving.supervisor.application import Application
from tests.support.request_tools import metric

WAIT = 60.0
ROOT = Path(__file__).parents[2]


def serve_command(directory: Path, ports: Ports, *options: str) -> list[str]:
    run = "import sys; from dflash_trt.cli.main import main; sys.exit(main())"
    numbers = [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}"]
    return [sys.executable, "-c", run, "serve", str(directory), *numbers, *options]


@contextmanager
def started(
    command: Sequence[object], **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that is ready and its log, and kill it at the end; options: of `Popen`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, command)], **{"cwd": ROOT, **pipes, **options})
    try:
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:  # ends with the output when the process does
            line = process.stdout.readline()
            assert line, said + (process.stderr.read() if process.stderr else "")
            said += line
        yield process, said
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serving(
    directory: Path, ports: Ports, *options: str, files: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `dflash-trt serve`, as `started`; files: its limit of descriptors."""
    limited = ["sh", "-c", f'ulimit -Sn {files} && exec "$@"', "sh"] if files else []
    with started([*limited, *serve_command(directory, ports, *options)]) as found:
        yield found


@contextmanager
def openai_front(
    directory: Path,
    triton: Ports,
    security: Security | None = None,
    port: int = 0,
    *,
    log: Path | None = None,
    files: int | None = None,
    root_path: str = "",
) -> Iterator[str]:
    """Run an application over a running Triton; yield its address.

    port: by default a free one; files: its limit of descriptors.
    """
    port = port or free_ports().http
    build = OpenedBuild(directory, "none")
    running = Application(build, port, triton, security or Security(), root_path=root_path)
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        if files is not None:
            limit = functools.partial(_limit_files, files)
            patch.setattr(application, "die_with_parent", limit)
        try:
            running.start(Log(log or Path(file.name)))
            running.tell("ready")
            yield f"http://127.0.0.1:{port}"
        finally:
            running.stop()


def _limit_files(files: int) -> None:
    """Limit the descriptors of this process, a child that begins."""
    die_with_parent()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def serve_ports() -> Ports:
    ports = free_ports()
    return replace(ports, metrics=ports.http)


def metrics(server: Ports) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=WAIT) as page:
        return page.read().decode()


def rounds(server: Ports) -> int:
    """Return the rounds that the server has run, by its metrics.

    TensorRT-LLM reports a sequence's rounds when it ends.
    """
    text = metrics(server)
    if found := re.search(r'nv_inference_exec_count{model="draft_verify",version="1"} (\d+)', text):
        return int(found[1])
    found = re.search(r"^dflash_acceptance_length_count (\d+)$", text, re.M)
    assert found is not None
    return int(found[1])


def cancelled(server: Ports) -> int:
    """Return the cancelled requests in the metrics, which are sent once a second."""
    ended = metric(server.metrics, "dflash_requests_total")
    return int(sum(count for labels, count in ended.items() if '"cancelled"' in labels))


def assert_cancelled(server: Ports, count: int) -> None:
    deadline = time.monotonic() + 4
    while cancelled(server) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cancelled(server) == count


def assert_goes_idle(server: Ports) -> None:
    counted = 'model="draft_verify"' in metrics(server)
    for _ in range(20):
        before = rounds(server)
        time.sleep(0.25 if counted else 1.25)  # the front's own metrics are sent once a second
        if rounds(server) == before if counted else "_requests_running 0" in metrics(server):
            return
    raise AssertionError("the server still decodes for a client that has gone")
