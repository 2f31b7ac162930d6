"""Serve a built directory until stopped, or during a block of Python."""

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from dflash_trt import tensorrt_llm
from dflash_trt.builder import Depth
from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.serving.log import LogFormat
from dflash_trt.serving.ports import Ports, free_ports, reachable_address
from dflash_trt.serving.security import KEY_HEADER, Security
from dflash_trt.serving.supervisor.application import Application
from dflash_trt.serving.supervisor.clients import ApplicationClient
from dflash_trt.serving.supervisor.process import Say, Server, find_repository
from dflash_trt.serving.supervisor.ranks import end_job_on_failure, is_launched
from dflash_trt.serving.supervisor.supervisor import Supervised, supervise
from dflash_trt.serving.supervisor.update_drafter import Updates
from dflash_trt.serving.supervisor.upkeep import KeyFile, Upkeep

FILES = 65536  # limit of open files, if the machine allows it
END_SECONDS = 8.0  # from the end of the drain until what is left is killed
APPLICATION_END = 4.0  # of these, for the application
DRAIN_POLL = 0.1  # seconds between two looks at running requests


@dataclass(frozen=True)
class Options:
    http_port: int = 8000
    grpc_port: int = 8001
    security: Security = field(default_factory=Security)
    root_path: str = ""  # see `ApplicationSettings`
    response_store: int = 64  # MiB, see `ApplicationSettings`
    drain_delay: float = 0.0  # seconds after a stop in which only readiness is false
    drain_seconds: float = 20.0  # for running requests after that
    check: Depth | None = None  # how much of the build to verify first, see `check_build`
    signer: Path | None = None  # the public key that must have signed the build
    log_file: Path | None = None  # appended to; None: in a new directory
    log_format: LogFormat = "text"


@end_job_on_failure()
def serve(directory: Path, options: Options) -> int:
    """Serve a built directory until SIGINT, SIGTERM or SIGHUP; return the exit code 0.

    Raises ServerError if a port is taken or a model does not load at first. A second signal ends it
    without waiting for running requests. It prints: see `lines.detach_outputs`.
    """

    def say(line: str) -> None:
        server.log.add(line)
        if not server.log.is_standard_output():
            print(f"{datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')} {line}")

    bundle = find_repository(directory).parent / "engines" / tensorrt_llm.KIND
    if bundle.is_dir():
        tensorrt_llm.check_host(tensorrt_llm.read_info(bundle), launched=is_launched())
    soft, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard_limit, FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, FILES), hard_limit))
    stop = threading.Event()
    with ExitStack() as stack:
        build = stack.enter_context(closing(OpenedBuild(directory, options.check, options.signer)))
        server, application = set_up(stack, build, options, keep_log=True)
        stack.enter_context(_until_signaled(stop, server, application))
        stack.enter_context(server)
        stack.callback(application.stop)
        application.start(server.log, stop)
        if options.security.exposed and options.security.old_server_exposed:
            say("warning: other machines may reach a server with known security holes")
        say(f"starting Triton (log: {server.log.path}) ...")
        client = ApplicationClient(options.http_port, options.security)
        stack.callback(client.close)
        keys = KeyFile(options.security.key_file, options.security.keys, say)
        upkeep = Upkeep(application, keys, server.log, say)
        if server.wait_ready(stop, say, client.probe, upkeep.look):
            application.tell("ready")
            updates = Updates(
                *(server, options.http_port, say, options.check, options.signer),
                application.tell_drafter,
            )
            stack.callback(updates.close)
            if server.log.form == "json" and server.log.is_standard_output():
                say("ready")
            else:
                print(_how_to_call(options))
            supervise(Supervised(server, application, client, upkeep, say), stop)  # until it is set
            _end_requests(server, application, options, say)
        say("stopping ...")
        deadline = time.monotonic() + END_SECONDS
        application.stop(APPLICATION_END)  # first: Triton would wait for its open streams
        server.stop(deadline - time.monotonic())
    return 0


