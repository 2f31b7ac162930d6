"""Serve a built directory until told to stop, or for as long as a block of Python lasts."""

import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from rich.console import Console

from dflash_trt import tensorrt_llm
from dflash_trt.build import Depth
from dflash_trt.build.signing import check_signed
from dflash_trt.machine import usable_cores
from dflash_trt.serving.front import capacity
from dflash_trt.serving.log import Form, to_line
from dflash_trt.serving.ports import LOOPBACK, Ports, free_ports, reach
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.cores import follows_cores, free_cores
from dflash_trt.serving.server.gateway import Gateway
from dflash_trt.serving.server.process import Server, find_repository
from dflash_trt.serving.server.proof import memory_of
from dflash_trt.serving.server.swap import Swaps
from dflash_trt.tensorrt_llm import check_host

FILES = 65536  # open at once, at most, where the machine allows so many
DRAIN_POLL = 0.1  # seconds between two looks at what is still running


def serve(
    directory: Path,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    security: Security | None = None,
    openai_port: int | None = None,
    drain_seconds: float = 20.0,
    check: Depth | None = None,
    log_file: Path | None = None,
    log_format: Form = "text",
    key: Path | None = None,
    page: bool = True,
) -> int:
    """Serves a built directory until SIGINT, SIGTERM or SIGHUP; returns the exit code 0.

    openai_port: where the OpenAI front answers; None: nowhere. drain_seconds: how long running
    requests may go on when it is told to stop. check: see `check_build`. log_file: what its
    processes say is added to it; None: to one in a new directory. log_format: of its lines and of
    those on the standard output. key: who has to have signed it, and each build it is swapped for.
    page: whether the OpenAI front has one.
    Raises `ServerError` when a port is taken or a model does not load at first. A second signal
    ends it without waiting for running requests.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)

    def say(line: str) -> None:
        if not server.log.is_output():
            server.log.add("INFO", "serve", line)
        if log_format == "json":
            tell(to_line(log_format, "INFO", "serve", line, {}))
        else:
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            tell(f"{now} {line}")

    def tell(line: str) -> None:
        with suppress(OSError):  # nobody may read it any more
            console.print(line)

    build = find_repository(directory).parent
    bundle = build / "engines" / tensorrt_llm.KIND
    if bundle.is_dir():
        check_host(tensorrt_llm.read_info(bundle))
    check_signed(build, check, key)
    cores = free_cores() if follows_cores(build) else usable_cores()
    holds = [capacity(build, cores)]
    security = security or Security()
    ports = Ports(http_port, grpc_port, metrics_port)
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(most, FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, FILES), most))
    with ExitStack() as stack:
        server, gateway = prepare(
            stack,
            directory,
            ports,
            security,
            openai_port,
            log_file,
            log_format,
            keep_log=True,
            page=page,
            cores=cores,
        )
        swaps = Swaps(server, gateway, say, check, key)
        stack.enter_context(_told_to_stop(swaps))
        stack.enter_context(swaps)
        # the gateway ends before Triton, which would wait for its open streams
        stack.callback(gateway.stop)
        gateway.start(server.log)
        if server.security.exposed and server.security.old_server_exposed:
            say("warning: other machines may reach a server with known security holes")
        say(f"starting Triton (log: {server.log.path}) ...")
        if server.wait_ready(swaps.stop, say):
            gateway.tell("ready")
            taken = sum(map(memory_of, [server.process.pid, *server.stubs()]))
            holds.append(f"Triton and its models take {taken / 1e6:.0f} MB of memory now")
            swaps.start(http_port)  # who reads that it serves may call at once
            how = _how_to_call(ports, security, openai_port, holds, page)
            (say if log_format == "json" else tell)(how)
            swaps.wait()
            gateway.tell(f"drain {drain_seconds}")
            _drain(swaps.server, drain_seconds, say)
        say("stopping ...")
    return 0


def _drain(server: Server, seconds: float, say: Callable[[str], None]) -> None:
    """Refuses new requests, lets running ones end; those left after the time get UNAVAILABLE."""
    deadline = time.monotonic() + seconds
    state = server.control.ask("drain")
    if state is not None and state.open:
        say(f"waiting up to {seconds:.0f} s for {state.open} running requests ...")
    while state is not None and state.open and time.monotonic() < deadline:
        time.sleep(DRAIN_POLL)
        if server.ended():
            return
        state = server.control.ask("status")
    server.control.ask("end")


@contextmanager
def running_server(directory: Path, security: Security | None = None) -> Iterator[Ports]:
    """A ready server on free ports, for as long as the block lasts; nobody supervises it."""
    ports = free_ports()
    with ExitStack() as stack:
        server, gateway = prepare(stack, directory, ports, security or Security())
        stack.enter_context(server)
        stack.callback(gateway.stop)
        gateway.start(server.log)
        server.wait_ready()
        gateway.tell("ready")
        yield ports


def prepare(
    stack: ExitStack,
    directory: Path,
    ports: Ports,
    security: Security,
    openai: int | None = None,
    log: Path | None = None,
    form: Form = "text",
    *,
    keep_log: bool = False,
    page: bool = True,
    cores: int | None = None,
) -> tuple[Server, Gateway]:
    """Both, not yet started; the gateway holds its ports until the stack is closed."""
    inside = free_ports()  # Triton's own
    gateway = Gateway(directory, ports, inside, security, openai, page=page)
    stack.callback(gateway.stop)
    server = Server(directory, inside, security, log, form, keep_log=keep_log, cores=cores)
    return server, gateway


@contextmanager
def _told_to_stop(swaps: Swaps) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP ends it; the second kills the servers."""

    def handle(_number: int, _frame: object) -> None:
        if swaps.stop.is_set():
            with suppress(AttributeError):  # it was not started yet
                swaps.server.process.kill()
        swaps.stop.set()

    told = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        told.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in told}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _how_to_call(
    ports: Ports, security: Security, openai_port: int | None, holds: Sequence[str], page: bool
) -> str:
    http = f"http://{reach(security.http_host)}:{ports.http}"
    grpc = f"{reach(security.host)}:{ports.grpc}"
    key = " -H 'inference-key: KEY'" if security.inference_key else ""
    openai, generate = list[str](), list[str]()

    def others(host: str) -> str:
        return ", and this machine's other addresses" if reach(host) != host else ""

    if openai_port is not None:
        address = f"http://{LOOPBACK}:{openai_port}"
        openai = [f"  OpenAI   {address}/v1", *([f"  page     {address}/"] if page else [])]
    if not (security.tls or key):
        generate = [f"  dflash-trt generate --url {grpc} 'def main():'"]
    lines = [
        "ready",
        "  holds    " + "\n           ".join(holds),
        f"  HTTP     {http}{others(security.http_host)}",
        f"  gRPC     {grpc}{' (TLS)' if security.tls else ''}{others(security.host)}",
        f"  metrics  http://{reach(security.host)}:{ports.metrics}/metrics{others(security.host)}",
        *openai,
        "try",
        *generate,
        f"  curl -N{key} {http}/v2/models/dflash/generate_stream \\",
        '    -d \'{"text_input": "def main():", "max_tokens": 64, "stream": true}\'',
        "Ctrl-C stops it",
    ]
    return "\n".join(lines)
