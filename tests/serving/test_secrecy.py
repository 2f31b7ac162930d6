"""What a running server keeps from other users of its machine and from its own clients."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from dflash_trt.build.repository import read_config, templates
from dflash_trt.serving.internal import SOCKET
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.server.process import SHARED_MEMORY, Server

OTHERS = stat.S_IRWXG | stat.S_IRWXO
INTERNAL = ("verify", "draft", "draft_verify")
ROWS = 4  # slots of the demo pair


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[Server]:
    with Server(built, free_ports()) as server:
        server.wait_ready()
        yield server


def test_no_other_user_may_read_anything_of_it(server: Server) -> None:
    runtime = server.log.path.parent
    regions = list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))
    assert len(regions) >= 4
    assert (runtime / SOCKET).is_socket()
    mine = [runtime, server.log.path, runtime / SOCKET, *regions]
    assert [path for path in mine if path.stat().st_mode & OTHERS] == []


def _crafted(name: str, key: list[int], row: int, *move: int) -> list[InferInput]:
    """A step of a row after a move; where a victim's row was moved, its features tell all."""
    tokens = 3
    arrays: dict[str, tuple[str, np.ndarray[Any, Any]]] = {
        "key": ("INT64", np.array(key)),
        "batch": ("INT64", np.array([row, 0, 0, *move])),
        "rows": ("INT64", np.array([[1, 1, tokens, 1]])),
        "tokens": ("INT64", np.array([[5]])),
        "sampling": ("BYTES", np.array([b""], object)),
        "history": ("INT64", np.full((1, 1), -1)),
        "masks": ("INT32", np.full((1, 1, 1), -1, np.int32)),
        "results": ("INT64", np.zeros((1, 3), np.int64)),
        "features": ("FP32", np.zeros((1, 1, 64), np.float32)),
    }
    inputs = []
    for each in read_config(templates() / name / "config.pbtxt").input:
        datatype, array = arrays[each.name]
        inputs.append(InferInput(each.name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


@pytest.mark.parametrize("name", INTERNAL)
def test_no_client_may_call_an_internal_model(server: Server, name: str) -> None:
    url = f"127.0.0.1:{server.ports.grpc}"
    with InferenceServerClient(url) as client:
        for key in ([0, 0], [-1, 2**62]):
            for source in range(ROWS):
                with pytest.raises(InferenceServerException, match="model is internal") as refused:
                    client.infer(name, _crafted(name, key, ROWS - 1, source, ROWS - 1, 3))
                assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_more_strings_than_any_request_has_are_not_looked_at(server: Server) -> None:
    """Ten million of them held everyone up for 7 s before the model saw the request."""
    words = InferInput("stop_words", [100_000], "BYTES")
    words.set_data_from_numpy(np.full(100_000, b"a", object))
    prompt = InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([b"a"], object))
    with InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        with pytest.raises(InferenceServerException, match="stop_words must have at most 64 items"):
            client.infer("dflash_infer", [prompt, words])
        client.infer("dflash_infer", [prompt])
