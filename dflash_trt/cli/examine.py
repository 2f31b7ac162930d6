"""`dflash-trt plan`, `inspect`, `verify` and `doctor`: what a pair and a build are."""
# ruff: noqa: PLC0415

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_trt.cli.output import Built, Check, Config, Json, print_json, reporting
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from dflash_trt.decoding.lossless import LosslessReport


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
    from dflash_trt.hardware import find_machine
    from dflash_trt.tensorrt_llm.plan import dflash_drafter, locate_planned, make_plan

    settings = load_config(config)
    hardware = None if machine is None else find_machine(machine)
    with TemporaryDirectory(prefix="dflash-trt-plan-") as scratch, reporting() as report:
        target = locate_planned(settings.target, "target", report, Path(scratch))
        drafter = locate_planned(dflash_drafter(settings), "drafter", report, Path(scratch))
        made = make_plan(settings, target, drafter, hardware, context, acceptance)
    if json_:
        print_json(**made)
    else:
        show_plan(made)


def _list_downloads(config: Path, json_: bool) -> None:
    from dflash_trt.builder.downloads import downloads, lines
    from dflash_trt.config import load_config

    listed = downloads(load_config(config))
    if json_:
        print_json(**listed)
    else:
        print("\n".join(lines(listed)))


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
        at = locate_argument(target, "target", report, Path(scratch))
        drafter_at = None
        if drafter is not None:
            drafter_at = locate_argument(drafter, "drafter", report, Path(scratch))
        facts = run(at, drafter_at, CHAT_CHECKS)
        facts["chats"] = about_chats(at)
    if json_:
        print_json(**facts)
    else:
        show(facts)
    fits = any(kind["fits"] for kind in facts["engine_kinds"])
    raise typer.Exit(0 if fits else 1)


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
    from dflash_trt.decoding import check_lossless as run
    from dflash_trt.engine_kinds import KINDS
    from dflash_trt.prompts import read_prompts

    manifest = read_manifest(directory)
    config = manifest["config"]
    if KINDS[config["engine"]["kind"]].graphs is None:
        raise RequestError(
            "verify compares in engines of ours, and this build runs in TensorRT-LLM",
            f"Run `dflash-trt doctor {directory}` on its machine: it decodes and compares what is "
            "accepted",
        )
    if outputs is not None and not outputs.absolute().parent.is_dir():
        raise RequestError(f"--outputs {outputs}: its folder is not there", "Make it first")
    check_build(directory, check)
    tokens = read_prompts(
        prompts,
        load_encoding(directory / "tokenizer"),
        vocab_size=manifest["target"]["vocab_size"],
        longest=max(config["serving"]["max_seq_len"] - max_tokens, 0),
    )
    with reporting() as report:
        result = run(
            directory / "engines",
            tokens,
            max_tokens,
            speculation_of(manifest),
            lambda done: report("prompts", done, len(tokens)),
        )
    if outputs is not None:
        _write_outputs(outputs, result.outputs, directory / "tokenizer")
    _print_result(result, json_)
    if result.first_mismatch is not None:
        raise typer.Exit(1)


def _write_outputs(file: Path, outputs: Sequence[Sequence[int]], tokenizer_files: Path) -> None:
    from dflash_trt.checkpoints import load_tokenizer
    from dflash_trt.files import replace_text

    tokenizer = load_tokenizer(tokenizer_files)
    lines = []
    for ids in outputs:
        line = {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False)}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    replace_text(file, "".join(lines))


def _print_result(result: "LosslessReport", json_: bool) -> None:
    if json_:
        summary = asdict(result) | {"rounds": result.rounds}
        del summary["prompt_rounds"]
        del summary["outputs"]
        print_json(**summary)
    else:
        print(
            f"{result.identical}/{result.total} identical, one and {result.together} at a time; "
            f"one at a time: tau {result.tau:.2f}, speedup {result.speedup:.2f}x "
            f"({result.dflash_tokens_per_s:.0f} tokens/s, target alone "
            f"{result.plain_tokens_per_s:.0f})"
        )
    first = result.first_mismatch
    if first is not None:
        together = ", decoded with others," if first.together else ""
        print(
            f"error: prompt {first.prompt}{together} differs first at token {first.position}: "
            f"the target alone gives id {first.expected}, DFlash gave {first.got}.",
            file=sys.stderr,
        )


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

    checks = []
    for finding in examine(directory, generate=not no_generate):
        check = asdict(finding)
        checks.append(check)
        if not json_:
            show_checks([check])
    healthy = all(check["result"] != "error" for check in checks)
    if json_:
        print_json(directory=str(directory), healthy=healthy, checks=checks)
    raise typer.Exit(0 if healthy else 1)
