"""`dflash-trt generate`: one request to a running server."""
# ruff: noqa: PLC0415

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dflash_trt.errors import RequestError

KEY_HEADER = "triton-grpc-protocol-inference-key"  # of Triton's restricted protocols


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    url: Annotated[
        str, typer.Option(help="HOST:PORT of the server's gRPC port.")
    ] = "127.0.0.1:8001",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Total probability of the tokens kept.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of tokens kept.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Word that ends the text. Repeatable.")
    ] = None,
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
    from dflash_trt.serving.client import Client, Tls

    said = _prompt(prompt)
    text, ids, rounds, final = "", list[int](), list[int](), None
    with Client(
        url,
        tls=Tls(root_certificate=tls_ca) if tls_ca else None,
        headers={KEY_HEADER: _key(key_file)} if key_file else None,
    ) as client:
        for chunk in client.stream(
            [{"role": "user", "content": said}] if chat else said,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop_words=stop or None,
        ):
            text, final = text + chunk.text, chunk.final
            ids += chunk.token_ids
            rounds += chunk.round_tokens
            if not json_:
                print(chunk.text, end="", flush=True)
    assert final is not None  # the client raises if a stream ends without a summary
    rate = final.completion_tokens / max(final.seconds, 1e-9)
    if json_:
        found = {"text": text, "token_ids": ids, "round_tokens": rounds, **asdict(final)}
        print(json.dumps({**found, "tokens_per_s": round(rate, 1)}), flush=True)
        return
    print(flush=True)
    print(f"tokens committed by each round: {' '.join(map(str, rounds))}", file=sys.stderr)
    print(
        f"{final.completion_tokens} tokens, {rate:.0f} tokens/s, {final.rounds} rounds, "
        f"tau {final.acceptance_length:.2f} ({final.finish_reason})",
        file=sys.stderr,
    )


def _prompt(argument: str) -> str:
    """Return the prompt, from stdin for "-"; RequestError unless it is UTF-8 text."""
    try:
        raw = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("the prompt is not UTF-8 text", "Encode the prompt as UTF-8") from error
    if not text:
        raise RequestError("the prompt is empty", "Give at least one character")
    return text


def _key(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise RequestError(
            f"cannot read {file}: {error.strerror}", "Give another --key-file"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} holds no key", "Give the server's key file") from error
