"""The plan's Pareto picture as SVG: speed for each user against throughput of each GPU."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 88, 32, 92, 116  # margins of the plot
# colour-blind safe (Okabe and Ito)
COLOURS = {"plain": "#6b7280", "EAGLE-3": "#d55e00", "DFlash": "#0072b2"}
LABELS = {"plain": "plain decoding", "EAGLE-3": "EAGLE-3-like chain", "DFlash": "DFlash"}
APART = 20  # pixels between the middle of a label and points or other labels
Dot = tuple[float, float]


def draw(plan: Mapping[str, Any]) -> str:
    """SVG text of what `planning.report.plan` gave; the points of each method's front, joined."""
    fronts = {
        method: [p for p in plan["speed"] if p["method"] == method and p["on_front"]]
        for method in COLOURS
    }
    points = [point for front in fronts.values() for point in front]
    if not points:
        return _document(plan, ["<text x='480' y='300' class='label'>nothing fits</text>"])
    step = _round(max(point["tokens_per_user"] for point in points) / 8)
    right = step * math.ceil(max(point["tokens_per_user"] for point in points) * 1.03 / step)
    rates = [point["tokens_per_gpu"] for point in points]
    levels = _levels(min(rates), max(rates))
    low, high = math.log10(levels[0]), math.log10(levels[-1])

    def place(x: float, y: float) -> Dot:
        share = (math.log10(y) - low) / (high - low)
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / right
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    body = _axes([i * step for i in range(round(right / step) + 1)], levels, place)
    dots = {
        method: [place(point["tokens_per_user"], point["tokens_per_gpu"]) for point in front]
        for method, front in fronts.items()
    }
    taken = [dot for each in dots.values() for dot in each]
    for method, front in reversed(fronts.items()):
        body += _line(method, front, dots[method], taken)
    return _document(plan, body + _legend([m for m, front in fronts.items() if front]))


def _line(
    method: str, front: Sequence[Mapping[str, Any]], dots: Sequence[Dot], taken: list[Dot]
) -> list[str]:
    """The front's curve, its points, and as many sequence counts beside them as there is room for.

    taken: where points and labels are; grows by the labels.
    """
    colour = COLOURS[method]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5" '
        'stroke-linejoin="round"/>'
    ]
    for point, (x, y) in zip(front, dots, strict=True):
        told = (
            f"{LABELS[method]}, {point['concurrency']} sequences: "
            f"{point['tokens_per_user']:,.0f} tokens/s a user, "
            f"{point['tokens_per_gpu']:,.0f} a GPU, {point['layout']}, "
            f"{point['draft_tokens']} drafts"
        )
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#ffffff" stroke="{colour}" '
            f'stroke-width="2.5"><title>{escape(told)}</title></circle>'
        )
        # above the outer curve, below the others: off the lines
        outer = method == "DFlash"
        label = (x + 7, y - 8) if outer else (x - 8, y + 15)
        inside = label[0] > LEFT + 36 and label[1] < HEIGHT - BOTTOM - 4
        centre = label[0] + (10 if outer else -10), label[1] - 4
        others = (dot for dot in taken if dot != (x, y))
        if inside and all(math.dist(centre, other) > APART for other in others):
            taken.append(centre)
            parts.append(
                f'<text x="{label[0]:.1f}" y="{label[1]:.1f}" class="count" '
                f'text-anchor="{"start" if outer else "end"}" style="fill: {colour}">'
                f"{point['concurrency']:,}</text>"
            )
    return parts


