"""Write the tables of docs/benchmarks.md from what `offline.py` measured: `table.py RESULTS`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def tables(results: dict[str, Any]) -> Iterator[str]:
    """Yield lines of Markdown; a part that was not measured is left out."""
    sizes = results.get("sizes")
    if sizes is not None:
        yield from size_tables(sizes)
    for name, took in results.get("others", {}).items():
        yield f"- {name}: {f'{took:.1f}' if isinstance(took, float) else took}"
    if "drafted" in results:
        yield "| temperature | streams | texts | that drafts change | tau |"
        yield "|---:|---:|---:|---:|---:|"
    for line in results.get("drafted", ()):
        yield (
            f"| {line['temperature']} | {line['streams']} | {line['texts']} | {line['differ']} | "
            f"{line['tau']:.2f} |"
        )
    compared = results.get("compared")
    if compared is not None:
        yield (
            f"{compared['texts']} texts in float32: {compared['differ']} differ from a CPU's, "
            f"{compared['near ties']} of them in a near-tie."
        )


def size_tables(sizes: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{sizes['device']}: a copy reads and writes {sizes['copied GB/s']:.0f} GB/s; built in "
        f"{sizes['build seconds']:.0f} s, loaded in {sizes['load seconds']:.0f} s."
    )
    yield "| | streams | tokens of each | visible | ms | of the floor |"
    yield "|---|---:|---:|---:|---:|---:|"
    for line in sizes["measured"]:
        took, floor = line["milliseconds"], line["floor"]
        share = "" if floor is None else f"{took / floor:.2f}"
        yield (
            f"| {line['what']} | {line['streams']} | {line['width']} | {line['visible'] or ''} | "
            f"{took:.2f} | {share} |"
        )


if __name__ == "__main__":
    print("\n".join(tables(json.loads(Path(sys.argv[1]).read_text()))))
