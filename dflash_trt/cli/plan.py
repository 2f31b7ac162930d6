"""`dflash-trt plan`: a plan as tables."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Column, Table

from dflash_trt.cli.show import on_one_line, text_console

MIB = 1 << 20
GIB = 1 << 30
WIDTH = 140


def show_plan(plan: Mapping[str, Any]) -> None:
    console = text_console(WIDTH)
    console.print(
        *_heading_lines(plan),
        *("", _memory_table(plan), "", _speed_table(plan), ""),
        f"These are estimates. {_accuracy(plan)} (docs/speculation.md). Prefill is not in them.",
        sep="\n",
        markup=False,
    )
    if not plan["speed"]:
        console.print(
            "The weights do not fit: take more or larger GPUs, or a quantized checkpoint."
        )


def _accuracy(plan: Mapping[str, Any]) -> str:
    errors = plan["errors"]
    if errors is None:
        return "Of a prototype of this engine single steps of one model were measured, on one H200"
    median, nine_of_ten = (math.expm1(errors[name]) for name in ("median", "nine_of_ten"))
    return (
        f"Of {errors['checked']} published figures that the model was not fitted to, half are off "
        f"by less than {median:.0%} and nine of ten by less than {nine_of_ten:.0%}"
    )


def _heading_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    machine = plan["machine"]
    yield f"{plan['name']} on {machine['gpus']} x {machine['gpu']} ({machine['name']})"
    for part in ("target", "drafter", "assumed", "built"):
        for name, value in (plan[part] or {}).items():
            yield f"  {part:<9}{name:<24}{on_one_line(value)}"


def _table(title: str, *columns: str) -> Table:
    headers = [Column(name, justify="right", no_wrap=True) for name in columns]
    return Table(*headers, title=title, title_justify="left", box=None, pad_edge=False)


def _memory_table(plan: Mapping[str, Any]) -> Table:
    contexts = [f"{context // 1024}k" for context in plan["memory"][0]["sequences"]]
    hybrid = any(row["state_bytes"] for row in plan["memory"])
    states = ["state of a sequence, MiB"] if hybrid else []
    table = _table(
        "Memory of a GPU in GiB, and sequences on all of them by length",
        *("layout", "target", "drafter", "left", "KV of a token, KiB", *states, *contexts),
    )
    for row in plan["memory"]:
        name = f"{row['instances']} x {row['layout']}"
        sizes = (row["target_bytes"], row["drafter_bytes"], row["free_bytes"])
        cells = [f"{size / GIB:.1f}" for size in sizes]
        fits = [f"{count:,}" for count in row["sequences"].values()]
        cells.append(f"{row['kv_bytes_per_token'] / 1024:.1f}")
        if hybrid:
            cells.append(f"{row['state_bytes'] / MIB:.1f}")
        table.add_row(name, *cells, *fits)
    return table


def _speed_table(plan: Mapping[str, Any]) -> Table:
    table = _table(
        f"tokens/s, sequences of {plan['assumed']['context']} tokens, best layout of each method",
        *("sequences", "method", "user", "GPU", "over plain", "drafts", "round, ms", "layout"),
    )
    plain = {
        x["concurrency"]: x["tokens_per_user"] for x in plan["speed"] if x["method"] == "plain"
    }
    for point in sorted(plan["speed"], key=lambda point: point["concurrency"]):
        user, beside = point["tokens_per_user"], plain.get(point["concurrency"])
        table.add_row(
            f"{point['concurrency']:,}",
            point["method"],
            f"{user:,.0f}",
            f"{point['tokens_per_gpu']:,.0f}",
            f"{user / beside:.2f}x" if beside else "",
            str(point["draft_tokens"]),
            f"{1000 * sum(point['round'].values()):.2f}",
            point["layout"],
        )
    return table
