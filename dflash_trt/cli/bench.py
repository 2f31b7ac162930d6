"""`dflash-trt bench ...`: measure engines and servers."""
# ruff: noqa: PLC0415

import json
import sys
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from dflash_trt.cli.output import Built, Config, Json, reporting, writing
from dflash_trt.errors import RequestError

app = typer.Typer(help="Measure engines and servers.", no_args_is_help=True, rich_markup_mode=None)


@app.command(epilog="Example: dflash-trt bench engine build/pycode --methods plain,adaptive")
def engine(
    directory: Built,
    prompts: Annotated[
        list[str],
        typer.Option(help="pycode, synthetic:LENGTH, or a file of JSON lines."),
    ] = ["pycode"],  # noqa: B006
    methods: Annotated[
        str,
        typer.Option(help="Some of plain, dflash, adaptive, adaptive-no-lookup, lookup."),
    ] = "plain,dflash",
    draft_tokens: Annotated[str, typer.Option(help="Numbers, or auto.")] = "auto",
    batch: Annotated[str, typer.Option(help="Sequences at a time.")] = "1",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: as it serves.")
    ] = None,
    temperature: Annotated[str, typer.Option(help="0: greedy.")] = "0",
    max_tokens: Annotated[int, typer.Option(min=1, help="EOS is ignored.")] = 128,
    prompt_count: Annotated[int, typer.Option(min=1, help="Most prompts of each task.")] = 16,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    seed: int = 0,
    output: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
    json_: Json = False,
) -> None:
    """Compare decoding methods in turns over the same prompts."""
    from dflash_trt.bench import METHODS, Plan, engine_report, load_task, run_engine
    from dflash_trt.build import read_manifest

    options = {  # that cells do not record
        "max_tokens": str(max_tokens),
        "prompt_count": str(prompt_count),
        "repeats": str(repeats),
        "seed": str(seed),
    }
    manifest = read_manifest(directory)
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
        methods=_some_of("methods", methods, METHODS),
        draft_tokens=_numbers("draft-tokens", draft_tokens, int, "auto"),
        batches=_numbers("batch", batch, int),
        temperatures=_numbers("temperature", temperature, float, least=0),
        repeats=repeats,
        seed=seed,
    )
    with reporting() as progress:
        run = run_engine(directory, plan, threads, options, partial(progress, "passes"))
    if output is not None:
        with writing(output, "--output"):
            output.write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(asdict(run)) if json_ else engine_report(run))
    if not run.complete:
        raise typer.Exit(130)
    if any(cell.identical and cell.identical[0] < cell.identical[1] for cell in run.cells):
        print("error: texts differ from plain decoding's.", file=sys.stderr)
        raise typer.Exit(1)


@app.command(epilog="Example: dflash-trt bench matrix build_configs/pycode.yaml --output loads")
def matrix(
    config: Config,
    output: Annotated[
        Path, typer.Option(help="Folder of builds, loads and the plot; results in it are kept.")
    ],
    methods: Annotated[str, typer.Option(help="Some of none, ngram, eagle3, dflash.")] = (
        "none,dflash"
    ),
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent users.")] = "1,8",
    prompts: Annotated[str, typer.Option(help="pycode, or files of JSON lines.")] = "pycode",
    requests: Annotated[int, typer.Option(min=1, help="Per load, at least twice its users.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """Serve each method and measure it with AIPerf.

    Each method is loaded with each number of users and each prompts. Resumes an interrupted run.
    """
    from dflash_trt.bench import Matrix, load_asked, matrix_table, run_matrix
    from dflash_trt.config import Method, load_config

    users: tuple[int, ...] = _numbers("concurrency", concurrency, int, least=1)
    names, count = prompts.split(","), max(requests, 2 * max(users))
    plan = Matrix(
        config=load_config(config),
        methods=_some_of("methods", methods, get_args(Method)),
        users=users,
        prompts={label: load_asked(name, count) for label, name in _labeled(names).items()},
        requests=requests,
        max_tokens=max_tokens,
    )
    with writing(output, "--output"), reporting() as progress:
        loads, complete = run_matrix(plan, output, progress)
    if loads:
        print(matrix_table(loads))
    if not complete:
        raise typer.Exit(130)
    if failed := sum(load.error is not None for load in loads):
        print(f"error: {failed} loads failed; the table says why.", file=sys.stderr)
        raise typer.Exit(1)


def _labeled(names: list[str]) -> dict[str, str]:
    """Return names by label: files by base name, if these differ."""
    short = {Path(name).name: name for name in names}
    return short if len(short) == len({*names}) else {name: name for name in names}


def _some_of(name: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Split comma-separated words, without duplicates; RequestError for an unknown one."""
    found = tuple(dict.fromkeys(text.split(",")))
    for each in found:
        if each not in known:
            raise RequestError(
                f"--{name}: there is no {name.removesuffix('s')} {each}",
                f"Known: {', '.join(known)}",
            )
    return found


def _numbers(
    name: str, text: str, kind: type, word: str | None = None, least: float = 1e-3
) -> tuple[Any, ...]:
    """Parse comma-separated numbers, at least `least` each; `word` stands for None."""
    found = []
    for part in text.split(","):
        try:
            found.append(None if part.strip() == word else kind(part))
        except ValueError:
            raise RequestError(
                f"--{name} {text}: {part!r} is no number",
                f"Give numbers with commas{f', or {word}' if word else ''}",
            ) from None
        if found[-1] is not None and not found[-1] >= least:
            raise RequestError(f"--{name} {text}: {part} is too small", "Give a larger number")
    return tuple(found)
