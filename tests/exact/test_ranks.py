"""Ranks as processes: what they compute, what is refused, and what happens when one is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from builds import build_pair
from commands import run
from exact import target_step
from live import serve_ports, serving
from pairs import make_pair
from pycode import ROOT, demo_config

from dflash_trt.build.run import build
from dflash_trt.checkpoints import load_drafter, load_tokenizer
from dflash_trt.config import OnnxRuntime, with_ranks
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.engines import ranks
from dflash_trt.engines.info import rank_directory
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.errors import ConfigError, RankError, ServerError
from dflash_trt.graphs.sharding import check_even
from dflash_trt.serving.client import stream
from dflash_trt.serving.server.process import processes_naming

TEXT = list(range(40, 80))
PROMPT = "def main():"
WAIT = 30.0  # seconds


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    make_pair(directory, dtype="bfloat16", tied=False)
    return directory


@pytest.fixture(scope="module")
def whole(pair: Path) -> Path:
    build_pair(pair, pair / "whole")
    return pair / "whole"


@pytest.fixture(scope="module")
def halves(pair: Path) -> Path:
    build_pair(pair, pair / "halves", tensor_parallel_size=2)
    return pair / "halves"


def logits(built: Path) -> Any:
    return target_step(Engine(built / "engines" / "target"), TEXT, 0)["logits"].copy()


def decoded(built: Path) -> list[list[int]]:
    prompts = [TEXT[:9], TEXT[9:30]]
    report = check_lossless(
        built / "engines", prompts, 40, Speculation(draft_tokens=7), lambda done: None
    )
    assert report.identical == report.total
    return report.outputs


def others(engine: Path) -> list[int]:
    """The processes of ranks but the first, of engines in a directory."""
    return processes_naming(f"-m dflash_trt.engines.ranks {engine}")


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_compute_what_one_does(whole: Path, halves: Path) -> None:
    np.testing.assert_allclose(logits(halves), logits(whole), atol=2e-4, rtol=0)
    assert decoded(halves) == decoded(whole)
    assert not others(halves)


def test_the_graph_of_one_rank_has_no_collectives(whole: Path, halves: Path) -> None:
    """And those of two have the same nodes, each with its half of the weights."""

    def graph(path: Path) -> onnx.GraphProto:
        return onnx.load(path / "model.onnx", load_external_data=False).graph

    for role in ("target", "drafter"):
        at = halves / "engines" / role
        first, second = (graph(rank_directory(at, rank)) for rank in range(2))
        alone = graph(whole / "engines" / role)
        kinds = [[(n.op_type, len(n.input)) for n in g.node] for g in (first, second)]
        assert kinds[0] == kinds[1]
        assert "DistCollective" not in {node.op_type for node in alone.node}
        sizes = [(p / "model.onnx.data").stat().st_size for p in (at, rank_directory(at, 1))]
        assert sizes[0] == sizes[1]
        assert sizes[0] < 0.8 * (whole / "engines" / role / "model.onnx.data").stat().st_size


def test_a_drafter_that_rank_0_runs_alone(pair: Path, whole: Path) -> None:
    built = pair / "whole-drafter"
    build_pair(pair, built, tensor_parallel_size=2, shard_drafter=False)
    drafters = (root / "engines" / "drafter" / "model.onnx" for root in (built, whole))
    assert len({path.read_bytes() for path in drafters}) == 1
    assert decoded(built) == decoded(whole)


def test_linked_weights(pair: Path, whole: Path) -> None:
    """Rows are taken from the checkpoint as they lie there; columns are copied."""
    built = pair / "linked"
    build_pair(pair, built, tensor_parallel_size=2, weights="link")
    for rank in range(2):
        at = rank_directory(built / "engines" / "target", rank)
        assert any(file.is_symlink() for file in at.iterdir())
        assert (at / "model.onnx.data").stat().st_size < 300_000
    np.testing.assert_allclose(logits(built), logits(whole), atol=2e-4, rtol=0)


@pytest.mark.models
def test_quantised_weights(tmp_path: Path) -> None:
    """A block of 32 weights has the same numbers, on whichever rank it is."""
    make_pair(tmp_path, intermediate=128)
    built = [tmp_path / str(ranks) for ranks in (1, 2)]
    costs = [
        build_pair(
            tmp_path, at, tensor_parallel_size=ranks, quantize="int4", shard_drafter=False
        ).written.accuracy
        for ranks, at in enumerate(built, 1)
    ]
    assert costs[0] is not None
    assert costs[0] == costs[1]
    assert {path.name for path in (built[1] / "engines").iterdir()} == {"target", "drafter"}

    def stored(path: Path) -> dict[str, Any]:
        graph = onnx.load(path / "model.onnx").graph
        return {x.name: onnx.numpy_helper.to_array(x) for x in graph.initializer}

    alone, at = (root / "engines" / "target" for root in built)
    first, second = (stored(rank_directory(at, rank)) for rank in range(2))
    names = [name for name in first if "o_proj" in name or "down_proj" in name]
    assert len(names) == 4 * 2 * 3  # layers; codes, scales and zero points
    for name in names:
        both = np.concatenate([first[name], second[name]])
        assert (both == stored(alone)[name]).all()
    # activations are rounded to int8 on the way, and sums are put together in another order
    found, wanted = logits(built[1]), logits(built[0])
    assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) < costs[0].rms / 4
    decoded(built[1])


UNEVEN = [
    ({"heads": 6}, {}, 4, "the target cannot be cut for 4 ranks: num_attention_heads 6 / 4"),
    ({"heads": 6, "kv_heads": 3}, {}, 2, "num_key_value_heads 3 / 2"),
    ({"intermediate": 92}, {}, 8, "num_attention_heads 4 / 8, intermediate_size 92 / 8"),
    ({"vocab": 330}, {}, 4, "vocab_size 330 / 4"),
    ({"intermediate": 64 + 2}, {}, 4, "intermediate_size 66 / 4"),
    ({}, {"quantize": "int8"}, 2, "intermediate_size 96 / 2 into blocks of 32"),
]


@pytest.mark.parametrize(("shape", "engine", "ranks", "numbers"), UNEVEN)
def test_uneven_shapes_are_refused(
    shape: dict[str, int], engine: dict[str, str], ranks: int, numbers: str, tmp_path: Path
) -> None:
    make_pair(tmp_path, **shape)
    with pytest.raises(ConfigError) as raised:
        build_pair(tmp_path, tmp_path / "built", tensor_parallel_size=ranks, **engine)
    assert numbers in raised.value.problem
    assert not (tmp_path / "built").exists()


def test_an_uneven_drafter_can_stay_whole(tmp_path: Path) -> None:
    make_pair(tmp_path, intermediate=98)  # the drafter's is 130
    spec = load_drafter(tmp_path / "drafter").spec
    check_even(spec, "drafter", 2, quantized=False)
    with pytest.raises(ConfigError, match=r"130 / 4.* shard_drafter: false"):
        check_even(spec, "drafter", 4, quantized=False)


@pytest.mark.models
def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    """`--tp` overrides the config, and is bounded as it is."""
    config = ROOT / "build_configs" / "pycode.yaml"
    assert run("build", config, "--tp", 2, "--output", tmp_path / "built").code == 0
    manifest = json.loads((tmp_path / "built" / "manifest.json").read_text())
    assert manifest["config"]["engine"]["tensor_parallel_size"] == 2
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def main():"}\n')
    code, out, _ = run("verify", tmp_path / "built", "--prompts", prompts, "--max-tokens", 24)
    assert code == 0
    assert "1/1 identical" in out
    code, _, err = run("build", config, "--tp", 3, "--output", tmp_path / "other")
    assert code == 2
    assert "cannot be cut for 3 ranks. Give 1, 2, 4 or 8" in err


@pytest.fixture
def engine(halves: Path) -> Engine:
    return Engine(halves / "engines" / "target")


def test_a_killed_rank_fails_the_step_and_all_that_follow(engine: Engine, halves: Path) -> None:
    target_step(engine, TEXT, 0)
    (pid,) = others(halves)
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 of 2 .* failed: ended by SIGKILL"):
            target_step(engine, TEXT, 0)
        assert time.monotonic() - start < 5
    with pytest.raises(RankError):
        engine.move_row(0, 1, len(TEXT))
    with pytest.raises(RankError):
        engine.keep_tokens(0, 4, [0, 2])
    assert not others(halves)


def test_a_rank_killed_in_the_middle_of_a_step(engine: Engine, halves: Path) -> None:
    """It stands still, so that rank 0 is waiting for it when it ends."""
    target_step(engine, TEXT, 0)
    (pid,) = others(halves)
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, [pid, signal.SIGKILL])
    timer.start()
    start = time.monotonic()
    with pytest.raises(RankError, match="SIGKILL"):
        target_step(engine, TEXT, 0)
    assert 0.4 < time.monotonic() - start < 5


def test_a_rank_that_stands_still(
    engine: Engine, halves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "SILENCE", 0.5)
    (pid,) = others(halves)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 1 of 2 .* did not answer"):
        target_step(engine, TEXT, 0)
    assert not others(halves)


def test_what_a_rank_says_when_a_step_fails(engine: Engine, halves: Path) -> None:
    """More sequences than there are cache rows: wrong on every rank; nobody waits for another."""
    step = engine.step(0, 1, 4, 32, 4)
    for array in step.inputs.values():
        array[:] = 0
    step.inputs["head_rows"][:] = 99
    with pytest.raises(Exception, match="99"):
        step.run()
    with pytest.raises(RankError, match="rank"):
        target_step(engine, TEXT, 0)
    wait_until(lambda: not others(halves))


def test_a_rank_that_cannot_load(halves: Path, tmp_path: Path) -> None:
    broken = tmp_path / "built"
    shutil.copytree(halves, broken)
    graph = broken / "engines" / "target" / "rank-1" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:1000])
    with pytest.raises(RankError, match=r"rank 1 of 2 .* failed: "):
        Engine(broken / "engines" / "target")
    assert not others(broken)


LEAD = """
import sys, time
from pathlib import Path
from dflash_trt.engines.onnxruntime import Engine
engine = Engine(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


def test_ranks_end_with_the_first(halves: Path) -> None:
    """However it ends."""
    command = [sys.executable, "-c", LEAD, str(halves / "engines" / "target")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(others(halves)) == 1
        process.kill()
    wait_until(lambda: not others(halves))


@pytest.mark.models
def test_the_server_on_two_ranks(tmp_path: Path) -> None:
    """The text of one rank, from Triton; a rank that is gone brings the server up again."""
    config = demo_config()
    config = config.model_copy(update={"engine": OnnxRuntime(threads=1)})
    texts = []
    for number in (1, 2):
        built = tmp_path / str(number)
        build(with_ranks(config, number), built, lambda *_: None)
        tokenizer = load_tokenizer(built / "tokenizer")
        ids = tokenizer.encode(PROMPT).ids
        report = check_lossless(built / "engines", [ids], 32, Speculation(), lambda done: None)
        texts.append(report.outputs[0])
    assert texts[0] == texts[1]
    ports = serve_ports()
    url = f"127.0.0.1:{ports.grpc}"
    with serving(built, ports) as (process, _):
        assert process.stdout is not None
        assert served(url) == texts[0]
        (pid,) = others(built / "engines" / "target")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServerError):
            served(url)
        bound = threading.Timer(WAIT, process.kill)
        bound.start()
        said = ""
        while "ready again" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        bound.cancel()
        assert "the process of verify ended" in said
        assert served(url) == texts[0]
    wait_until(lambda: not others(built))


def served(url: str) -> list[int]:
    return [token for chunk in stream(url, PROMPT, max_tokens=32) for token in chunk.token_ids]
