"""`dflash-trt plan`, `inspect`, `verify` and `doctor`: what a pair and a build are."""
# ruff: noqa: PLC0415

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dflash_trt.cli.output import Built, Check, Config, Json, print_json, reporting
from dflash_trt.errors import RequestError


def plan(
    config: Config,
    machine: Annotated[
        str | None, typer.Option(help="Preset that overrides the config's hardware.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence, for speeds.")
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(min=1.0, help="Tokens that a DFlash round commits with all drafts."),
    ] = None,
    downloads: Annotated[
        bool,
        typer.Option("--downloads", help="List instead what to mirror for a site without network."),
    ] = False,
    json_: Json = False,
) -> None:
    """Say what fits on a machine and how fast it would be; needs config.json files and no GPU."""
    if downloads:
        return _list_downloads(config, json_)
    from tempfile import TemporaryDirectory

    from dflash_trt.cli.plan import show_plan
    from dflash_trt.config import load_config
    from dflash_trt.hardware import machine as named
    from dflash_trt.tensorrt_llm.plan import dflash_drafter, locate_planned, make_plan

    settings = load_config(config)
    hardware = None if machine is None else named(machine)
    with TemporaryDirectory(prefix="dflash-trt-plan-") as scratch, reporting() as report:
        target = locate_planned(settings.target, "target", report, Path(scratch))
        drafter = locate_planned(dflash_drafter(settings), "drafter", report, Path(scratch))
        found = make_plan(settings, target, drafter, hardware, context, acceptance)
    if json_:
        print_json(**found)
    else:
        show_plan(found)


def _list_downloads(config: Path, json_: bool) -> None:
    from dflash_trt.builder.downloads import downloads, lines
    from dflash_trt.config import load_config

    found = downloads(load_config(config))
    if json_:
        print_json(**found)
    else:
        print("\n".join(lines(found)))


def inspect(
    target: Annotated[
        str,
        typer.Argument(help="Its directory, GGUF file or ORG/NAME@REVISION."),
    ],
    drafter: Annotated[str | None, typer.Argument(help="Likewise for its drafter.")] = None,
    json_: Json = False,
) -> None:
    """Describe a target and a drafter and check the pair; exit 1 if it cannot be built."""
    from tempfile import TemporaryDirectory

    from dflash_trt.chat import CHAT_CHECKS, about_chats
    from dflash_trt.checkpoints import locate_argument
    from dflash_trt.checks import inspect as run
    from dflash_trt.cli.show import show

    with TemporaryDirectory(prefix="dflash-trt-inspect-") as scratch, reporting() as report:
        at = [locate_argument(target, "target", report, Path(scratch))]
        if drafter is not None:
            at.append(locate_argument(drafter, "drafter", report, Path(scratch)))
        found = run(at[0], at[1] if drafter else None, CHAT_CHECKS)
        found["chats"] = about_chats(at[0])
    if json_:
        print_json(**found)
    else:
        show(found)
    raise typer.Exit(0 if any(kind["fits"] for kind in found["engine_kinds"]) else 1)


def verify(
    directory: Built,
    prompts: Annotated[Path, typer.Option(help='JSON lines with "text", "messages" or "ids".')],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode; EOS is ignored.")],
    outputs: Annotated[
        Path | None, typer.Option(help="Write each prompt's ids and text as JSON lines.")
    ] = None,
    check: Check = None,
    json_: Json = False,
) -> None:
    """Compare greedy DFlash decoding with the target alone; exit 1 on any difference."""
    from dflash_trt.builder import check_build, read_manifest, speculation_of
    from dflash_trt.chat import load_encoding
    from dflash_trt.checkpoints import load_tokenizer
    from dflash_trt.decoding import check_lossless as run
    from dflash_trt.files import replace_text
    from dflash_trt.prompts import read_prompts

    manifest = read_manifest(directory)
    if manifest["config"]["engine"]["kind"] == "tensorrt_llm":
        raise RequestError(
            "verify compares in engines of ours, and this build runs in TensorRT-LLM",
            f"Run `dflash-trt doctor {directory}` on its machine: it decodes and compares what is "
            "accepted",
        )
    if outputs is not None and not outputs.absolute().parent.is_dir():
        raise RequestError(f"--outputs {outputs}: its folder is not there", "Make it first")
    check_build(directory, check)
    longest = manifest["config"]["serving"]["max_seq_len"]
    tokens = read_prompts(
        prompts,
        load_encoding(directory / "tokenizer"),
        vocab_size=manifest["target"]["vocab_size"],
        longest=max(longest - max_tokens, 0),
    )
    with reporting() as report:
        found = run(
            directory / "engines",
            tokens,
            max_tokens,
            speculation_of(manifest),
            lambda done: report("prompts", done, len(tokens)),
        )
    if outputs is not None:
        tokenizer = load_tokenizer(directory / "tokenizer")
        lines = [
            {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False)}
            for ids in found.outputs
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        replace_text(outputs, text)
    summary = asdict(found) | {"rounds": found.rounds}
    del summary["prompt_rounds"]
    del summary["outputs"]
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
    no_generate: Annotated[
        bool, typer.Option("--no-generate", help="Do not load the model and decode.")
    ] = False,
    json_: Json = False,
) -> None:
    """Check that this machine can run a build; exit 1 if it cannot."""
    from dflash_trt.cli.show import show_checks
    from dflash_trt.doctor import examine

    found = []
    for finding in examine(directory, generate=not no_generate):
        found.append(asdict(finding))
        if not json_:
            show_checks(found[-1:])
    healthy = all(check["result"] != "error" for check in found)
    if json_:
        print_json(directory=str(directory), healthy=healthy, checks=found)
    raise typer.Exit(0 if healthy else 1)
