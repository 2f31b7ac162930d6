"""`dflash-trt batch`: a file of requests to a running server."""
# ruff: noqa: PLC0415

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_trt.cli.output import Json, print_json, reporting

if TYPE_CHECKING:
    from dflash_trt.serving.batch import Done


def batch(
    requests: Annotated[Path, typer.Argument(help="JSON lines in the form of OpenAI's batches.")],
    answers: Annotated[Path, typer.Argument(help="Answers are appended; lines in it are done.")],
    url: Annotated[str, typer.Option(help="HTTP address of the server.")] = "http://127.0.0.1:8000",
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key of serve's --key-file.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests at a time. Default: enough for all slots."),
    ] = None,
    json_: Json = False,
) -> None:
    """Answer a file of requests, as many at a time as the server has slots; exit 1 if one failed.

    Run again after an interruption, it continues: each request is answered once.
    """
    from dflash_trt.serving.batch import is_standard_output, run_batch

    with reporting() as report:
        done = run_batch(requests, answers, url, key_file, concurrency, report)
    among_answers = is_standard_output(answers)
    with redirect_stdout(sys.stderr) if among_answers else nullcontext():
        _print(done, json_)
    if done.failed:
        print(f"error: {done.failed} requests failed; their lines say why.", file=sys.stderr)
        raise typer.Exit(1)


def _print(done: "Done", json_: bool) -> None:
    if json_:
        print_json(**asdict(done))
        return
    before = f", {done.before} of them before" if done.before else ""
    print(
        f"{done.answered} of {done.requests} requests answered{before}, {done.failed} failed; "
        f"{done.seconds:.1f} s, {done.tokens} tokens"
    )
