"""`dflash-trt build`, `check`, `sign`, `export` and `schema`: a build and its config."""
# ruff: noqa: PLC0415

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_trt.cli.output import Built, Config, Json, print_json, printable, reporting


def build(
    config: Config,
    output: Annotated[Path | None, typer.Option(help="Default: build/NAME.")] = None,
    json_: Json = False,
) -> None:
    """Check a pair and write its engines and model repository."""
    from dflash_trt.builder.pipeline import build as run
    from dflash_trt.builder.repository import request_defaults
    from dflash_trt.config import config_text, load_config

    settings = load_config(config)
    text = config_text(config)
    directory = output or Path("build") / settings.name
    with reporting() as report:
        result = run(settings, directory, report, text)
    for warning in result.warnings:
        print(f"{warning.result}: {warning}", file=sys.stderr)
    files = result.manifest["files"]
    size = sum(entry["size"] for entry in files.values())
    sampling = request_defaults(settings, directory)
    if json_:
        print_json(
            directory=str(result.directory),
            built=result.built,
            digest=result.digest,
            files=len(files),
            bytes=size,
            seconds=round(result.seconds, 3),
            sampling_defaults=sampling,
            warnings=[str(warning) for warning in result.warnings],
        )
        return
    if not result.built:
        print(f"{directory} is already built from these inputs; nothing to do")
        return
    print(f"built {directory} in {result.seconds:.1f} s: {len(files)} files, {size / 1e6:.1f} MB")
    if result.written.cost is not None:
        print(f"quantized against the original: {result.written.cost}")
    if sampling:
        defaults = ", ".join(f"{name} {value}" for name, value in sampling.items())
        print(f"requests that do not say: {defaults} (generation_config.json)")
    if settings.engine_kind.graphs is None:
        print(f"check the machine it goes to: dflash-trt doctor {directory}")
    print(f"serve it: dflash-trt serve {directory}")


def check(
    directory: Built,
    key: Annotated[
        Path | None, typer.Option(help="PEM of the public key that must have signed it.")
    ] = None,
    json_: Json = False,
) -> None:
    """Compare every file of a build with its manifest, and its signature with its signer's key;
    exit 1 if one differs."""
    from dflash_trt.builder import differences, read_manifest
    from dflash_trt.builder.signing import verify_signature

    digested = verify_signature(directory, key) if key is not None else ()
    manifest = read_manifest(directory)
    with reporting() as report:
        changes = differences(directory, manifest, "full", report, digested)
    files = manifest["files"]
    if json_:
        print_json(
            directory=str(directory), intact=not changes, files=len(files), **asdict(changes)
        )
    elif not changes:
        print(f"{directory}: {len(files)} files as they were built")
    else:
        lines = [f"{kind}: {name}" for kind, names in asdict(changes).items() for name in names]
        print("\n".join(map(printable, lines)))
    raise typer.Exit(1 if changes else 0)


def sign(
    directory: Built,
    key: Annotated[Path, typer.Option(help="PEM of a private key: P-256, P-384 or P-521.")],
    json_: Json = False,
) -> None:
    """Sign every file of a build (OpenSSF Model Signing): writes model.sig into it."""
    from dflash_trt.builder import check_build
    from dflash_trt.builder.signing import read_signature
    from dflash_trt.builder.signing import sign as run

    with reporting() as report:
        check_build(directory, "full", report)
    file = run(directory, key)
    signature = read_signature(directory)
    assert signature is not None
    if json_:
        print_json(signature=str(file), digest=signature.of, key=signature.key)
    else:
        print(f"signed: {file}")


def export(
    engine: Literal["vllm", "sglang", "trtllm-serve", "dynamo"],
    config: Annotated[Path, typer.Argument(help="Build config of kind tensorrt_llm, YAML.")],
) -> None:
    """Print a script that serves the same pair on another engine; for dynamo, a manifest."""
    from dflash_trt.builder.export import export as run
    from dflash_trt.config import load_config

    with reporting() as report:
        text = run(load_config(config), engine, report)
    print(text, end="")


def schema() -> None:
    """Print the JSON Schema of the build config."""
    from dflash_trt.config import json_schema

    print(json.dumps(json_schema(), indent=2))
