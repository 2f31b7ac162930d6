"""What only the processes of one server know: keys, a directory, who is believed about clients."""

import stat
import tempfile
from pathlib import Path

import pytest

from dflash_trt.errors import ServerError
from dflash_trt.serving.internal import (
    CLIENT_KEY_VARIABLE,
    KEY,
    MAX_SOCKET_PATH,
    SOCKET,
    client_of,
    client_parameters,
    given,
    new_key,
    new_runtime,
)


@pytest.mark.parametrize("name", ["x" * 90, "with a space"])
def test_a_runtime_directory_in_which_triton_and_a_socket_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    unusable = tmp_path / name
    unusable.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(unusable))
    directory = new_runtime()
    try:
        assert len(bytes(directory / SOCKET)) <= MAX_SOCKET_PATH
        assert " " not in str(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert not any(unusable.iterdir())
    finally:
        directory.rmdir()


def test_it_is_where_temporary_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if len(bytes(tmp_path)) + len("/dflash-trt-12345678/") + len(SOCKET) > MAX_SOCKET_PATH:
        pytest.skip("the temporary directory of this run has a long path")
    assert new_runtime().parent == tmp_path


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
