"""A report: one self-contained HTML file, and Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from dflash_trt.errors import RequestError

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0;
  display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #e5e7eb; padding: .3rem .7rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
svg { max-width: 100%; height: auto; margin: 1rem 0; border: 1px solid #e5e7eb; }
.note { color: #4b5563; }
"""


@dataclass(frozen=True)
class Table:
    """Rows of the same columns, by name; `note` says what the numbers are and their units."""

    title: str
    note: str
    rows: Sequence[Mapping[str, str]]

    @property
    def head(self) -> list[str]:
        return list(self.rows[0])


@dataclass(frozen=True)
class Page:
    """What a report says; charts are SVG and stand in the HTML alone."""

    title: str
    about: Sequence[str]
    charts: Sequence[str]
    tables: Sequence[Table]


def write_page(directory: Path, page: Page) -> None:
    """Write `report.html` and `report.md`; RequestError when that cannot be done."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "report.html").write_text(to_html(page), encoding="utf-8")
        (directory / "report.md").write_text(to_markdown(page), encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"cannot write the report to {directory}: {error.strerror}", "Give another --report"
        ) from error


def to_markdown(page: Page) -> str:
    lines = [f"# {page.title}", ""]
    for about in page.about:
        lines += [about, ""]
    for table in filter(lambda table: table.rows, page.tables):
        lines += [f"## {table.title}", "", table.note, ""]
        rule = ["---", *["---:"] * (len(table.head) - 1)]
        lines += [*map(_row, (table.head, rule, *(row.values() for row in table.rows))), ""]
    return "\n".join(lines)


def to_html(page: Page) -> str:
    """With the charts, and nothing to be fetched."""
    body = [f"<h1>{escape(page.title)}</h1>"]
    body += [f'<p class="note">{escape(line)}</p>' for line in page.about]
    body += page.charts
    for table in filter(lambda table: table.rows, page.tables):
        body.append(f'<h2>{escape(table.title)}</h2><p class="note">{escape(table.note)}</p>')
        body.append("<table><tr>")
        body += [f"<th>{escape(cell)}</th>" for cell in table.head]
        body.append("</tr>")
        for row in table.rows:
            body.append(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>"
            )
        body.append("</table>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(page.title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
