"""`dflash-trt bench ...`: measure engines and servers."""
# ruff: noqa: B006, PLC0415

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dflash_trt.cli.output import Built, Check, Config, Json, reporting

app = typer.Typer(help="Measure engines and servers.", no_args_is_help=True, rich_markup_mode=None)


@app.command(epilog="Example: dflash-trt bench engine build/pycode --batch 1 --batch 4")
def engine(
    directory: Built,
    prompts: Annotated[
        list[str],
        typer.Option(help="pycode, or a file of JSON lines. Repeatable, as the next six."),
    ] = ["pycode"],
    methods: Annotated[
        list[str],
        typer.Option(help="Besides plain: dflash, adaptive, adaptive-no-lookup or lookup."),
    ] = ["dflash"],
    draft_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Default: a whole block.")
    ] = None,
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences at a time.")] = [1],
    temperature: Annotated[list[float], typer.Option(min=0.0, help="0: greedy.")] = [0.0],
    top_p: Annotated[
        list[float], typer.Option(min=0.01, max=1.0, help="1: all tokens. Not of greedy texts.")
    ] = [1.0],
    top_k: Annotated[list[int], typer.Option(min=0, help="0: all tokens. Not of greedy texts.")] = [
        0
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="EOS is ignored.")] = 128,
    prompt_count: Annotated[int, typer.Option(min=1, help="Most prompts of each task.")] = 16,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    output: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the acceptance beside the build, for `info`.")
    ] = False,
    check: Check = None,
    json_: Json = False,
) -> None:
    """Compare decoding methods in turns over the same prompts."""
    from dflash_trt.bench import (
        Plan,
        engine_report,
        load_task,
        record_of,
        run_engine,
        sampling_rules,
    )
    from dflash_trt.builder import check_build, read_manifest
    from dflash_trt.builder.identity import write_record

    manifest = read_manifest(directory)
    check_build(directory, check)
    tasks = {
        label: load_task(
            name,
            directory / "tokenizer",
            vocab_size=manifest["target"]["vocab_size"],
            longest=manifest["config"]["serving"]["max_seq_len"] - max_tokens,
            count=prompt_count,
        )
        for label, name in _labeled(prompts).items()
    }
    plan = Plan(
        tasks=tasks,
        max_tokens=max_tokens,
        methods=methods,
        draft_tokens=draft_tokens or [None],
        batches=batch,
        rules=sampling_rules(temperature, top_p, top_k),
        repeats=repeats,
    )
    with reporting() as progress:
        run = run_engine(directory, plan, partial(progress, "passes"))
    if output is not None:
        output.write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")
    if record:
        write_record(directory, record_of(directory, run))
    print(json.dumps(asdict(run)) if json_ else engine_report(run))
    if any(cell.identical[0] < cell.identical[1] for cell in run.cells):
        print("error: texts differ from plain decoding's.", file=sys.stderr)
        raise typer.Exit(1)


@app.command(epilog="Example: dflash-trt bench matrix build_configs/pycode.yaml --output loads")
def matrix(
    config: Config,
    output: Annotated[
        Path, typer.Option(help="Folder of builds, loads and the plot; results in it are kept.")
    ],
    methods: Annotated[
        list[str], typer.Option(help="none, ngram, eagle3 or dflash. Repeatable, as the next two.")
    ] = ["none", "dflash"],
    concurrency: Annotated[list[int], typer.Option(min=1, help="Concurrent users.")] = [1, 8],
    prompts: Annotated[list[str], typer.Option(help="pycode, or a file of JSON lines.")] = [
        "pycode"
    ],
    requests: Annotated[int, typer.Option(min=1, help="Per load, at least twice its users.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """Serve each method and measure it with AIPerf.

    Each method is loaded with each number of users and each prompts. Resumes an interrupted run.
    """
    from dflash_trt.bench import Matrix, load_prompts, matrix_table, run_matrix
    from dflash_trt.config import load_config

    count = max(requests, 2 * max(concurrency))
    plan = Matrix(
        config=load_config(config),
        methods=methods,
        users=concurrency,
        prompts={label: load_prompts(name, count) for label, name in _labeled(prompts).items()},
        requests=requests,
        max_tokens=max_tokens,
    )
    with reporting() as progress:
        loads = run_matrix(plan, output, progress)
    print(matrix_table(loads))
    if failed := sum(load.error is not None for load in loads):
        print(f"error: {failed} loads failed; the table says why.", file=sys.stderr)
        raise typer.Exit(1)


def _labeled(names: list[str]) -> dict[str, str]:
    by_base_name = {Path(name).name: name for name in names}
    return by_base_name if len(by_base_name) == len({*names}) else {name: name for name in names}
