"""Charts as SVG text: curves through points, and bars side by side."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1120, 410
LEFT, RIGHT, TOP, BOTTOM = 64, 370, 40, 66  # of the plot inside the picture; the legend is right
KEY = WIDTH - RIGHT + 16  # left edge of the legend
# safe for the colour-blind: the first three are Okabe and Ito's
COLOURS = ("#0072b2", "#d55e00", "#6b7280", "#862e9c", "#b08900", "#0b7285", "#c2255c", "#2b8a3e")
APART = 20  # pixels between a label's middle and other points or labels


@dataclass(frozen=True)
class Curve:
    """Points in order, each with a label and a text for the mouse, or none."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    hints: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    """A bar for each group, with the range that its value had; None: not measured."""

    name: str
    values: Sequence[tuple[float, float, float] | None]  # middle, low, high


def curves(
    title: str,
    x_label: str,
    y_label: str,
    data: Sequence[Curve],
    *,
    log_y: bool = False,
    notes: Sequence[str] = (),
) -> str:
    """Curves over one pair of axes that start at 0; notes: lines below them.

    log_y: a logarithmic axis, of values above 0. A label that would cover another is left out.
    """
    points = [point for curve in data for point in curve.points] or [(1.0, 1.0)]
    x_ticks = _ticks(max(x for x, _ in points))
    heights = [y for _, y in points]
    y_ticks = _log_ticks(min(heights), max(heights)) if log_y else _ticks(max(heights))
    place_x, place_y = _scale(x_ticks, LEFT, WIDTH - RIGHT), _y_scale(y_ticks, log_y)
    parts = _frame(title, x_label, y_label, y_ticks, place_y)
    for tick in x_ticks:
        parts.append(_text(place_x(tick), HEIGHT - BOTTOM + 18, _number(tick), "middle"))
    placed = [[(place_x(x), place_y(y)) for x, y in curve.points] for curve in data]
    taken = [place for places in placed for place in places]
    for i, (curve, places) in enumerate(zip(data, placed, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        dashes = ' stroke-dasharray="7 4"' * (i // len(COLOURS) % 2)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        line = f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'
        parts.append(f'<polyline points="{path}" {line}/>')
        for j, (x, y) in enumerate(places):
            hint = f"<title>{escape(curve.hints[j])}</title>" if j < len(curve.hints) else ""
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">{hint}</circle>'
            )
            label = curve.labels[j] if j < len(curve.labels) else ""
            middle = (x + 6 + 3 * len(label), y - 10)
            others = (place for place in taken if place != (x, y))
            if label and all(math.dist(middle, other) > APART for other in others):
                taken.append(middle)
                parts.append(_text(x + 6, y - 6, label, "start", 11))
        top = _legend_y(i)
        parts.append(f'<polyline points="{KEY},{top - 4} {KEY + 30},{top - 4}" {line}/>')
        parts.append(_text(KEY + 36, top, _short(curve.name, RIGHT - 60), "start"))
    return _picture(parts, notes)


def bars(
    title: str, y_label: str, groups: Sequence[str], data: Sequence[Bars], line: float | None = None
) -> str:
    """Bars by group, their ranges as thin lines; line: a value to compare with, drawn across."""
    tops = [value[2] for each in data for value in each.values if value is not None]
    y_ticks = _ticks(max([*tops, line or 0.0]))
    place_y = _y_scale(y_ticks)
    parts = _frame(title, "", y_label, y_ticks, place_y)
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
            middle, low, high = map(place_y, value)
            parts.append(
                f'<rect x="{x:.1f}" y="{middle:.1f}" width="{width * 0.9:.1f}" '
                f'height="{HEIGHT - BOTTOM - middle:.1f}" fill="{COLOURS[i % len(COLOURS)]}"/>'
            )
            centre = x + width * 0.45
            parts.append(_line(centre, high, centre, low, 'stroke="#111"'))
    if line is not None:
        y = place_y(line)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, 'stroke="#111" stroke-dasharray="4 4"'))
    for i, each in enumerate(data):
        top, colour = _legend_y(i), COLOURS[i % len(COLOURS)]
        parts.append(f'<rect x="{KEY}" y="{top - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(KEY + 17, top, _short(each.name, RIGHT - 40), "start"))
    return _picture(parts)


def _frame(
    title: str,
    x_label: str,
    y_label: str,
    y_ticks: Sequence[float],
    place_y: Callable[[float], float],
) -> list[str]:
    parts = [f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(title)}</text>']
    for tick in y_ticks:
        y = place_y(tick)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, 'stroke="#e5e7eb"'))
        parts.append(_text(LEFT - 8, y + 4, _number(tick), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 42, x_label, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle}" font-size="12" fill="#374151" text-anchor="middle" '
        f'transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    return parts


def _legend_y(index: int) -> int:
    return TOP + 9 + 20 * index


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {stroke}/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#374151" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _picture(parts: Sequence[str], notes: Sequence[str] = ()) -> str:
    height = HEIGHT + 20 * len(notes)
    below = [_text(LEFT, HEIGHT + 4 + 20 * i, note, "start", 13) for i, note in enumerate(notes)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" font-family="system-ui, sans-serif">'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
        + "".join([*parts, *below])
        + "</svg>"
    )


def _y_scale(ticks: Sequence[float], log: bool = False) -> Callable[[float], float]:
    if not log:
        return _scale(ticks, HEIGHT - BOTTOM, TOP)
    place = _scale([*map(math.log, ticks)], HEIGHT - BOTTOM, TOP)
    return lambda value: place(math.log(value))


def _scale(ticks: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """From a value to its place: the first tick is at `start`, the last at `end`."""
    low, high = ticks[0], ticks[-1]
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(largest: float) -> list[float]:
    """Round numbers from 0 to at least `largest`, about five of them."""
    rough = max(largest, 1e-9) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough)
    return [step * i for i in range(max(math.ceil(largest / step * (1 - 1e-9)), 1) + 1)]


def _log_ticks(smallest: float, largest: float) -> list[float]:
    """1, 2 and 5 with zeros, from below `smallest` to above `largest`."""
    powers = range(math.floor(math.log10(smallest)) - 1, math.floor(math.log10(largest)) + 2)
    steps: list[float] = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    first = max(step for step in steps if step < smallest)
    last = min(step for step in steps if step > largest)
    return [step for step in steps if first <= step <= last]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _short(text: str, width: float) -> str:
    """The text, cut to what fits into `width` pixels."""
    most = max(int(width / 6.2), 3)
    return text if len(text) <= most else text[: most - 1] + "…"
