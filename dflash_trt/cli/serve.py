"""`dflash-trt serve`: Triton and the HTTP application on a built directory."""
# ruff: noqa: PLC0415

from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_trt.cli.output import Built, Check

Port = typer.Option(min=1, max=65535)


def serve(
    repo: Built,
    http_port: Annotated[int, Port] = 8000,
    grpc_port: Annotated[int, Port] = 8001,
    host: Annotated[str, typer.Option(help="IPv4 address to listen on.")] = "127.0.0.1",
    grpc_cert: Annotated[Path | None, typer.Option(help="PEM: TLS on gRPC.")] = None,
    grpc_key: Annotated[Path | None, typer.Option(help="PEM: the certificate's key.")] = None,
    grpc_ca: Annotated[
        Path | None, typer.Option(help="PEM: only clients with a certificate of this CA.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key that requests must send.")
    ] = None,
    insecure_old_server: Annotated[
        bool,
        typer.Option(
            "--insecure-old-server",
            help="Let a tritonserver with known security holes listen beyond this machine.",
        ),
    ] = False,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Serve a chat page at /.")] = True,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin of web pages that may call: https://a.example, or * for any. Repeatable.",
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for running requests after SIGTERM.")
    ] = 20.0,
    check: Check = None,
    require_signature: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="PEM: serve only what this public key's owner signed."),
    ] = None,
    log_file: Annotated[
        Path | None, typer.Option(help="Append the logs of Triton, its models and the application.")
    ] = None,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="Format of our log lines and output."),
    ] = "text",
) -> None:
    """Serve a built directory until stopped, and restart what dies.

    OpenAI's API, Triton's HTTP, the metrics and a chat page are on the HTTP port; gRPC has its own
    port.
    """
    from dflash_trt.serving.server import Options, read_security
    from dflash_trt.serving.server import serve as run

    security = read_security(
        host,
        grpc_cert=grpc_cert,
        grpc_key=grpc_key,
        grpc_ca=grpc_ca,
        key_file=key_file,
        old_server_exposed=insecure_old_server,
        allow_origin=allow_origin or (),
    )
    options = Options(
        http_port=http_port,
        grpc_port=grpc_port,
        security=security,
        drain_seconds=drain_seconds,
        check=check,
        signer=require_signature,
        page=page,
        log_file=log_file,
        log_format=log_format,
    )
    raise typer.Exit(run(repo, options))


def update_drafter(
    build: Annotated[Path, typer.Argument(help="Directory that `build` wrote: the same target.")],
    http_port: Annotated[int, Port] = 8000,
    least_acceptance: Annotated[
        float,
        typer.Option(min=0.0, help="Required fraction of the running drafter's tokens per round."),
    ] = 0.8,
) -> None:
    """Replace the drafter of a running `serve` by another build's, losing no request."""
    from dflash_trt.serving.server import update_drafter as run

    for line in run(http_port, build, least_acceptance):
        print(line, flush=True)
