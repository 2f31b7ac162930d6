"""Charts as SVG text: curves through points, and bars side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1120, 410
LEFT, RIGHT, TOP, BOTTOM = 64, 370, 40, 66  # of the plot inside the picture; the legend is right
COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#b08900", "#0b7285", "#c2255c", "#8a8f98")
FONT = 'font-family="system-ui, sans-serif"'


@dataclass(frozen=True)
class Curve:
    """Points in order, each with a label or none."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    """A bar for each group, with the range that its value had; None: not measured."""

    name: str
    values: Sequence[tuple[float, float, float] | None]  # middle, low, high


def curves(title: str, x_label: str, y_label: str, data: Sequence[Curve]) -> str:
    """Curves over one pair of axes that start at 0."""
    points = [point for curve in data for point in curve.points]
    x_ticks, y_ticks = (_ticks(max(p[axis] for p in points)) for axis in (0, 1))
    parts = _frame(title, x_label, y_label, y_ticks)
    for tick in x_ticks:
        at = _x(tick / x_ticks[-1])
        parts.append(_text(at, HEIGHT - BOTTOM + 18, _number(tick), "middle"))
    for i, curve in enumerate(data):
        colour = COLOURS[i % len(COLOURS)]
        dashes = ' stroke-dasharray="7 4"' * (i // len(COLOURS) % 2)
        places = [(_x(x / x_ticks[-1]), _y(y / y_ticks[-1])) for x, y in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        line = f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'
        parts.append(f'<polyline points="{path}" {line}/>')
        for j, (x, y) in enumerate(places):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            if j < len(curve.labels):
                parts.append(_text(x + 6, y - 6, curve.labels[j], "start", 11))
        key, top = WIDTH - RIGHT + 16, _legend_y(i)
        parts.append(f'<polyline points="{key},{top - 4} {key + 30},{top - 4}" {line}/>')
        parts.append(_text(key + 36, top, _short(curve.name, RIGHT - 60), "start"))
    return _picture(parts)


def bars(
    title: str, y_label: str, groups: Sequence[str], data: Sequence[Bars], line: float | None = None
) -> str:
    """Bars by group, their ranges as thin lines; line: a value to compare with, drawn across."""
    tops = [value[2] for each in data for value in each.values if value is not None]
    y_ticks = _ticks(max([*tops, line or 0.0]))
    parts = _frame(title, "", y_label, y_ticks)
    group_width = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    width = group_width * 0.8 / max(len(data), 1)
    for g, group in enumerate(groups):
        start = LEFT + g * group_width
        for row, part in enumerate(group.split(", ")):
            under = HEIGHT - BOTTOM + 18 + 14 * row
            parts.append(
                _text(start + group_width / 2, under, _short(part, 1.1 * group_width), "middle", 10)
            )
        for i, each in enumerate(data):
            value = each.values[g]
            if value is None:
                continue
            x = start + group_width * 0.1 + i * width
            middle, low, high = (_y(part / y_ticks[-1]) for part in value)
            bottom, colour = HEIGHT - BOTTOM, COLOURS[i % len(COLOURS)]
            parts.append(
                f'<rect x="{x:.1f}" y="{middle:.1f}" width="{width * 0.9:.1f}" '
                f'height="{bottom - middle:.1f}" fill="{colour}"/>'
            )
            centre = x + width * 0.45
            parts.append(
                f'<line x1="{centre:.1f}" y1="{high:.1f}" x2="{centre:.1f}" y2="{low:.1f}" '
                'stroke="#111" stroke-width="1"/>'
            )
    if line is not None:
        y = _y(line / y_ticks[-1])
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#111" '
            'stroke-dasharray="4 4"/>'
        )
    for i, each in enumerate(data):
        key, top = WIDTH - RIGHT + 16, _legend_y(i)
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<rect x="{key}" y="{top - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(key + 17, top, _short(each.name, RIGHT - 40), "start"))
    return _picture(parts)


def _frame(title: str, x_label: str, y_label: str, y_ticks: Sequence[float]) -> list[str]:
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    parts.append(
        f'<text x="{LEFT}" y="22" {FONT} font-size="15" font-weight="600">{escape(title)}</text>'
    )
    for tick in y_ticks:
        y = _y(tick / y_ticks[-1])
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, _number(tick), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 42, x_label, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle}" {FONT} font-size="12" fill="#374151" text-anchor="middle" '
        f'transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    return parts


def _legend_y(index: int) -> int:
    return TOP + 9 + 20 * index


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="{size}" fill="#374151" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _picture(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">' + "".join(parts) + "</svg>"
    )


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _ticks(largest: float) -> list[float]:
    """Round numbers from 0 to at least `largest`, about five of them."""
    rough = max(largest, 1e-9) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough)
    return [step * i for i in range(max(math.ceil(largest / step * (1 - 1e-9)), 1) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _short(text: str, width: float) -> str:
    """As much of the text as fits into so many pixels."""
    most = max(int(width / 6.2), 3)
    return text if len(text) <= most else text[: most - 1] + "…"
