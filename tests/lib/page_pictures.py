"""The pictures of docs/page.md: `python tests/lib/page_pictures.py BUILD` serves it and asks."""

from __future__ import annotations

import sys
from pathlib import Path

from browser import Browser, browser

ROOT = Path(__file__).parents[2]
QUESTION = "Write a Python function that reverses a string."


def main(build: Path, directory: Path = ROOT / "docs") -> None:
    from live import openai_front  # noqa: PLC0415

    from dflash_trt.serving.ports import free_ports  # noqa: PLC0415
    from dflash_trt.serving.server.run import running_server  # noqa: PLC0415

    port = free_ports().http
    with running_server(build) as triton, openai_front(build, port, triton), browser() as tab:
        url = f"http://127.0.0.1:{port}"
        for name, size, scheme in (("page", "wide", "light"), ("page-narrow", "narrow", "dark")):
            tab.open(url, size, scheme)
            rounds(tab)
            tab.picture(directory / f"{name}.png")


def rounds(tab: Browser) -> None:
    """An answer, and the details of the round that proposed most."""
    tab.ask(QUESTION)
    if tab.js("return document.querySelector('#glance-body').offsetParent !== null"):
        tab.until(lambda: "0 running" in tab.text("#glance-body"), "what the server counted")
    tab.js(
        "scrollTo(0, 0);"
        "const size = (e) => e.querySelectorAll('.token').length;"
        "[...document.querySelectorAll('.round')].reduce((a, b) => size(b) > size(a) ? b : a)"
        "  .focus({preventScroll: true})"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
