"""The command line. Commands map one to one to functions; heavy modules load inside them."""
# ruff: noqa: PLC0415

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dflash_trt import __version__
from dflash_trt.cli.bench import app as bench
from dflash_trt.cli.generate import generate
from dflash_trt.errors import DflashError, RequestError

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Check = Annotated[
    Literal["none", "quick", "full"] | None,
    typer.Option(
        help="How files are held against the manifest: quick leaves those from 256 MiB on at their "
        "size. Default: full up to 16 GiB."
    ),
]
Port = typer.Option(min=1, max=65535)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dflash-trt {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """From a language model and its DFlash drafter to a running Triton Inference Server."""


@app.command()
def build(
    config: Annotated[Path, typer.Argument(help="Build config, YAML (see `schema`).")],
    output: Annotated[Path | None, typer.Option(help="Default: build/NAME.")] = None,
    tp: Annotated[
        int | None, typer.Option(help="Ranks, in place of engine.tensor_parallel_size.")
    ] = None,
    json_: Json = False,
) -> None:
    """Check a pair and write its engines and model repository."""
    from dflash_trt.build.run import build as run
    from dflash_trt.cli.progress import reporting
    from dflash_trt.config import load_config, with_ranks

    settings = load_config(config)
    if tp is not None:
        settings = with_ranks(settings, tp)
    directory = output or Path("build") / settings.name
    with reporting() as report:
        result = run(settings, directory, report)
    for warning in result.warnings:
        print(f"{warning.result}: {warning}", file=sys.stderr)
    files = result.manifest["files"]
    linked = sum(entry["size"] for entry in files.values() if "mtime_ns" in entry)
    size = sum(entry["size"] for entry in files.values()) - linked
    if json_:
        _print_json(
            directory=str(result.directory),
            built=result.built,
            files=len(files),
            bytes=size,
            linked_bytes=linked,
            seconds=round(result.seconds, 3),
            warnings=[str(warning) for warning in result.warnings],
        )
    elif result.built:
        print(
            f"built {directory} in {result.seconds:.1f} s: {len(files)} files, {size / 1e6:.1f} MB"
            + f", and {linked / 1e6:.1f} MB of the checkpoints by link" * bool(linked)
        )
        if (cost := result.accuracy) is not None:
            print(
                f"quantised weights against the unquantised target, {cost.tokens} tokens "
                f"of fixed text: greedy token equal at {cost.agreement:.1%}, logits off by "
                f"{cost.rms:.1%} rms, at most {cost.largest:.2f}"
            )
        if settings.engine.kind == "tensorrt_llm":
            print(f"check the machine it goes to: dflash-trt doctor {directory}")
        print(f"serve it: dflash-trt serve {directory}")
    else:
        print(f"{directory} is already built from these inputs; nothing to do")


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="Directory that `build` wrote.")],
    json_: Json = False,
) -> None:
    """Hold every file of a build against its manifest; exit 1 if one is another."""
    from dflash_trt.build.manifest import differences, read_manifest
    from dflash_trt.cli.progress import reporting
    from dflash_trt.cli.report import show_differences

    manifest = read_manifest(directory)
    with reporting() as report:
        found = differences(directory, manifest, "full", report)
    files = manifest["files"]
    if json_:
        _print_json(directory=str(directory), intact=not found, files=len(files), **asdict(found))
    elif not found:
        print(f"{directory}: {len(files)} files as they were built")
    else:
        show_differences(asdict(found))
    raise typer.Exit(1 if found else 0)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="Build config, YAML (see `schema`).")],
    machine: Annotated[
        str | None, typer.Option(help="A preset in place of the config's hardware.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence, for the speeds.")
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Tokens a DFlash round commits with all its drafts.")
    ] = None,
    eagle_acceptance: Annotated[
        float | None, typer.Option(min=1.0, help="The same of an EAGLE-3 chain of three drafts.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the Pareto picture here.")] = None,
    json_: Json = False,
) -> None:
    """Say what fits on a machine and how fast it would be; needs config.json files and no GPU."""
    from dflash_trt.checkpoints import locate
    from dflash_trt.cli.progress import reporting
    from dflash_trt.config import load_config
    from dflash_trt.planning import draw, show
    from dflash_trt.planning import plan as run
    from dflash_trt.roofline import machine as named

    settings = load_config(config)
    hardware = None if machine is None else named(machine)
    with reporting() as report:
        target = locate(settings.target, "target", report, weights=False).directory
        drafter = locate(settings.drafter, "drafter", report, weights=False).directory
    found = run(
        settings,
        target,
        drafter,
        hardware=hardware,
        context=context,
        acceptance=acceptance,
        eagle_acceptance=eagle_acceptance,
    )
    if svg is not None:
        try:
            svg.write_text(draw(found), encoding="utf-8")
        except OSError as error:
            raise RequestError(
                f"cannot write {svg}: {error.strerror}", "Give another --svg"
            ) from error
    if json_:
        _print_json(**found)
    else:
        show(found)


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="Its directory, GGUF file or ORG/NAME@REVISION; or what `build` wrote."
        ),
    ],
    drafter: Annotated[str | None, typer.Argument(help="The same of its drafter.")] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Build engines in TMPDIR, decode, and say what is accepted."),
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help='With --deep: JSON lines with "text" or "ids".')
    ] = None,
    json_: Json = False,
) -> None:
    """Describe a target and a drafter and check the pair; exit 1 if it cannot be built.

    Of a built directory: what rounds cost on the machines that ran it.
    """
    from dflash_trt.build.built import inspect_built, is_built
    from dflash_trt.checkpoints import inspect as run
    from dflash_trt.checkpoints import locate_argument
    from dflash_trt.cli.progress import reporting
    from dflash_trt.cli.report import show, show_built

    deep = deep or prompts is not None
    if deep and drafter is None:
        raise RequestError("--deep measures a pair", "Give the drafter too")
    if drafter is None and is_built(Path(target)):
        found = inspect_built(Path(target))
        if json_:
            _print_json(**found)
        else:
            show_built(found)
        return
    with reporting() as report:
        at = [locate_argument(target, "target", report)]
        if drafter is not None:
            at.append(locate_argument(drafter, "drafter", report))
        found = run(*at)
        kinds = {kind["kind"]: kind for kind in found["engine_kinds"]}
        fits = kinds["onnxruntime"]["fits"]
        builds = any(kind["fits"] for kind in kinds.values() if kind["state"] == "built")
        if deep and fits:
            from dflash_trt.build.acceptance_probe import measure

            found["measured"] = asdict(measure(at[0], at[1], prompts, report))
            found["checks"].append(found["measured"].pop("finding"))
    if json_:
        _print_json(**found)
    else:
        show(found)
    raise typer.Exit(0 if builds else 1)