def _end_requests(server: Server, application: Application, options: Options, say: Say) -> None:
    """Answer everything for the delay, unready; then refuse new requests and wait for the rest."""
    _leave(server, application, options.drain_delay, say)
    application.begin_drain(options.drain_seconds)
    _drain(server, options.drain_seconds, say)


def _leave(server: Server, application: Application, seconds: float, say: Say) -> None:
    """Answer everything for `seconds`, while readiness turns proxies away."""
    if not seconds:
        return
    deadline = time.monotonic() + seconds
    application.tell("leaving")
    say(f"no longer ready; requests are answered for {seconds:g} s more ...")
    server.triton.end_readiness()
    while time.monotonic() < deadline and server.ended() is None:
        time.sleep(DRAIN_POLL)


def _drain(server: Server, seconds: float, say: Say) -> None:
    """Refuse new requests and wait for running ones, at most `seconds`; the rest get UNAVAILABLE.

    Does not wait for a request handler that does not answer.
    """
    deadline = time.monotonic() + seconds
    state = server.send_command("drain")
    if state is not None and state.open:
        say(f"waiting up to {seconds:.0f} s for {state.open} running requests ...")
    while state is not None and state.open and time.monotonic() < deadline:
        time.sleep(DRAIN_POLL)
        if server.ended():
            return
        state = server.send_command("status")
    server.send_command("end")


@contextmanager
def running_server(directory: Path, security: Security | None = None) -> Iterator[Ports]:
    """Yield the ports of a ready server during the block; it is not supervised."""
    ports = free_ports()
    options = Options(ports.http, ports.grpc, security or Security())
    with ExitStack() as stack:
        build = stack.enter_context(closing(OpenedBuild(directory, "none")))
        server, application = set_up(stack, build, options)
        stack.enter_context(server)
        stack.callback(application.stop)
        application.start(server.log)
        server.wait_ready()
        application.tell("ready")
        yield replace(ports, metrics=ports.http)


def set_up(
    stack: ExitStack, build: OpenedBuild, options: Options, *, keep_log: bool = False
) -> tuple[Server, Application]:
    """Return both, not started; the application holds its port until the stack closes."""
    security = options.security
    triton = replace(free_ports(), grpc=options.grpc_port)
    application = Application(
        *(build, options.http_port, triton, security), options.response_store, options.root_path
    )
    stack.callback(application.stop)
    server = Server(
        build, triton, security, options.log_file, options.log_format, keep_log=keep_log
    )
    return server, application


@contextmanager
def _until_signaled(
    stop: threading.Event, server: Server, application: Application
) -> Iterator[None]:
    def handle(_number: int, _frame: object) -> None:
        if stop.is_set():
            with suppress(AttributeError):  # not started yet
                server.process.kill()
            application.kill()
        stop.set()

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signals.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _how_to_call(options: Options) -> str:
    security = options.security
    http = f"{security.http_url}:{options.http_port}"
    address = reachable_address(security.host)
    grpc = f"{security.grpc_host}:{options.grpc_port}"
    key = f" -H '{KEY_HEADER}: KEY'" if security.keys else ""
    tls = " (TLS)" if security.tls else ""
    others = ", and this machine's other addresses" if address != security.host else ""
    lines = [
        "ready",
        f"  OpenAI   {http}/v1{'' if tls else others}",
        f"  Triton   {http}/v2, gRPC {grpc}{tls}{others}",
        f"  metrics  {http}/metrics",
        f"  page     {http}/",
        "try",
        *([] if security.tls or key else [f"  dflash-trt generate --url {grpc} 'def main():'"]),
        f"  curl -N{key} {http}/v2/models/dflash/generate_stream \\",
        '    -d \'{"text_input": "def main():", "max_tokens": 64, "stream": true}\'',
        "Ctrl-C stops it",
    ]
    return "\n".join(lines)
