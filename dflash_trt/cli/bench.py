"""`dflash-trt bench ...`: measure, report, compare."""
# ruff: noqa: PLC0415

import json
import sys
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_trt.cli.output import Built, Config, Json, print_json, reporting, writing
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from dflash_trt.bench import Page, Run, ServerRun

app = typer.Typer(help="Measure engines and servers.", no_args_is_help=True, rich_markup_mode=None)
Output = Annotated[Path | None, typer.Option(help="Write the results as JSON.")]
ReportFolder = Annotated[
    Path | None, typer.Option(help="Write report.html and report.md to this folder.")
]
SERVE_OPTIONS = (
    *("requests", "prompts", "turns", "system", "max_tokens", "temperature", "seed"),
    *("goal_first_token", "goal_inter_token", "model"),
)
MATRIX_OPTIONS = (
    *("prompts", "requests", "max_tokens", "goal_first_token", "goal_inter_token", "price"),
)
OPTIONS = ("max_tokens", "prompt_count", "repeats", "seed")  # options that no cell says


@app.command()
def engine(
    directory: Built,
    prompts: Annotated[
        list[str],
        typer.Option(
            help="pycode, synthetic:LENGTH, a task such as gsm8k, or a file of JSON lines."
        ),
    ] = ["pycode"],  # noqa: B006
    methods: Annotated[
        str,
        typer.Option(
            help="Some of plain, dflash, adaptive, adaptive-no-lookup, lookup, draft-model."
        ),
    ] = "plain,dflash",
    draft_tokens: Annotated[str, typer.Option(help="Numbers, or auto.")] = "auto",
    batch: Annotated[str, typer.Option(help="Sequences at a time.")] = "1",
    context: Annotated[str, typer.Option(help="Tokens of each prompt, or as-is.")] = "as-is",
    threads: Annotated[str | None, typer.Option(help="CPU threads. Default: as it serves.")] = None,
    temperature: Annotated[str, typer.Option(help="0: greedy.")] = "0",
    max_tokens: Annotated[int, typer.Option(min=1, help="EOS is ignored.")] = 128,
    prompt_count: Annotated[int, typer.Option(min=1, help="At most, of each kind.")] = 16,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    seed: int = 0,
    draft_model: Annotated[
        Path | None, typer.Option(help="A build whose target drafts (method draft-model).")
    ] = None,
    output: Output = None,
    report: ReportFolder = None,
    json_: Json = False,
) -> None:
    """Compare methods of decoding in turns over the same prompts, in engines of its own."""
    from dflash_trt.bench import METHODS, Plan, engine_page, load_task, run_engine
    from dflash_trt.build import read_manifest
    from dflash_trt.engines import read_infos

    options = {name: str(value) for name, value in locals().items() if name in OPTIONS}
    manifest = read_manifest(directory)
    labels = [Path(name).name for name in prompts]  # short for files
    if len({*labels}) < len(labels):
        labels = prompts
    tasks = {
        label: load_task(
            name,
            directory / "tokenizer",
            vocab_size=manifest["target"]["vocab_size"],
            longest=manifest["config"]["serving"]["max_seq_len"] - max_tokens,
            count=prompt_count,
        )
        for label, name in zip(labels, prompts, strict=True)
    }
    plan = Plan(
        tasks=tasks,
        max_tokens=max_tokens,
        methods=_some_of("methods", methods, METHODS),
        draft_tokens=_numbers("draft-tokens", draft_tokens, int, "auto"),
        batches=_numbers("batch", batch, int),
        contexts=_numbers("context", context, int, "as-is"),
        temperatures=_numbers("temperature", temperature, float, least=0),
        repeats=repeats,
        seed=seed,
        draft_model=draft_model,
    )
    counts = _numbers(
        "threads", threads or str(read_infos(directory / "engines")[0].cpu_threads), int
    )
    with reporting() as progress:
        run = run_engine(directory, plan, counts, options, progress)
    _hand_out(run, engine_page(run), output, report, json_)
    if any(cell.identical and cell.identical[0] < cell.identical[1] for cell in run.cells):
        print("error: texts differ from plain decoding's.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def serve(
    url: Annotated[str, typer.Argument(help="HOST:PORT, or a URL.")],
    protocol: Annotated[
        str, typer.Option(help="triton-grpc, triton-http or openai.")
    ] = "triton-grpc",
    model: Annotated[str | None, typer.Option(help="For openai; default: the first.")] = None,
    users: Annotated[str, typer.Option(help="Users who wait for answers; 0: none.")] = "1,4,8",
    rates: Annotated[str, typer.Option(help="Also Poisson arrivals, per second.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 64,
    prompts: Annotated[
        str, typer.Option(help="pycode, a task such as gsm8k, or a file of JSON lines.")
    ] = "pycode",
    turns: Annotated[
        int, typer.Option(min=1, help="Prompts of one chat, sent back whole each time.")
    ] = 1,
    system: Annotated[
        Path | None, typer.Option(help="File with the system prompt of all chats.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    seed: int = 0,
    goal_first_token: Annotated[float, typer.Option(help="Milliseconds, for goodput.")] = 500.0,
    goal_inter_token: Annotated[float, typer.Option(help="Milliseconds, for goodput.")] = 50.0,
    output: Output = None,
    report: ReportFolder = None,
    json_: Json = False,
) -> None:
    """Load a server and say how fast it answers: users in turns, or random arrivals."""
    import asyncio

    from dflash_trt.bench import (
        Ask,
        Goal,
        Level,
        Load,
        ServerRun,
        load_asked,
        measure_server,
        server_page,
    )

    options = {name: str(value) for name, value in locals().items() if name in SERVE_OPTIONS}
    asks = [
        Ask(prompt, max_tokens, temperature, seed + i)
        for i, prompt in enumerate(load_asked(prompts, requests))
    ]
    loads = [Load(users=number) for number in _numbers("users", users, int, least=0) if number]
    loads += [Load(rate=rate) for rate in _numbers("rates", rates, float)] if rates else []
    if not loads:
        raise RequestError("there is no load: no users and no rates", "Give --users or --rates")
    goal = Goal(first_token=goal_first_token / 1e3, inter_token=goal_inter_token / 1e3)
    levels: list[Level] = []
    complete = True
    with reporting() as progress:
        told = partial(progress, "requests")
        work = measure_server(
            *(protocol, url, model, loads, asks, requests, goal, told, levels),
            turns=turns,
            system=_text_of(system) if system else "",
        )
        try:
            asyncio.run(work)
        except KeyboardInterrupt:
            complete = False
    run = ServerRun(url=url, protocol=protocol, options=options, levels=levels, complete=complete)
    _hand_out(run, server_page(run), output, report, json_)
    if any(level.errors for level in levels):
        print("error: not every request was answered; the table says why.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def matrix(
    config: Config,
    output: Annotated[
        Path, typer.Option(help="Folder of cells, builds and report; what it holds is kept.")
    ],
    methods: Annotated[
        str, typer.Option(help="Some of none, ngram, draft_model, eagle3, dflash, lilicorr.")
    ] = "none,dflash",
    concurrency: Annotated[str, typer.Option(help="Users who wait for answers.")] = "1,8",
    prompts: Annotated[
        str, typer.Option(help="pycode, tasks such as gsm8k, files of JSON lines.")
    ] = "pycode",
    thinking: Annotated[
        str,
        typer.Option(help="What the chat template is told: default, off, on, low, medium, high."),
    ] = "default",
    requests: Annotated[int, typer.Option(min=1, help="Of a cell; or twice its users.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    goal_first_token: Annotated[float, typer.Option(help="Milliseconds, for goodput.")] = 500.0,
    goal_inter_token: Annotated[float, typer.Option(help="Milliseconds, for goodput.")] = 50.0,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Of the machine for an hour, in any money.")
    ] = None,
) -> None:
    """Serve and measure each method with each number of users and prompts; go on where it was."""
    from dflash_trt.bench import (
        SERVED_METHODS,
        THINKING,
        Goal,
        Matrix,
        matrix_page,
        read_prompt_sets,
        run_matrix,
        to_markdown,
    )
    from dflash_trt.config import load_config

    options = {name: str(value) for name, value in locals().items() if name in MATRIX_OPTIONS}
    users: tuple[int, ...] = _numbers("concurrency", concurrency, int, least=1)
    plan = Matrix(
        config=load_config(config),
        methods=_some_of("methods", methods, SERVED_METHODS),
        users=users,
        prompts=read_prompt_sets(prompts.split(","), max(requests, 2 * max(users))),
        thinking=_some_of("thinking", thinking, THINKING),
        requests=requests,
        max_tokens=max_tokens,
        goal=Goal(first_token=goal_first_token / 1e3, inter_token=goal_inter_token / 1e3),
    )
    with writing(output, "--output"), reporting() as progress:
        run = run_matrix(plan, output, options, price, progress)
    print(to_markdown(matrix_page(run)))
    if not run.complete:
        raise typer.Exit(130)
    if failed := sum(cell.error is not None for cell in run.cells):
        print(f"error: {failed} cells failed; the report says why.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A file of `bench .. --output`.")],
    after: Annotated[Path, typer.Argument(help="A later one.")],
    limit: Annotated[
        float, typer.Option(min=0.0, help="How much worse is too much, as a share.")
    ] = 0.05,
    absolute: Annotated[
        bool, typer.Option("--absolute", help="Also tokens/s: for a quiet machine of one kind.")
    ] = False,
    json_: Json = False,
) -> None:
    """Say what changed between two runs, of engines beyond noise; exit 1 if it became worse."""
    from dflash_trt.bench import Run, compare_servers, read_run
    from dflash_trt.bench import compare as compared

    old, new = read_run(before), read_run(after)
    if isinstance(old, Run) and isinstance(new, Run):
        found = compared(old, new, limit, absolute)
    elif isinstance(old, Run) or isinstance(new, Run):
        raise RequestError(
            "one is a run of engines and the other of servers", "Compare two of a kind"
        )
    else:
        found = compare_servers(old, new)
    if json_:
        print_json(changes=[asdict(each) for each in found])
    for each in found if not json_ else []:
        middle, low, high = each.relative
        print(
            f"{each.verdict:<7} {each.figure:<15} {each.before:.3g} -> {each.after:.3g} "
            f"({middle:+.1%}; {low:+.1%} to {high:+.1%})  {each.setting}"
        )
    if any(each.verdict == "worse" for each in found):
        raise typer.Exit(1)


@app.command()
def published(
    name: Annotated[str, typer.Argument(help="A part of the drafter's name; all without.")] = "",
) -> None:
    """Show what others measured, by pair, with the source and hardware of each figure."""
    from dflash_trt.bench import Page, published_tables, to_markdown
    from dflash_trt.roofline import published_data

    known_drafters = published_data()["drafters"]
    drafters = {each: of for each, of in known_drafters.items() if name.lower() in each.lower()}
    if not drafters:
        known = ", ".join(known_drafters)
        raise RequestError(f"nothing is published of a drafter {name}", f"Known: {known}")
    for drafter, of in drafters.items():
        print(to_markdown(Page(drafter, [], [], published_tables(of["target"], drafter))))


def _hand_out(
    run: "Run | ServerRun", page: "Page", output: Path | None, report: Path | None, json_: bool
) -> None:
    """Write the files that were asked for and print the run; exit 130 if it was interrupted."""
    from dflash_trt.bench import to_markdown, write_page, write_run

    if output is not None:
        with writing(output, "--output"):
            write_run(output, run)
    if report is not None:
        with writing(report, "--report"):
            write_page(report, page)
    print(json.dumps(asdict(run)) if json_ else to_markdown(page))
    if not run.complete:
        raise typer.Exit(130)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {file}: {error}", "Give a text file in UTF-8") from None


def _some_of(name: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Words with commas between them, each once."""
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
    """Parse numbers with commas between them, at least `least` each; `word` stands for None."""
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
