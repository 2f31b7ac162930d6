"""Broken safetensors files and indices: an error of ours every time, and little memory."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_trt.checkpoints import Weights
from dflash_trt.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("claimed", "size"),
    [(10**12, 100), (2**64 - 1, 100), (2**63, 4 << 30), (1 << 30, 4 << 30), (17 << 20, 17 << 20)],
)
def test_a_header_takes_no_more_memory_than_it_may(tmp_path: Path, claimed: int, size: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", claimed) + b"{")
    os.truncate(file, 8 + size)  # a hole: it takes no room on the disk
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or is not"):
        Weights(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_an_index_takes_no_more_memory_than_it_may(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b"{}")
    os.truncate(tmp_path / INDEX, 4 << 30)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="more than 32 MiB"):
        Weights(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        Weights(tmp_path)


def test_of_a_tensor_in_two_shards_the_index_chooses(tmp_path: Path) -> None:
    for number in range(2):
        tensors = {"x": np.full(2, number, np.float32), f"only{number}": np.ones(1, np.float32)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    for chosen in range(2):
        places = {"x": f"{chosen}.safetensors", "only0": "0.safetensors", "only1": "1.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
        assert Weights(tmp_path).read("x").tolist() == [chosen] * 2
    places = {"only0": "1.safetensors", "only1": "1.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match="lists tensor only0, but its shard lacks it"):
        Weights(tmp_path)
