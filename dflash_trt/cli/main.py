"""The command line. Commands map to functions; heavy modules load inside them."""

import os
import sys
import traceback
from typing import Annotated

import typer

from dflash_trt import __version__
from dflash_trt.cli import bench, build, examine, serve
from dflash_trt.cli.output import print_json
from dflash_trt.errors import DflashError

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    build.build,
    build.check,
    examine.plan,
    examine.inspect,
    serve.serve,
    serve.update_drafter,
    serve.generate,
    examine.verify,
    examine.doctor,
    build.sign,
    build.export,
    build.schema,
):
    app.command()(command)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dflash-trt {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """From a language model and its DFlash drafter to a running Triton Inference Server."""


def main() -> int:
    """Run the command line; return 0, 1 failed, 2 bad usage or config, 130 interrupted."""
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
