"""The page's files: small, and without what could make markup or code of a text."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "dflash_trt" / "serving" / "http" / "page"
LARGEST = 100_000  # bytes of all files
LONGEST = 350  # lines of one
# each makes markup, code, or a request of a string
FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment"
    r"|DOMParser|srcdoc|\beval\b|new Function|(?:await|=) import\(|setAttribute\(\"style"
    r"|XMLHttpRequest|WebSocket|EventSource|sendBeacon|<img|<iframe"
    r"|make\(\"(?:img|iframe|script|style|object|embed)\""
)


def test_it_is_small() -> None:
    files = list(PAGE.iterdir())
    assert sum(file.stat().st_size for file in files) <= LARGEST
    assert not [f.name for f in files if len(f.read_text().splitlines()) > LONGEST]


def test_nothing_makes_markup_of_text() -> None:
    for file in PAGE.glob("*.js"):
        assert not re.findall(FORBIDDEN, file.read_text(encoding="utf-8")), file.name


def test_nothing_is_inline_or_from_elsewhere() -> None:
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.findall(
        r"<script(?! type=\"module\" src=\"/page/)|<style|\sstyle=|\son\w+=", html
    )
    addresses = re.findall(r"(?:src|href)=\"([^\"]*)\"", html)
    assert addresses
    assert all(each.startswith(("/page/", "data:image/svg+xml")) for each in addresses)
    assert "url(" not in (PAGE / "page.css").read_text(encoding="utf-8")
    assert "@import" not in (PAGE / "page.css").read_text(encoding="utf-8")


def test_every_file_is_used() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in PAGE.iterdir())
    for file in PAGE.iterdir():
        assert file.name == "index.html" or re.search(rf"\"(?:\./|/page/){file.name}\"", text)
