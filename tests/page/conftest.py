"""A browser for the page's tests, or the reason why there is none."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.standins.page_server import PageServer, page_server
from tests.support.browser import Browser, browser, lacking


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if why := lacking():
        pytest.skip(why)
    with browser() as opened:
        yield opened


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Browser]:
    """Assert after each test that no request left the server's address and the console is empty."""
    chromium.driver.get("about:blank")
    chromium.requests(), chromium.complaints()
    yield chromium
    url = chromium.js("return location.origin")
    complaints = chromium.complaints()
    chromium.driver.get("about:blank")
    asked = [each for each in chromium.requests() if not each.startswith(("data:", "about:"))]
    assert asked
    assert not [each for each in asked if not each.startswith(f"{url}/")]
    assert not complaints


@pytest.fixture
def serve() -> Iterator[type[PageServer]]:
    with ExitStack() as stack:

        def start(*answers: object, **options: object) -> PageServer:
            return stack.enter_context(page_server(PageServer(*answers, **options)))  # type: ignore[arg-type]

        yield start  # type: ignore[misc]
