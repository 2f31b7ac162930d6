"""The report of `plan` as text."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from dflash_trt.cli.report import text_console, text_table

METHODS = ("plain", "EAGLE-3", "DFlash")
GIB = 1 << 30
WIDTH = 140


def show_plan(plan: Mapping[str, Any]) -> None:
    """Print what `planning.plan` gave."""
    console = text_console(WIDTH)
    for line in _heading(plan):
        console.print(line, markup=False)
    for table in (_memory(plan), _speed(plan), *_chat(plan)):
        console.print()
        console.print(table)
    console.print()
    for line in _remarks(plan):
        console.print(line, markup=False)


def _heading(plan: Mapping[str, Any]) -> Iterator[str]:
    machine, assumed = plan["machine"], plan["assumed"]
    yield f"{plan['name']} on {machine['gpus']} x {machine['gpu']} ({machine['name']})"
    for role in ("target", "drafter"):
        model = plan[role]
        experts = f", {model['experts']} experts" if model["experts"] else ""
        yield (
            f"  {role:<8} {model['name']}: {model['parameters'] / 1e9:.2f} B parameters in "
            f"{' and '.join(model['formats'])}, {model['weight_bytes'] / GIB:.1f} GiB, "
            f"{model['layers']} layers{experts}"
        )
        for remark in model["estimated"]:
            yield f"  {'':<8} an estimate: {remark}"
    yield (
        f"  KV cache {assumed['kv_bytes']:g} bytes a number; drafter attention "
        f"{assumed['attention_backend']}; "
        f"acceptance length {assumed['acceptance']:.2f} of {assumed['block']} "
        f"({assumed['acceptance_from']})"
    )
    yield (
        f"  EAGLE-3  a chain of three drafts, acceptance length {assumed['eagle_acceptance']:.2f} "
        f"({assumed['eagle_acceptance_from']})"
    )
    if built := plan["built"]:
        schedule = built["draft_len_schedule"]
        yield (
            f"  {'build':<8} {built['layout']}, {built['max_batch_size']} sequences of "
            f"{built['max_seq_len']} tokens"
            + (f", drafts by sequences {schedule}" if schedule else "")
        )


def _memory(plan: Mapping[str, Any]) -> Table:
    contexts = [f"\n{int(context) // 1024}k" for context in plan["memory"][0]["by_context"]]
    table = text_table(
        "Memory of a GPU, and sequences on all of them by length",
        *("layout", "target\nGiB", "drafter\nGiB", "left\nGiB", "KV of a\ntoken, KiB", *contexts),
    )
    for row in plan["memory"]:
        name = row["layout"] if row["gpus"] == 1 else f"{row['instances']} x {row['layout']}"
        sizes = (row["target_bytes"], row["drafter_bytes"], row["free_bytes"])
        cells = [f"{size / GIB:.1f}" for size in sizes]
        counts = [entry["sequences"] for entry in row["by_context"].values()]
        fits = [f"{count:,}" if count else "-" for count in counts]
        table.add_row(name, *cells, f"{row['kv_bytes_per_token'] / 1024:.1f}", *fits)
    return table


def _speed(plan: Mapping[str, Any]) -> Table:
    context = plan["assumed"]["context"]
    more = {"DFlash": ("\nover plain", "\ndrafts", "\nround, ms")}
    columns = ["sequences"]
    for method in METHODS:
        columns += [f"{method}\nuser", "\nGPU", *more.get(method, ()), "\nlayout"]
    title = f"tokens/s, sequences of {context} tokens, best layout of each"
    table = text_table(title, *columns)
    by_level: dict[int, dict[str, Any]] = {}
    for point in plan["speed"]:
        by_level.setdefault(point["concurrency"], {})[point["method"]] = point
    for level, points in sorted(by_level.items()):
        cells = [f"{level:,}"]
        for method in METHODS:
            if (point := points.get(method)) is None:
                cells += [""] * (3 + len(more.get(method, ())))
                continue
            cells += [f"{point['tokens_per_user']:,.0f}", f"{point['tokens_per_gpu']:,.0f}"]
            if method == "DFlash":
                plain = points.get("plain")
                ratio = point["tokens_per_user"] / plain["tokens_per_user"] if plain else 0
                cells += [f"{ratio:.2f}x" if plain else "", str(point["draft_tokens"])]
                cells.append(f"{1000 * sum(point['round'].values()):.2f}")
            cells.append(point["layout"])
        table.add_row(*cells)
    return table


def _chat(plan: Mapping[str, Any]) -> Iterator[Table]:
    if not (chat := plan["chat"]) or not chat["turns"]:
        return
    reused = f"with reuse,\nlast {chat['tail']} again"
    table = text_table(
        f"First token of a chat's turns, ms ({chat['layout']}; {chat['system']} tokens of system "
        f"prompt, {chat['question']} + {chat['answer']} a turn)",
        *("\nturn", "tokens of\nits prompt", "without\nreuse", reused, "\nshare"),
    )
    for turn in chat["turns"]:
        whole, rest = turn["without_reuse"], turn["with_reuse"]
        cells = f"{whole * 1e3:,.1f}", f"{rest * 1e3:,.1f}", f"{rest / whole:.0%}"
        table.add_row(f"{turn['turn']}", f"{turn['prompt']:,}", *cells)
    yield table


def _remarks(plan: Mapping[str, Any]) -> Iterator[str]:
    errors = plan["errors"]
    median, nine_of_ten = (math.expm1(errors[name]) for name in ("median", "nine_of_ten"))
    yield (
        f"These are estimates. Of {errors['checked']} published figures that the model was not "
        f"fitted to, half are off by less than {median:.0%} and nine of ten by less than "
        f"{nine_of_ten:.0%} (docs/planning.md). Prefill is not in them."
    )
    if chat := plan["chat"]:
        yield (
            "First tokens were compared with no published figure. This build "
            + ("reuses prompts" if chat["on"] else "reuses none")
            + ": serving.prefix_cache (docs/tensorrt_llm.md)."
        )
    if plan["assumed"]["attention_backend"] != "TRTLLM":
        entries = plan["memory"][-1]["by_context"].values()
        fractions = [x["free_gpu_memory_fraction"] for x in entries if x["sequences"]]
        if fractions:
            yield (
                "The drafter's context is a dense arena: these sequences fit with a "
                f"free_gpu_memory_fraction of {min(fractions):.2f} to {max(fractions):.2f}."
            )
    if not plan["speed"]:
        yield "The weights do not fit: take more GPUs, larger ones, or a quantized checkpoint."
