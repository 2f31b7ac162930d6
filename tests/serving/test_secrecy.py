"""What a running server keeps from other users of its machine and from its own clients."""

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc.model_config_pb2 import DataType
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.builder.repository import TEMPLATES, read_config
from dflash_trt.errors import ServerError
from dflash_trt.serving.channel import SOCKET
from dflash_trt.serving.keys import (
    CLIENT_KEY_VARIABLE,
    INTERNAL_KEY,
    client_of,
    client_parameters,
    env_value,
    new_key,
)
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.supervisor.leftovers import SHARED_MEMORY
from dflash_trt.serving.supervisor.process import Server
from tests.support.request_tools import tensors

OTHERS = stat.S_IRWXG | stat.S_IRWXO
INTERNAL = ("verify", "draft", "draft_verify")
INVALID = "StatusCode.INVALID_ARGUMENT"


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[Server]:
    with Server(OpenedBuild(built, "none"), free_ports()) as server:
        server.wait_ready()
        yield server


def test_no_other_user_may_read_anything_of_it(server: Server) -> None:
    runtime = server.log.path.parent
    regions = list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))
    assert len(regions) >= 4
    sockets = [path for path in runtime.iterdir() if path.is_socket()]
    assert sockets == [runtime / SOCKET]
    mine = [runtime, server.log.path, *sockets, *regions]
    assert [path for path in mine if path.stat().st_mode & OTHERS] == []


@pytest.mark.parametrize("name", INTERNAL)
def test_no_client_may_call_an_internal_model(server: Server, name: str) -> None:
    """The key is compared before anything else, whatever the tensors."""
    inputs = []
    for each in read_config(TEMPLATES / name / "config.pbtxt").input:
        datatype = DataType.Name(each.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
        inputs.append(InferInput(each.name, [max(size, 1) for size in each.dims], datatype))
        empty = np.zeros(inputs[-1].shape(), triton_to_np_dtype(datatype))
        inputs[-1].set_data_from_numpy(empty.astype(bytes) if datatype == "BYTES" else empty)
    with InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        for key in ([0, 0], [-1, 2**62]):
            next(x for x in inputs if x.name() == "key").set_data_from_numpy(np.array(key))
            with pytest.raises(InferenceServerException, match="model is internal") as refused:
                client.infer(name, inputs)
            assert refused.value.status() == INVALID


def test_more_strings_than_any_request_has_are_not_looked_at(server: Server) -> None:
    """Ten million of them once held all requests up for 7 s."""
    words = InferInput("stop_words", [100_000], "BYTES")
    words.set_data_from_numpy(np.full(100_000, b"a", object))
    prompt = tensors({"text_input": "a"})
    with InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        with pytest.raises(InferenceServerException, match="at most 64 items") as refused:
            client.infer("dflash_infer", [*prompt, words])
        assert refused.value.status() == INVALID
        client.infer("dflash_infer", prompt)


def test_without_a_key_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERNAL_KEY, raising=False)
    with pytest.raises(ServerError, match="dflash-trt serve"):
        env_value(INTERNAL_KEY)


def test_only_the_application_is_believed_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLIENT_KEY_VARIABLE, raising=False)
    assert client_of({"client": "alice", "client-key": ""}) == ""
    key = new_key()
    monkeypatch.setenv(CLIENT_KEY_VARIABLE, key)
    assert client_of(client_parameters("alice", key)) == "alice"
    for forged in ({}, {"client-key": new_key()}, {"client-key": 7}, {"client-key": "é"}):
        assert client_of({"client": "alice", **forged}) == ""
