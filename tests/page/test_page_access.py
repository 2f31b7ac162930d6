"""What axe finds wrong with the page: nothing, in any of its states."""

from typing import Any

import pytest
from browser import SIZES, Browser

pytestmark = pytest.mark.page

TEXT = """\
# A title

> Quoted, with [a link](https://example.com).

1. One
2. Two

| a | b |
|---|---|
| 1 | 2 |

```python
word[::-1]
```

So it is, **as** `it` was said.
"""


def check(tab: Browser) -> None:
    assert not tab.violations()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(tab: Browser, serve: Any, size: str, scheme: str) -> None:
    tab.open(serve(TEXT).url, size, scheme)
    tab.until(lambda: tab.count(".example") == 3, "the examples")
    check(tab)
    tab.ask("Go")
    tab.js("document.querySelectorAll('.round')[4].focus()")
    check(tab)
    tab.click(".answer-foot button", "Compare")
    tab.until(lambda: tab.text(".verdict-line"), "a verdict")
    tab.click(".toggle", "Text")
    check(tab)
    if size == "narrow":
        tab.click("#panel-toggle")
    tab.click("summary", "Settings")
    tab.fill("#tools", "[{")
    tab.until(lambda: tab.count("#glance-body svg") >= 2, "the server")
    check(tab)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_the_question_for_the_key(
    tab: Browser, serve: Any, scheme: str
) -> None:
    tab.open(serve("Done.", key="a secret").url, scheme=scheme)
    tab.find("#key")
    check(tab)


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_nothing_is_wider_than_the_window(tab: Browser, serve: Any, width: int) -> None:
    tab.open(serve(TEXT + "x" * 3000, together=10).url)
    tab.cdp(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=width < 500,
    )
    for view in ("Tokens", "Text"):
        tab.ask("Go")
        tab.click(".toggle", view)
        assert tab.js("return document.documentElement.scrollWidth") <= width


def test_the_answer_is_read_out_by_sentences(tab: Browser, serve: Any) -> None:
    text = "".join(f"This is sentence {n} of a text that goes on. " for n in range(20))
    tab.open(serve(text).url)
    tab.js(
        "window.told = []; new MutationObserver((all) => all.forEach((each) =>"
        "  each.addedNodes.forEach((node) => told.push(node.textContent))))"
        "  .observe(document.querySelector('#said'), {childList: true})"
    )
    tab.ask("Go")
    told = tab.js("return window.told")
    assert "".join(told) == text
    assert len(told) <= 10


def test_the_keyboard_is_enough(tab: Browser, serve: Any) -> None:
    server = serve(TEXT)
    tab.open(server.url)
    tab.until(lambda: tab.count(".example") == 3, "the examples")
    assert tab.js("return document.activeElement.id") == "message"  # one types at once
    tab.press("One line")
    tab.driver.switch_to.active_element.send_keys("\ue008\ue007\ue000more")  # Shift+Enter
    tab.press("ENTER")
    tab.until(lambda: tab.count(".answer"), "an answer")
    tab.ended()
    assert server.seen[0]["messages"][-1]["content"] == "One line\nmore"
    assert tab.js("return document.activeElement.id") == "message"
    tab.js("document.querySelector('#new-chat').focus()")
    order = []
    for _ in range(16):
        tab.press("TAB")
        focus = "document.activeElement"
        order.append(tab.js(f"return {focus}.id || {focus}.classList[0]"))
    assert [each for each in order if each in ("theme", "toggle", "round", "message", "send")][
        :6
    ] == [*("theme", "toggle", "toggle", "round", "message", "send")]


def test_the_theme_follows_the_system_until_one_is_chosen(tab: Browser, serve: Any) -> None:
    tab.open(serve("Done.").url, scheme="dark")
    ground = "return getComputedStyle(document.body).backgroundColor"
    dark = tab.js(ground)
    tab.click("#theme")
    light = tab.js(ground)
    assert dark != light
    tab.driver.refresh()
    assert tab.js(ground) == light
