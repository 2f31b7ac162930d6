"""`dflash-trt inspect` and `plan`: what a pair is, and where it fits."""
# ruff: noqa: PLC0415

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dflash_trt.cli.output import Config, Json, print_json, reporting
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
    json_: Json = False,
) -> None:
    """Say what fits on a machine and how fast it would be; needs config.json files and no GPU."""
    from tempfile import TemporaryDirectory

    from dflash_trt.cli.plan import dflash_drafter, locate_config, make_plan, show_plan
    from dflash_trt.config import load_config
    from dflash_trt.planning import machine as named

    settings = load_config(config)
    hardware = None if machine is None else named(machine)
    with TemporaryDirectory(prefix="dflash-trt-plan-") as scratch, reporting() as report:
        target = locate_config(settings.target, "target", report, Path(scratch))
        drafter = locate_config(dflash_drafter(settings), "drafter", report, Path(scratch))
        found = make_plan(settings, target, drafter, hardware, context, acceptance)
    if json_:
        print_json(**found)
    else:
        show_plan(found)


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="Its directory, GGUF file or ORG/NAME@REVISION; or what `build` wrote."
        ),
    ],
    drafter: Annotated[str | None, typer.Argument(help="Likewise for its drafter.")] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Build engines in TMPDIR, decode, and report acceptance."),
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help='With --deep: JSON lines with "text" or "ids".')
    ] = None,
    json_: Json = False,
) -> None:
    """Describe a target and a drafter and check the pair; exit 1 if it cannot be built.

    For a built directory: what rounds cost on the machines that ran it.
    """
    from dflash_trt.build.built import inspect_built, is_built
    from dflash_trt.chat import CHAT_CHECKS, about_chats
    from dflash_trt.checkpoints import inspect as run
    from dflash_trt.checkpoints import locate_argument
    from dflash_trt.cli.report import show, show_built

    deep = deep or prompts is not None
    if deep and drafter is None:
        raise RequestError("--deep measures a pair", "Give the drafter too")
    if drafter is None and is_built(Path(target)):
        found = inspect_built(Path(target))
        if json_:
            print_json(**found)
        else:
            show_built(found)
        return
    with reporting() as report:
        at = [locate_argument(target, "target", report)]
        if drafter is not None:
            at.append(locate_argument(drafter, "drafter", report))
        found = run(at[0], at[1] if drafter else None, CHAT_CHECKS)
        found["chats"] = about_chats(at[0])
        kinds = {kind["kind"]: kind for kind in found["engine_kinds"]}
        builds = any(kind["fits"] for kind in kinds.values() if kind["state"] == "built")
        if deep and kinds["onnxruntime"]["fits"]:
            from dflash_trt.build.acceptance_probe import measure

            found["measured"] = asdict(measure(at[0], at[1], prompts, report))
            found["checks"].append(found["measured"].pop("finding"))
    if json_:
        print_json(**found)
    else:
        show(found)
    raise typer.Exit(0 if builds else 1)
