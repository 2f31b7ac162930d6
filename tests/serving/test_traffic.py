"""A hundred requests of many kinds, over every door: one answer to each."""

import secrets
from collections import Counter

import pytest

from tests.support.traffic import campaign
from tests.support.traffic.doors import Choice, Way


def test_a_request_has_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    failed = campaign.main(100, secrets.randbits(31))
    assert not failed, capsys.readouterr().out


def test_what_differs_is_told() -> None:
    way = Way("chat", "ensemble", drafting=True, warm=False)
    left = way._replace(cut=True)
    whole = Choice("ab", "stop", tokens=("a", "b"))
    assert not campaign.difference([whole], [whole], way)
    assert not campaign.difference([whole], [whole._replace(tokens=None)], way)
    assert not campaign.difference([whole], [whole._replace(text="a", reason="")], left)
    assert campaign.difference([whole], [whole._replace(text="a")], way)
    assert campaign.difference([whole], [whole._replace(tokens=("ab",))], way)
    assert campaign.difference([whole], [whole._replace(text="b")], left)
    assert campaign.difference([whole], [whole, whole], way)


def test_a_kind_that_did_not_occur_is_named() -> None:
    names = [*campaign.KINDS, *campaign.WAYS, *campaign.ANSWERS]
    assert campaign.missing(Counter(names)) == []
    assert campaign.missing(Counter(names[1:])) == names[:1]
    assert f"{names[0]:<20}     0" in campaign.table(Counter(names[1:]))
