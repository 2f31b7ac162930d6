"""Whatever a model writes is text: no markup, no script, no request, and the page goes on."""

import re
from typing import Any

import pytest

from tests.support.browser import Browser

pytestmark = pytest.mark.page

HTML = """\
<script>window.ran = 1</script><img src=x onerror="window.ran = 1"><svg onload="window.ran = 1">
<iframe src="https://example.com"></iframe><style>* {display: none}</style><base href="//a.com">
</div></article><h1 style="color:red" onclick="window.ran = 1">&lt;b&gt; &amp;amp; <!-- --> ]]>
```html
<script>window.ran = 1</script></code></pre><img src="https://example.com/x.png">
```
"""
LINKS = """\
[a](javascript:window.ran=1) [b](JaVaScRiPt:window.ran=1) [c](data:text/html,<script>ran=1</script>)
[d](vbscript:x) [e](//example.com) [f](/page/server) [g](https://example.com/?a=1&b="onclick=x")
![pixel](https://example.com/x.png) <https://example.com/> https://example.com/y. [h](file:///etc/passwd)
[i](java\tscript:window.ran=1) [j]( javascript:window.ran=1) [<b>k</b>](http://example.com)
"""
CONTROLS = "\x00\x07\x1b[31m \u202eevil\u202c \u2066x\u2069 \u200f \x7f\x85 \ufffe e\u0301\u0301 😀"
DEEP = ">" * 3000 + " quoted\n" + "".join(f"{' ' * (i % 13)}- {i}\n" for i in range(1500))
BOMBS = {
    "html": HTML,
    "links": LINKS,
    "controls": CONTROLS * 50,
    "right to left": "שלום עולם, مرحبا بالعالم. " * 30,
    "deep": DEEP,
    "long line": "x" * 100_000,
    "long words": "word " * 20_000,
    "stars": "*" * 50_000 + "**a " * 5_000 + "_a_*b*" * 2_000,
    "brackets": "[" * 50_000 + "](x)" * 5_000 + "![a](" * 5_000,
    "ticks": " ".join("`" * n for n in range(1, 300)) + "`a" * 5_000,
    "hashes": "# " * 30_000 + "\n" + "#" * 20_000,
    "rules": "- " * 30_000 + "x\n" + "|-" * 20_000 + "\n" + "|a" * 20_000,
    "tables": "|a" * 60 + "\n" + "|-" * 60 + "\n" + ("|b" * 60 + "\n") * 400,
    "addresses": "http://" * 10_000 + "https://a.b/" + "." * 30_000,
}
ALLOWED = {
    *("P", "H3", "H4", "H5", "H6", "HR", "UL", "OL", "LI", "BLOCKQUOTE", "PRE", "CODE", "A", "DIV"),
    *("STRONG", "EM", "DEL", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "SPAN", "BUTTON"),
}
ATTRIBUTES = {
    *("class", "dir", "role", "tabindex", "type", "href", "rel", "target", "start", "data-index"),
    *("aria-label", "aria-selected", "aria-orientation", "aria-describedby"),
}
FOUND = """
const found = [...document.querySelectorAll('.answer .text *, .answer .tokens *')];
return [[...new Set(found.map((e) => e.tagName))],
        [...new Set(found.flatMap((e) => e.getAttributeNames()))],
        found.map((e) => e.getAttribute('href')).filter(Boolean),
        found.length, window.ran ?? 0,
        document.querySelectorAll('body > *, #turns > *').length];
"""


def visible(text: str) -> str:
    text = re.sub(r"\r\n?", "\n", text)
    text = re.sub(r"[\0-\x08\x0b-\x1f]", lambda found: chr(0x2400 + ord(found[0])), text)
    rest = r"[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
    return re.sub(rest, lambda found: f"⟨{ord(found[0]):04X}⟩", text)


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_an_answer_is_text(tab: Browser, serve: Any, text: str) -> None:
    tab.open(serve("Before.", text, "After.", together=100_000).url)
    tab.ask("Go")
    before = tab.js(FOUND)
    tab.ask("Now")
    assert tab.text(".tokens") == visible(text)
    tab.click(".toggle", "Text")
    tags, attributes, links, amount, ran, frame = tab.js(FOUND)
    assert {*tags} <= ALLOWED
    assert {*attributes} <= ATTRIBUTES
    assert all(re.match(r"https?://", each) for each in links)
    assert not ran
    assert frame == before[-1] + 2  # a question and its answer
    assert amount <= len(text) + 10_000
    if not re.search(r"[*_`#>|\[\]\\~\-]|\d\.", text):  # no mark of Markdown: as it is
        assert tab.text(".text") == visible(text)
    tab.ask("And now")  # it still does what it is told
    assert tab.text(".tokens") == "After."


def test_links_lead_where_they_say(tab: Browser, serve: Any) -> None:
    tab.open(serve(LINKS + HTML).url)
    tab.ask("Go")
    tab.click(".toggle", "Text")
    script = (
        "return [...document.querySelectorAll('.text a')].map((e) => [e.href, e.rel, e.target])"
    )
    links = tab.js(script)
    assert len(links) == 6
    assert {link[0] for link in links} == {
        "https://example.com/?a=1&b=%22onclick=x%22",
        "https://example.com/x.png",
        "https://example.com/",
        "https://example.com/y",
        "http://example.com/",
    }
    assert {(rel, target) for _, rel, target in links} == {("noopener noreferrer", "_blank")}


def test_a_question_is_text_too(tab: Browser, serve: Any) -> None:
    tab.open(serve("Done.").url)
    tab.ask("<img src=x onerror='window.ran = 1'>")
    assert tab.text(".user") == "<img src=x onerror='window.ran = 1'>"
    assert tab.count(".user *") == 1


def test_errors_and_names_are_text_too(tab: Browser, serve: Any) -> None:
    markup = "<img src=x onerror='window.ran = 1'>"
    tab.open(serve("Done.", facts={"untold": [markup], "engine": markup}).url)
    tab.until(lambda: markup in tab.text("#glance-body"), "the sentence")
    assert not tab.count("img")