def _axes(
    speeds: Sequence[float], levels: Sequence[float], place: Callable[[float, float], Dot]
) -> list[str]:
    """Grid, ticks and names."""
    bottom, edge = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for speed in speeds:
        x, _ = place(speed, levels[0])
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 22}" class="tick" text-anchor="middle">'
            f"{speed:,.0f}</text>"
        )
    for level in levels:
        _, y = place(0, level)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{edge}" y2="{y:.1f}" class="grid"/>')
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 4:.1f}" class="tick" text-anchor="end">'
            f"{level:,g}</text>"
        )
    middle = (TOP + bottom) / 2
    parts += [
        f'<line x1="{LEFT}" y1="{bottom}" x2="{edge}" y2="{bottom}" class="axis"/>',
        f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{bottom}" class="axis"/>',
        f'<text x="{(LEFT + edge) / 2}" y="{bottom + 48}" class="label" text-anchor="middle">'
        "speed for each user, tokens/s</text>",
        f'<text transform="translate(24 {middle}) rotate(-90)" class="label" '
        'text-anchor="middle">throughput of each GPU, tokens/s</text>',
    ]
    return parts


def _legend(methods: Sequence[str]) -> list[str]:
    parts, x, y = [], WIDTH - RIGHT - 210, TOP + 16
    parts.append(
        f'<rect x="{x - 14}" y="{y - 20}" width="218" height="{26 * len(methods) + 14}" rx="6" '
        'fill="#ffffff" stroke="#d1d5db"/>'
    )
    for i, method in enumerate(reversed(methods)):
        line = y + 26 * i
        parts += [
            f'<line x1="{x}" y1="{line}" x2="{x + 30}" y2="{line}" stroke="{COLOURS[method]}" '
            'stroke-width="2.5"/>',
            f'<circle cx="{x + 15}" cy="{line}" r="4" fill="#ffffff" stroke="{COLOURS[method]}" '
            'stroke-width="2.5"/>',
            f'<text x="{x + 42}" y="{line + 5}" class="label">{LABELS[method]}</text>',
        ]
    return parts


def _document(plan: Mapping[str, Any], body: Sequence[str]) -> str:
    machine, assumed, errors = plan["machine"], plan["assumed"], plan["errors"]
    title = f"{plan['target']['name']} on {machine['gpus']} x {machine['gpu']}"
    under = (
        f"{assumed['context']} tokens a sequence; acceptance length {assumed['acceptance']:.1f} "
        f"with DFlash, {assumed['eagle_acceptance']:.1f} with EAGLE-3; best layout at every point"
    )
    foot = (
        "Numbers beside the points: sequences on all GPUs together.",
        f"Estimates, without prefill: nine of ten published figures are within "
        f"{math.expm1(errors['nine_of_ten']):.0%} of what this model says (docs/planning.md).",
    )
    style = (
        "text { font-family: system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #111827 }"
        " .title { font-size: 20px; font-weight: 600 } .under { font-size: 13px; fill: #4b5563 }"
        " .label { font-size: 14px } .tick { font-size: 12px; fill: #4b5563 }"
        " .grid { stroke: #e5e7eb } .axis { stroke: #6b7280 }"
        " .count { font-size: 11px; stroke: #ffffff; stroke-width: 3px; paint-order: stroke }"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}">',
            f"<style>{style}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="38" class="title">{escape(title)}</text>',
            f'<text x="{LEFT}" y="62" class="under">{escape(under)}</text>',
            *body,
            *(
                f'<text x="{LEFT}" y="{HEIGHT - 36 + 20 * i}" class="under">{escape(text)}</text>'
                for i, text in enumerate(foot)
            ),
            "</svg>",
            "",
        ]
    )


def _round(value: float) -> float:
    """The next of 1, 2, 2.5 and 5 with zeros."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(x * power for x in (1, 2, 2.5, 5, 10) if x * power >= value)


def _levels(least: float, most: float) -> list[float]:
    """1, 2 and 5 with zeros, from below `least` to above `most`."""
    first, last = math.floor(math.log10(least)) - 1, math.ceil(math.log10(most))
    steps: list[float] = [x * 10.0**power for power in range(first, last + 1) for x in (1, 2, 5)]
    start = max((step for step in steps if step < 0.8 * least), default=steps[0])
    end = min(step for step in steps if step >= most and step > start)
    return [step for step in steps if start <= step <= end]