@app.command()
def serve(
    repo: Annotated[Path, typer.Argument(help="Directory that `build` wrote.")],
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
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long running requests may go on at SIGTERM.")
    ] = 20.0,
    check: Check = None,
    log_file: Annotated[
        Path | None, typer.Option(help="Add what Triton, its models and the fronts say to it.")
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of its lines, and of what `serve` prints.")
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
        )
    )


app.command()(generate)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="Directory that `build` wrote.")],
    prompts: Annotated[Path, typer.Option(help='JSON lines with "text", "messages" or "ids".')],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode; EOS is ignored.")],
    outputs: Annotated[Path | None, typer.Option(help="Write token ids as JSON lines.")] = None,
    check: Check = None,
    json_: Json = False,
) -> None:
    """Compare greedy DFlash decoding with the target alone; exit 1 on any difference."""
    from dflash_trt.build.manifest import check_build, read_manifest, speculation_of
    from dflash_trt.chat.render import load_encoding
    from dflash_trt.cli.progress import reporting
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
    if outputs is not None:
        _write_outputs(outputs, found.outputs)
    summary = {name: value for name, value in asdict(found).items() if name != "outputs"}
    if json_:
        _print_json(**summary)
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


@app.command()
def doctor(
    directory: Annotated[Path, typer.Argument(help="Directory that `build` wrote.")],
    generate: Annotated[
        bool | None,
        typer.Option(
            "--generate/--no-generate",
            help="Whether to load the model and decode. Default: if all else is well.",
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
        _print_json(directory=str(directory), healthy=healthy, checks=found)
    raise typer.Exit(0 if healthy else 1)


@app.command()
def export(
    engine: Annotated[str, typer.Argument(help="vllm, sglang or trtllm-serve.")],
    config: Annotated[Path, typer.Argument(help="Build config of kind tensorrt_llm, YAML.")],
) -> None:
    """Print a script that serves the same pair on another engine, to compare like with like."""
    from dflash_trt.build.export import ENGINES
    from dflash_trt.build.export import export as run
    from dflash_trt.cli.progress import reporting
    from dflash_trt.config import load_config

    if engine not in ENGINES:
        raise RequestError(f"no engine is called {engine!r}", f"Take {', '.join(ENGINES)}")
    with reporting() as report:
        text = run(load_config(config), engine, report)
    print(text, end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the build config."""
    from dflash_trt.config import json_schema

    print(json.dumps(json_schema(), indent=2))


def main() -> int:
    """Entry point; the exit code: 0, 1 failed, 2 bad usage or config, 130 interrupted."""
    try:
        app()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except DflashError as error:
        if "--json" in sys.argv[1:]:
            _print_json(error={"problem": error.problem, "fix": error.fix})
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if os.environ.get("DFLASH_TRT_DEBUG"):
            traceback.print_exc()
        print(
            f"internal error: {type(error).__name__}: {error}. Please report it with the output "
            "under DFLASH_TRT_DEBUG=1.",
            file=sys.stderr,
        )
        return 1
    return 0


def _print_json(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _write_outputs(path: Path, outputs: list[list[int]]) -> None:
    try:
        path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in outputs))
    except OSError as error:
        raise RequestError(
            f"cannot write {path}: {error.strerror}", "Give another --outputs"
        ) from error
