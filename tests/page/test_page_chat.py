"""The page in a browser, over a stand-in that keeps to the contract: a chat and its tokens."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.standins.page_server import MODEL, PageServer, Refusal, Said, drafted_rounds, usage_of
from tests.support.browser import Browser

pytestmark = pytest.mark.page

TEXT = "Use a slice:\n\n```python\nword[::-1]\n```\n\nIt goes from **end** to start, one by one.\n"


def expected(text: str) -> Counter[str]:
    return Counter(t["source"] for each in drafted_rounds(text) for t in each["tokens"])


def test_three_turns(tab: Browser, serve: Any) -> None:
    server: PageServer = serve("One.", TEXT, "Three, and no more.")
    tab.open(server.url)
    tab.click("summary", "Settings")
    tab.fill("#system", "Be brief.")
    for number, text in enumerate(("One.", TEXT, "Three, and no more.")):
        tab.ask(f"Question {number}")
        assert tab.text(".tokens") == text
        counted = tab.counts()
        assert +Counter(counted) == expected(text)
        usage = server.usage[-1]
        assert sum(counted.values()) == usage["completion_tokens"]
        assert tab.count(".answer:last-of-type .round") == usage["rounds"] + 1
    assert [(message["role"], message["content"]) for message in server.seen[2]["messages"]] == [
        ("system", "Be brief."),
        ("user", "Question 0"),
        ("assistant", "One."),
        ("user", "Question 1"),
        ("assistant", TEXT),
        ("user", "Question 2"),
    ]


def test_rounds_are_told_by_mouse_and_by_keys(tab: Browser, serve: Any) -> None:
    tab.open(serve(TEXT).url)
    tab.ask("Go")
    rounds = drafted_rounds(TEXT)
    tab.js("document.querySelector('.round').focus()")
    assert "read the prompt" in tab.text(".card")
    number = next(i for i, each in enumerate(rounds) if len(each["proposal"]) > 2)
    for _ in range(number):
        tab.press("ARROW_RIGHT")
    proposal = rounds[number]["proposal"]
    assert f"Round {number}," in tab.text(".card-title")
    accepted = sum(draft["accepted"] for draft in proposal)
    refused = len(proposal) - accepted
    line = f"{len(proposal)} proposed, {accepted} accepted, {refused} refused."
    assert line in tab.text(".card")
    assert tab.count(".card li.accepted") == accepted
    assert tab.count(".card li.refused") == refused
    assert f"{proposal[0]['probability']:.0%}".replace("%", " %") in tab.text(".card")
    tab.press("ESCAPE")
    assert not tab.driver.find_element("css selector", ".card").is_displayed()
    over = "arguments[0].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    tab.js(over, tab.driver.find_elements("css selector", ".round .token")[0])
    assert "read the prompt" in tab.text(".card")
    tab.js(over, tab.driver.find_elements("css selector", ".bar rect")[-1])
    assert f"Round {len(rounds) - 1}," in tab.text(".card-title")


def test_text_is_rendered_and_copied_as_it_came(tab: Browser, serve: Any) -> None:
    tab.open(serve(TEXT).url)
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    tab.cdp("Browser.grantPermissions", permissions=permissions)
    tab.ask("Go")
    tab.click(".toggle", "Text")
    assert tab.text(".text code") == "word[::-1]"
    assert tab.text(".text strong") == "end"
    tab.click(".answer-foot button", "Copy")
    tab.until(lambda: "Copied" in tab.text(".answer-foot .buttons"), "a copy")
    assert tab.js("return navigator.clipboard.readText()") == TEXT


def test_stop_and_regenerate(tab: Browser, serve: Any) -> None:
    server: PageServer = serve(TEXT * 40, "Done.", pause=0.05)
    tab.open(server.url)
    tab.ask("Go", wait=False)
    tab.until(lambda: tab.count(".round") > 3, "rounds")
    tab.press("ESCAPE")
    tab.ended()
    assert "stopped" in tab.text(".facts")
    tab.until(lambda: server.stopped == 1, "the server to be told")
    assert (TEXT * 40).startswith(tab.text(".tokens"))
    tab.click(".answer-foot button", "Regenerate")
    tab.until(lambda: tab.text(".tokens") == "Done.", "another answer")
    tab.ended()
    assert tab.count(".answer") == 1
    assert server.seen[0]["messages"] == server.seen[1]["messages"]


def test_plain_decoding_beside_it(tab: Browser, serve: Any) -> None:
    server: PageServer = serve(TEXT, pause=0.01)
    tab.open(server.url)
    tab.fill("#message", "")
    tab.ask("Go")
    tab.click(".answer-foot button", "Compare")
    tab.until(lambda: tab.text(".verdict-line"), "a verdict")
    tab.until(lambda: tab.count(".lane.ended") == 2, "both")
    assert tab.text(".verdict-line").startswith("The texts are equal: ")
    lanes = tab.driver.find_elements("css selector", ".lane .tokens")
    assert [each.get_attribute("textContent") for each in lanes] == [TEXT, TEXT]
    assert tab.count(".lane:last-child .token.target") == tab.count(".lane:last-child .token")
    drafted, plain = server.seen
    assert plain == drafted | {"drafting": False}


def test_escape_stops_a_comparison(tab: Browser, serve: Any) -> None:
    server: PageServer = serve(TEXT, TEXT * 40, pause=0.05)
    tab.open(server.url)
    tab.ask("Go")
    tab.click(".answer-foot button", "Compare")
    tab.until(lambda: tab.count(".lane:last-child .round") > 3, "rounds")
    tab.press("ESCAPE")
    tab.until(lambda: tab.text(".verdict-line") == "Stopped.", "its end")
    tab.until(lambda: server.stopped == 1, "the server to be told")


def test_another_text_is_told(tab: Browser, serve: Any) -> None:
    tab.open(serve("It is so.", "It is not so.").url)
    tab.ask("Go")
    tab.click(".answer-foot button", "Compare")
    tab.until(lambda: tab.text(".verdict-line"), "a verdict")
    assert tab.text(".verdict-line").startswith("The texts differ from character 7 on.")


def test_settings_are_sent(tab: Browser, serve: Any) -> None:
    server: PageServer = serve("Done.")
    tab.open(server.url)
    tab.click("summary", "Settings")
    schema, tools = {"type": "object"}, [{"type": "function", "function": {"name": "look"}}]
    tab.fill("#temperature", "0.7")
    tab.fill("#length", "33")
    tab.fill("#schema", json.dumps(schema))
    tab.fill("#tools", "[{")
    tab.fill("#message", "Go")
    tab.press("ENTER")
    tab.until(lambda: "list of tools is not JSON" in tab.text("#settings-error"), "a sentence")
    assert not server.seen
    tab.fill("#tools", json.dumps(tools))
    tab.ask("Go")
    body = server.seen[0]
    assert body["temperature"] == 0.7
    assert body["max_tokens"] == 33
    assert isinstance(body["seed"], int)
    assert body["tools"] == tools
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert body["response_format"] == format


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (Refusal(400, "The prompt has 5000 tokens."), "The prompt has 5000 tokens."),
        (Refusal(503, "The request queue is full."), "The request queue is full."),
        (TEXT + PageServer.CUT, "The answer was cut off: the connection to the server ended."),
    ],
    ids=["400", "503", "cut"],
)
def test_errors_are_sentences(tab: Browser, serve: Any, answer: Any, sentence: str) -> None:
    server: PageServer = serve(answer, "Done.")
    tab.open(server.url)
    tab.ask("Go")
    assert tab.text(".answer .error") == sentence
    tab.click(".answer-foot button", "Regenerate")
    tab.until(lambda: tab.text(".tokens") == "Done.", "another answer")
    assert server.seen[1]["messages"] == [{"role": "user", "content": "Go"}]


def test_the_key_is_asked_for(tab: Browser, serve: Any) -> None:
    server: PageServer = serve("Done.", key="a secret")
    tab.open(server.url)
    tab.fill("#key", "wrong")
    tab.press("ENTER")
    tab.until(lambda: tab.js("return document.querySelector('#key').value") == "", "a new question")
    tab.fill("#key", "a secret")
    tab.press("ENTER")
    tab.ask("Go")
    assert tab.text(".tokens") == "Done."
    assert "secret" not in tab.js("return JSON.stringify(localStorage) + document.cookie")
    tab.driver.refresh()  # of the same tab: it is known
    tab.until(lambda: tab.text("#model") == MODEL, "the server's name")


def test_a_model_without_a_chat_template_goes_on_with_a_text(tab: Browser, serve: Any) -> None:
    server: PageServer = serve("    return 1", facts={"chat": False, "tools": False})
    tab.open(server.url)
    tab.ask("def one():")
    assert server.seen[0]["prompt"] == "def one():"
    assert tab.text(".tokens") == "    return 1"


def test_tools_are_called_and_answered(tab: Browser, serve: Any) -> None:
    raw = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
    called = {"name": "look", "arguments": '{"at": "sky"}'}
    call = {"index": 0, "id": "call-1", "type": "function", "function": called}
    server: PageServer = serve(Said(raw, {"tool_calls": [call]}), "It is blue.")
    tab.open(server.url)
    tab.ask("Look up")
    assert tab.text(".tokens") == raw
    tab.click(".toggle", "Text")
    assert "Calls look with" in tab.text(".text")
    assert tab.text(".text code") == '{"at": "sky"}'
    tab.fill(".results textarea", "blue")
    tab.click(".results button")
    tab.until(lambda: tab.text(".answer .text") == "It is blue.", "the next answer")
    tab.ended()
    assistant = {"role": "assistant", "content": None}
    assert server.seen[1]["messages"][1:] == [
        {**assistant, "tool_calls": [{"id": "call-1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "call-1", "content": "blue"},
    ]


def test_thoughts_are_apart(tab: Browser, serve: Any) -> None:
    said = Said("<think>Hm.</think>Yes.", {"reasoning_content": "Hm.", "content": "Yes."})
    server: PageServer = serve(said)
    tab.open(server.url)
    tab.ask("Is it?")
    assert tab.text(".tokens") == said.raw
    tab.click(".toggle", "Text")
    assert tab.text(".thoughts p") == "Hm."
    assert tab.text(".text > p") == "Yes."
    tab.ask("Sure?")
    assert server.seen[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_what_an_engine_does_not_tell_is_said(tab: Browser, serve: Any) -> None:
    facts = {"untold": ["This engine tells nothing."], "plain": False, "schema": False}
    tab.open(serve(TEXT, facts=facts, tells=False).url)
    tab.until(lambda: "This engine tells nothing." in tab.text("#glance-body"), "the sentence")
    tab.ask("Go")
    assert "Compare" not in tab.text(".answer-foot")
    assert tab.counts()["untold"] == sum(expected(TEXT).values())
    assert tab.text(".tokens") == TEXT
    tab.js("document.querySelectorAll('.round')[2].focus()")
    assert "This engine tells nothing." in tab.text(".card")
    assert not tab.driver.find_element("id", "schema").is_displayed()


def test_the_server_at_a_glance(tab: Browser, serve: Any) -> None:
    server: PageServer = serve(TEXT)
    tab.open(server.url)
    tab.ask("Go")
    usage = usage_of(drafted_rounds(TEXT))
    tau = usage["completion_tokens"] / usage["rounds"]
    tab.until(lambda: f"{tau:.3g}" in tab.text(".figures"), "tokens a round")
    assert "1 of 4" in tab.text("#glance-body")
    assert tab.count("#glance-body svg") >= 2
