"""`dflash-trt serve`: Triton on a built directory."""
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
    metrics_port: Annotated[int, Port] = 8002,
    host: Annotated[str, typer.Option(help="IPv4 address to listen on.")] = "127.0.0.1",
    grpc_cert: Annotated[Path | None, typer.Option(help="PEM: TLS on gRPC.")] = None,
    grpc_key: Annotated[Path | None, typer.Option(help="PEM: the certificate's key.")] = None,
    grpc_ca: Annotated[
        Path | None, typer.Option(help="PEM: only clients with a certificate of this CA.")
    ] = None,
    inference_key_file: Annotated[
        Path | None, typer.Option(help="Holds the key that requests must send.")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="Holds the key that management calls must send.")
    ] = None,
    insecure_old_server: Annotated[
        bool,
        typer.Option(
            "--insecure-old-server",
            help="Let a tritonserver with known security holes listen beyond this machine.",
        ),
    ] = False,
    openai_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Answer OpenAI's API here too.")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="A chat page at / of the OpenAI port.")
    ] = True,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long running requests may go on after SIGTERM.")
    ] = 20.0,
    check: Check = None,
    require_signature: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="PEM: serve only what this public key's owner signed."),
    ] = None,
    log_file: Annotated[
        Path | None, typer.Option(help="Append the logs of Triton, its models and the fronts.")
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of log lines, and of what `serve` prints.")
    ] = "text",
) -> None:
    """Run Triton on a built directory until it is told to stop; restart what dies."""
    from dflash_trt.serving.server import read_security
    from dflash_trt.serving.server import serve as run

    security = read_security(
        host,
        grpc_cert=grpc_cert,
        grpc_key=grpc_key,
        grpc_ca=grpc_ca,
        inference_key_file=inference_key_file,
        admin_key_file=admin_key_file,
        old_server_exposed=insecure_old_server,
    )
    raise typer.Exit(
        run(
            repo,
            http_port,
            grpc_port,
            metrics_port,
            security,
            openai_port,
            drain_seconds,
            check,
            log_file,
            log_format,
            require_signature,
            page,
        )
    )


def swap(
    build: Annotated[
        Path | None, typer.Argument(help="Directory that `build` wrote; none with --back.")
    ] = None,
    back: Annotated[
        bool, typer.Option("--back", help="The build that was served before this one.")
    ] = False,
    http_port: Annotated[int, Port] = 8000,
    least_acceptance: Annotated[
        float,
        typer.Option(min=0.0, help="Share of the running build's tokens a round that is enough."),
    ] = 0.8,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long the old build's requests may go on.")
    ] = 600.0,
) -> None:
    """Have a running `serve` serve another build, without a request lost."""
    from dflash_trt.errors import RequestError
    from dflash_trt.serving.server import call

    if (build is None) != back:
        raise RequestError("one build is to be served next", "Give either BUILD or --back")
    path = None if build is None else str(build.resolve())
    what = {"build": path, "least": least_acceptance, "drain": drain_seconds}
    for line in call(http_port, what):
        print(line, flush=True)
