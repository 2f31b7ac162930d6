"""Chromium without a window, as a reader of the page has it."""

import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

WAIT = 60.0
T = TypeVar("T")


def lacking() -> str:
    """Return why there is no browser here, or ""."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (on Debian: apt-get install chromium-driver)"
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (pip install '.[page-tests]')"
    return ""


class Browser:
    """One tab; `requests` has what it asked of the network."""

    def __init__(self) -> None:
        from selenium import webdriver  # noqa: PLC0415

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        # root has no sandbox, and a container's /dev/shm may be small
        for each in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
            options.add_argument(f"--{each}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(WAIT)

    def open(self, url: str) -> None:
        """Open a page with empty storage; `sessionStorage` ends with it."""
        size = {"width": 1280, "height": 860, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        self.driver.get("about:blank")
        self.cdp("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self.driver.get(url)

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)

    def js(self, script: str, *arguments: Any) -> Any:
        """Evaluate in the debugger, which a policy without `eval` does not bind."""
        return self.driver.execute_script(script, *arguments)

    def until(self, found: Callable[[], T], what: str) -> T:
        """Return the first true result of `found`; AssertionError after a minute."""
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            if result := found():
                return result
            time.sleep(0.05)
        raise AssertionError(f"waited in vain for {what}")

    def count(self, selector: str) -> int:
        return int(self.js("return document.querySelectorAll(arguments[0]).length", selector))

    def text(self, selector: str) -> str:
        """Return the text of the last such element, as written."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''"
        return str(self.js(script, selector))

    def find(self, selector: str) -> Any:
        """Return the last visible such element."""

        def seen() -> Any:
            found = self.driver.find_elements("css selector", selector)
            return next((each for each in reversed(found) if each.is_displayed()), None)

        return self.until(seen, selector)

    def click(self, selector: str, words: str = "") -> None:

        script = (
            "const found = [...document.querySelectorAll(arguments[0])].filter("
            "  (e) => e.textContent.includes(arguments[1]) && e.offsetParent).at(-1);"
            "found?.scrollIntoView({block: 'center'}); return found"
        )
        self.until(lambda: self.js(script, selector, words), f"{selector} {words}").click()

    def press(self, key: str) -> None:
        """Press a key by name, `ENTER`, or character where the focus is."""
        from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

        self.driver.switch_to.active_element.send_keys(getattr(Keys, key, key))

    def fill(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def ask(self, text: str, *, wait: bool = True) -> None:
        """Type a message and send it; with `wait` return when the answer has ended."""
        before = self.count(".answer")
        self.until(lambda: self.text("#model"), "the server's name")
        self.fill("#message", text)
        self.press("ENTER")
        self.until(lambda: self.count(".answer") > before, "an answer")
        if wait:
            self.ended()

    def ended(self) -> None:
        self.until(lambda: self.count(".answer") and not self.count(".running"), "its end")

    def counts(self) -> dict[str, int]:
        script = (
            "const list = [...document.querySelectorAll('.answer .legend')].at(-1);"
            "return [...list.children].map((e) => [e.dataset.source, Number(e.dataset.count)])"
        )
        return dict(self.js(script))

    def requests(self) -> list[str]:
        """Return addresses that were requested since the last call."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return the console's messages since the last call: script errors, policy refusals.

        A response with an error status is one too, and is no fault of the page.
        """
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        return [each for each in said if "Failed to load resource" not in each]


@contextmanager
def browser() -> Iterator[Browser]:
    opened = Browser()
    try:
        yield opened
    finally:
        opened.driver.quit()
