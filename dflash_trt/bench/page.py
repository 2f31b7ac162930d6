"""A report: one self-contained HTML file, and Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Table:
    """Rows of cells by column; `note` says what they are and their units. Not shown if empty."""

    title: str
    note: str
    rows: Sequence[Mapping[str, str]]

    @property
    def head(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def lines(self) -> list[list[str]]:
        """The cells of each row; "" where a row has none of a column."""
        return [[row.get(name, "") for name in self.head] for row in self.rows]


@dataclass(frozen=True)
class Page:
    """What a report says; charts are SVG and stand in the HTML alone."""

    title: str
    about: Sequence[str]
    charts: Sequence[str]
    tables: Sequence[Table]


def write_page(directory: Path, page: Page) -> None:
    """Write `report.html` and `report.md`; OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.html").write_text(to_html(page), encoding="utf-8")
    (directory / "report.md").write_text(to_markdown(page), encoding="utf-8")


def to_markdown(page: Page) -> str:
    lines = [f"# {page.title}", ""]
    for about in page.about:
        lines += [about, ""]
    for table in filter(lambda table: table.rows, page.tables):
        lines += [f"## {table.title}", "", table.note, ""]
        rule = ["---", *["---:"] * (len(table.head) - 1)]
        lines += [*map(_row, (table.head, rule, *table.lines)), ""]
    return "\n".join(lines)


def to_html(page: Page) -> str:
    """One file with the charts inside: it links to nothing."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, trim_blocks=True
    )
    return environment.get_template(TEMPLATE.name).render(page=page)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
