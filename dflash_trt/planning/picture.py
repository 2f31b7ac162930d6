"""The plan's Pareto picture as SVG: speed for each user against throughput of each GPU."""

import math
from collections.abc import Mapping
from typing import Any

from dflash_trt.charts import Curve, curves

LABELS = {"DFlash": "DFlash", "EAGLE-3": "EAGLE-3-like chain", "plain": "plain decoding"}


def draw(plan: Mapping[str, Any]) -> str:
    """Draw what `planning.plan` gave: each method's Pareto front as a curve, in SVG."""
    data = []
    for method, name in LABELS.items():
        front = [p for p in plan["speed"] if p["method"] == method and p["on_front"]]
        hints = [
            f"{name}, {point['concurrency']} sequences: {point['tokens_per_user']:,.0f} tokens/s "
            f"a user, {point['tokens_per_gpu']:,.0f} a GPU, {point['layout']}, "
            f"{point['draft_tokens']} drafts"
            for point in front
        ]
        points = [(point["tokens_per_user"], point["tokens_per_gpu"]) for point in front]
        labels = [f"{point['concurrency']:,}" for point in front]
        if front:
            data.append(Curve(name, points, labels, hints))
    machine, assumed = plan["machine"], plan["assumed"]
    notes = (
        f"{assumed['context']} tokens a sequence; acceptance length {assumed['acceptance']:.1f} "
        f"with DFlash, {assumed['eagle_acceptance']:.1f} with EAGLE-3; best layout at every point.",
        "Numbers beside the points: sequences on all GPUs together.",
        "Estimates, without prefill: nine of ten published figures are within "
        f"{math.expm1(plan['errors']['nine_of_ten']):.0%} of what this model says "
        "(docs/planning.md).",
    )
    return curves(
        f"{plan['target']['name']} on {machine['gpus']} x {machine['gpu']}",
        "speed for each user, tokens/s",
        "throughput of each GPU, tokens/s",
        data,
        log_y=True,
        notes=notes if data else ("nothing fits",),
    )
