"""`dflash-trt info` and `diff`: what a build or a running server is, and what changed."""
# ruff: noqa: PLC0415

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_trt.cli.output import Json, print_json, printable
from dflash_trt.errors import RequestError

SHORT = 12


def info(
    directory: Annotated[
        Path | None, typer.Argument(help="Directory that `build` wrote.", metavar="[DIRECTORY]")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask the server at this HTTP address instead.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key of serve's --key-file.")
    ] = None,
    json_: Json = False,
) -> None:
    """Say what a build is, or what a server runs: checkpoints, config, program, signature."""
    from dflash_trt.builder.identity import about_build
    from dflash_trt.serving.remote import server_facts

    if (directory is None) == (url is None):
        raise RequestError("give a build or --url", "For example: dflash-trt info build/pycode")
    facts = about_build(directory) if directory else server_facts(url or "", key_file)
    if json_:
        print_json(**facts)
        return
    for line in _lines(facts):
        print(printable(line))


def diff(
    old: Annotated[Path, typer.Argument(help="Directory that `build` wrote.")],
    new: Annotated[Path, typer.Argument(help="Another.")],
    json_: Json = False,
) -> None:
    """Say in a few lines how two builds differ; exit 1 if they do."""
    from dflash_trt.builder.identity import difference

    lines = difference(old, new)
    if json_:
        print_json(same=not lines, differences=lines)
    else:
        print("\n".join(map(printable, lines)) or "the same build")
    raise typer.Exit(1 if lines else 0)


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    from dflash_trt.builder.identity import checkpoint_name
    from dflash_trt.builder.program import describe

    yield f"{facts['name']} {facts['digest'][:SHORT]}"
    yield _line("digest", facts["digest"])
    yield _line("engine", _fields(facts["config"]["engine"]))
    for role, source in facts["checkpoints"].items():
        yield _line(role, checkpoint_name(source))
    for section in ("speculation", "serving"):
        yield _line(section, _fields(facts["config"][section]))
    if facts["config_file"]:
        yield _line("config", f"{facts['config_file']}, as it was written")
    here = "" if facts["made_by_this_program"] else " (not the program that says this)"
    yield _line("program", f"{describe(facts['program'])}{here}")
    yield _line("size", f"{facts['files']} files, {facts['bytes'] / 1e6:.1f} MB")
    yield _line("signature", _signature(facts["signature"]))
    yield from _acceptance_lines(facts["acceptance"])
    if "serving_since" in facts:
        yield _line("serving", f"since {facts['serving_since']}")
    for swap in facts.get("drafter_swaps", []):
        yield _line("drafter of", f"{swap['name']} {swap['digest'][:SHORT]}, since {swap['since']}")


def _line(name: str, text: str) -> str:
    return f"  {name:<12}{text}"


def _fields(section: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in section.items() if value is not None)


def _signature(signature: Mapping[str, Any] | None) -> str:
    if signature is None:
        return "none"
    if "problem" in signature:
        return str(signature["problem"])
    of = "this build" if signature["of_this_build"] else f"another build, {signature['of'][:SHORT]}"
    return f"of {of}, by the key sha256:{signature['key']} (`check --key` verifies it)"


def _acceptance_lines(record: Mapping[str, Any] | None) -> Iterator[str]:
    if record is None:
        yield _line("acceptance", "not measured (`bench engine --record`)")
        return
    if "problem" in record:
        yield _line("acceptance", record["problem"])
        return
    for task, by_method in record["acceptance"].items():
        for method, tau in by_method.items():
            yield _line("acceptance", f"{tau:.2f} tokens a round, {task}, {method}")
    yield _line("", f"measured {record['measured']} on {record['machine']}")
