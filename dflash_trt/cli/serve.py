"""`dflash-trt serve`, `update-drafter` and `generate`: a server of a built directory."""
# ruff: noqa: PLC0415

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_trt.cli.output import Built, Check, Json
from dflash_trt.errors import RequestError

Port = typer.Option(min=1, max=65535)


def serve(
    repo: Built,
    http_port: Annotated[int, Port] = 8000,
    grpc_port: Annotated[int, Port] = 8001,
    host: Annotated[
        str, typer.Option(help="IP address to listen on; :: for all, IPv4 too.")
    ] = "127.0.0.1",
    grpc_cert: Annotated[Path | None, typer.Option(help="PEM: TLS on gRPC.")] = None,
    grpc_key: Annotated[Path | None, typer.Option(help="PEM: the certificate's key.")] = None,
    http_cert: Annotated[Path | None, typer.Option(help="PEM: TLS on the HTTP port.")] = None,
    http_key: Annotated[Path | None, typer.Option(help="PEM: the certificate's key.")] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with keys, one a line, of which requests must send one."),
    ] = None,
    insecure_old_server: Annotated[
        bool,
        typer.Option(
            "--insecure-old-server",
            help="Let a tritonserver with known security holes listen beyond this machine.",
        ),
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin of web pages that may call: https://a.example, or * for any. Repeatable.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Further name by which clients call a server on loopback without a key. "
            "Repeatable.",
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option(metavar="PATH", help="Path of the server behind an ingress, as /llm.")
    ] = "",
    response_store: Annotated[
        int, typer.Option(min=0, help="MiB of answers of /v1/responses to keep for an hour.")
    ] = 64,
    drain_delay: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds after SIGTERM in which it is not ready, but answers everything."
        ),
    ] = 0.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for running requests after that.")
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
        Literal["text", "json"], typer.Option(help="Lines of text, or an object of JSON each.")
    ] = "text",
) -> None:
    """Serve a built directory until stopped, and restart what dies.

    OpenAI's API, Triton's HTTP, the metrics and a chat page are on the HTTP port; gRPC has its own
    port.
    """
    from dflash_trt.builder import read_manifest
    from dflash_trt.builder.identity import made_here
    from dflash_trt.builder.program import describe, program
    from dflash_trt.serving.lines import detach_outputs
    from dflash_trt.serving.supervisor import Options, read_root_path, read_security
    from dflash_trt.serving.supervisor import serve as run

    detach_outputs()
    manifest = read_manifest(repo)
    if not made_here(manifest):
        made_by = describe(manifest["dflash_trt"])
        print(f"warning: {made_by} made this build; this is {program()}", file=sys.stderr)
    security = read_security(
        host,
        grpc_cert=grpc_cert,
        grpc_key=grpc_key,
        http_cert=http_cert,
        http_key=http_key,
        key_file=key_file,
        old_server_exposed=insecure_old_server,
        allow_origin=allow_origin or (),
        allow_host=allow_host or (),
    )
    options = Options(
        http_port=http_port,
        grpc_port=grpc_port,
        security=security,
        root_path=read_root_path(root_path),
        response_store=response_store,
        drain_delay=drain_delay,
        drain_seconds=drain_seconds,
        check=check,
        signer=require_signature,
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
    json_: Json = False,
) -> None:
    """Replace the drafter of a running `serve` by another build's, losing no request.

    It serves until `serve` ends; a new start serves the drafter of its own build.
    """
    from dflash_trt.serving.supervisor import update_drafter as run

    print(
        "note: this drafter serves until `serve` ends. To keep it, start `serve` with this build",
        file=sys.stderr,
    )
    replacement = run(http_port, build, least_acceptance)
    print(json.dumps(asdict(replacement)) if json_ else replacement)


KEY_HEADER = "triton-grpc-protocol-inference-key"  # of Triton's restricted protocols


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    url: Annotated[
        str, typer.Option(help="HOST:PORT of the server's gRPC port.")
    ] = "127.0.0.1:8001",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send it as a user's message by the chat template.")
    ] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM: TLS, trusting certificates of this CA.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key of serve's --key-file.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Stream a completion from a running server."""
    from dflash_trt.serving.answer import ON_REQUEST, join_all
    from dflash_trt.serving.client import Client, Tls
    from dflash_trt.serving.remote import first_key

    prompt_text = _read_prompt(prompt)
    chunks = []
    with Client(
        url,
        tls=Tls(root_certificate=tls_ca) if tls_ca else None,
        headers={KEY_HEADER: first_key(key_file)} if key_file else None,
    ) as client:
        for chunk in client.stream(
            [{"role": "user", "content": prompt_text}] if chat else prompt_text,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        ):
            chunks.append(chunk)
            if not json_:
                print(chunk.text, end="", flush=True)
    [answer] = join_all(chunks)
    rate = answer.completion_tokens / max(answer.seconds, 1e-9)
    if json_:
        values = {k: v for k, v in asdict(answer).items() if k not in ON_REQUEST}
        print(json.dumps({**values, "tokens_per_s": round(rate, 1)}), flush=True)
        return
    print(flush=True)
    counts = " ".join(map(str, answer.round_tokens))
    print(f"tokens committed by each round: {counts}", file=sys.stderr)
    print(
        f"{answer.completion_tokens} tokens, {rate:.0f} tokens/s, {answer.rounds} rounds, "
        f"tau {answer.acceptance_length:.2f} ({answer.finish_reason})",
        file=sys.stderr,
    )


def _read_prompt(argument: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("the prompt is not UTF-8 text", "Encode the prompt as UTF-8") from error
    if not text:
        raise RequestError("the prompt is empty", "Give at least one character")
    return text
