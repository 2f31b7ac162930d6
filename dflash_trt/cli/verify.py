"""`dflash-trt verify` and `doctor`: whether a build decodes correctly, and runs on this machine."""
# ruff: noqa: PLC0415

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dflash_trt.cli.output import Built, Check, Json, print_json, reporting, writing
from dflash_trt.errors import RequestError


def verify(
    directory: Built,
    prompts: Annotated[Path, typer.Option(help='JSON lines with "text", "messages" or "ids".')],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode; EOS is ignored.")],
    outputs: Annotated[Path | None, typer.Option(help="Write token ids as JSON lines.")] = None,
    check: Check = None,
    json_: Json = False,
) -> None:
    """Compare greedy DFlash decoding with the target alone; exit 1 on any difference."""
    from dflash_trt.build import check_build, read_manifest, speculation_of
    from dflash_trt.chat import load_encoding
    from dflash_trt.decoding import check_lossless as run
    from dflash_trt.prompts import read_prompts

    manifest = read_manifest(directory)
    if manifest["config"]["engine"]["kind"] == "tensorrt_llm":
        raise RequestError(
            "verify compares in engines of ours, and this build runs in TensorRT-LLM",
            f"Run `dflash-trt doctor {directory}` on its machine: it decodes and compares what is "
            "accepted",
        )
    check_build(directory, check)
    longest = manifest["config"]["serving"]["max_seq_len"]
    if max_tokens >= longest:
        raise RequestError(
            f"--max-tokens is {max_tokens}, but this build's max_seq_len is {longest}, with the "
            "prompt",
            f"Give at most {longest - 1}, or build with a larger serving.max_seq_len",
        )
    asked = read_prompts(
        prompts,
        load_encoding(directory / "tokenizer"),
        vocab_size=manifest["target"]["vocab_size"],
        longest=longest - max_tokens,
    )
    with reporting() as report:
        found = run(
            directory / "engines",
            asked,
            max_tokens,
            speculation_of(manifest),
            lambda done: report("prompts", done, len(asked)),
        )
    summary = asdict(found) | {"rounds": found.rounds}
    del summary["prompt_rounds"]
    texts = summary.pop("outputs")
    if outputs is not None:
        with writing(outputs, "--outputs"):
            lines = "".join(json.dumps({"ids": ids}) + "\n" for ids in texts)
            outputs.write_text(lines, encoding="utf-8")
    if json_:
        print_json(**summary)
    else:
        print(
            f"{found.identical}/{found.total} identical, one and {found.together} at a time; one "
            f"at a time: tau {found.tau:.2f}, speedup {found.speedup:.2f}x "
            f"({found.dflash_tokens_per_s:.0f} tokens/s, target alone "
            f"{found.plain_tokens_per_s:.0f})"
        )
    if (first := found.first_mismatch) is not None:
        print(
            f"error: prompt {first.prompt}{', decoded with others,' if first.together else ''} "
            f"differs first at token {first.position}: the target alone gives id "
            f"{first.expected}, DFlash gave {first.got}.",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def doctor(
    directory: Built,
    generate: Annotated[
        bool | None,
        typer.Option(
            "--generate/--no-generate",
            help="Whether to load the model and decode. Default: if no other check fails.",
        ),
    ] = None,
    check: Check = None,
    json_: Json = False,
) -> None:
    """Check that this machine can run a build; exit 1 if it cannot."""
    from dflash_trt.cli.report import show_checks
    from dflash_trt.doctor import examine

    found = []
    for finding in examine(directory, generate, check):
        found.append(asdict(finding))
        if not json_:
            show_checks(found[-1:])
    healthy = all(check["result"] != "error" for check in found)
    if json_:
        print_json(directory=str(directory), healthy=healthy, checks=found)
    raise typer.Exit(0 if healthy else 1)
