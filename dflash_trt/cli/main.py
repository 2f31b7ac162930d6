"""The command line. Commands map to functions; heavy modules load inside them."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from dflash_trt.cli import batch, bench, build, examine, info, serve
from dflash_trt.cli.output import print_json
from dflash_trt.errors import DflashError

# commands with an example of each
GROUPS: Mapping[str, Mapping[Callable[..., None] | str, str]] = {
    "Build": {
        examine.inspect: "Qwen/Qwen3-8B@main z-lab/Qwen3-8B-DFlash-b16@main",
        build.build: "build_configs/pycode.yaml --output build/pycode",
        build.export: "vllm build_configs/dgx-b300/gpt-oss-120b.yaml > serve.sh",
        build.schema: "> config.schema.json",
    },
    "Serve": {
        serve.serve: "build/pycode --http-port 8000 --grpc-port 8001",
        serve.generate: "'def main():' --max-tokens 64",
        batch.batch: "requests.jsonl answers.jsonl --url http://127.0.0.1:8000",
        serve.update_drafter: "build/better --http-port 8000",
        examine.doctor: "build/gpt-oss-120b",
    },
    "Measure": {
        examine.plan: "build_configs/dgx-b300/gpt-oss-120b.yaml",
        examine.verify: "build/pycode --prompts prompts.jsonl --max-tokens 128",
        "bench": "engine build/pycode",
    },
    "Release": {
        info.info: "build/pycode",
        info.diff: "build/last-week build/pycode",
        build.check: "build/pycode --key signer.pub",
        build.sign: "build/pycode --key signer.pem",
    },
}


app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for group, commands in GROUPS.items():
    for command, example in commands.items():
        name = command if isinstance(command, str) else command.__name__.replace("_", "-")
        epilog = f"Example: dflash-trt {name} {example}"
        if isinstance(command, str):
            app.add_typer(bench.app, name=name, epilog=epilog, rich_help_panel=group)
        else:
            app.command(name, epilog=epilog, rich_help_panel=group)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from dflash_trt.builder.program import program  # noqa: PLC0415

        print(program())
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """From a language model and its DFlash drafter to a running Triton Inference Server."""


def _end(_number: int, _frame: object) -> None:
    print("error: stopped by SIGTERM", file=sys.stderr)
    raise SystemExit(128 + signal.SIGTERM)


def main() -> int:
    """Run the command line.

    Return 0, 1 failed, 2 bad usage or config, 130 interrupted, 143 terminated.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)  # so that nothing is left behind; `serve` has its own
    try:
        app()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except DflashError as error:
        if "--json" in sys.argv[1:]:
            print_json(error={"problem": error.problem, "fix": error.fix})
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
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
