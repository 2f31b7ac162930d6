"""A hundred requests of many kinds, over every door: one answer to each."""

import secrets

import pytest

from tests.support import traffic


def test_a_request_has_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    failed = traffic.main(100, secrets.randbits(31))
    assert not failed, capsys.readouterr().out


def test_what_differs_is_told() -> None:
    way = traffic.Way("chat", "ensemble", drafting=True, warm=False)
    left = way._replace(cut=True)
    whole = traffic.Choice("ab", "stop", tokens=("a", "b"))
    assert not traffic.difference([whole], [whole], way)
    assert not traffic.difference([whole], [whole._replace(tokens=None)], way)
    assert not traffic.difference([whole], [whole._replace(text="a", reason="")], left)
    assert traffic.difference([whole], [whole._replace(text="a")], way)
    assert traffic.difference([whole], [whole._replace(tokens=("ab",))], way)
    assert traffic.difference([whole], [whole._replace(text="b")], left)
    assert traffic.difference([whole], [whole, whole], way)
