"""What only the processes of one server know: keys, a directory, who is believed about clients."""

import stat

import pytest

from dflash_trt.errors import ServerError
from dflash_trt.serving.internal import (
    CLIENT_KEY_VARIABLE,
    KEY,
    client_of,
    client_parameters,
    given,
    new_key,
    new_runtime,
)


def test_the_runtime_directory_is_for_this_user() -> None:
    directory = new_runtime()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.rmdir()


def test_without_a_key_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ServerError, match="dflash-trt serve"):
        given(KEY)


def test_only_the_application_is_believed_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLIENT_KEY_VARIABLE, raising=False)
    assert client_of({"client": "alice", "client-key": ""}) == ""
    key = new_key()
    monkeypatch.setenv(CLIENT_KEY_VARIABLE, key)
    assert client_of(client_parameters("alice", key)) == "alice"
    for forged in ({}, {"client-key": new_key()}, {"client-key": 7}, {"client-key": "é"}):
        assert client_of({"client": "alice", **forged}) == ""
