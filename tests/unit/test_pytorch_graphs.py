"""Steps recorded as CUDA graphs, over a stand-in of PyTorch's (`tests/standins/cuda.py`)."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.decoding import Request, in_process
from dflash_trt.engines import load_engine
from dflash_trt.engines.gpu import Gpu
from dflash_trt.engines.pytorch.program import Calls, Program
from dflash_trt.speculation import Fixed
from tests.standins.cuda import CUDAGraph, Pool, install, recorded_steps
from tests.support.builds import build_engines
from tests.support.equality import run_all, scheduler_of, target_step
from tests.support.families import make
from tests.support.pairs import Pair, make_pair

SLOTS, LENGTH = 3, 96


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def built(pair: Pair, directory: Path) -> Path:
    sizes: dict[str, Any] = {"slots": SLOTS, "max_seq_len": LENGTH, "kind": "pytorch"}
    build_engines(pair.target_dir, pair.drafter_dir, directory / "engines", **sizes)
    return directory / "engines"


def texts(engines: Path, drafts: int) -> list[list[int]]:
    rounds = in_process(load_engine(engines / "target"), load_engine(engines / "drafter"))
    scheduler = scheduler_of(rounds, Fixed(drafts), slots=SLOTS, max_seq_len=LENGTH)
    requests = [Request([(31 * i + 7 * k) % 300 for i in range(9)], 30) for k in range(SLOTS)]
    return [each.tokens for each in run_all(scheduler, requests)]


def test_a_step_is_recorded_when_it_comes_again(gpu: None, tmp_path: Path) -> None:
    engine = load_engine(built(make_pair(tmp_path / "pair"), tmp_path) / "target")
    text = [(7 * i + 3) % 301 for i in range(40)]
    recorded = []
    for start in range(20, 24):
        found = target_step(engine, text[start : start + 1], start)
        assert np.isfinite(found["top_logits"]).all()
        recorded.append(len(recorded_steps()))
    # each start has another number of visible tokens here, and so is another step
    assert recorded == [0] * 4
    for again in range(3):
        target_step(engine, text[20:21], 20)
        assert [graph.replays for graph in recorded_steps()] == [again + 1]


def test_slots_share_what_a_step_of_a_size_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, written = Program.calls, list[Calls]()

    def counted(*given: Any) -> Calls:
        written.append(calls(*given))
        return written[-1]

    monkeypatch.setattr(Program, "calls", counted)
    engine = load_engine(built(make_pair(tmp_path / "pair"), tmp_path) / "target")
    text = [(7 * i + 3) % 301 for i in range(4)]
    logits = [target_step(engine, text, 0, slot)["logits"] for slot in range(SLOTS)]
    assert len(written) == 1
    for each in logits[1:]:
        np.testing.assert_array_equal(each, logits[0])
    target_step(engine, text[:2], 0)
    assert len(written) == 2


def test_prompts_are_not_recorded(gpu: None, tmp_path: Path) -> None:
    engine = load_engine(built(make_pair(tmp_path / "pair"), tmp_path) / "target")
    for _ in range(3):
        target_step(engine, range(5, 5 + engine.info.most_verified + 1), 0)
    assert not recorded_steps()


def test_recorded_steps_read_new_numbers(gpu: None, tmp_path: Path) -> None:
    """A replay takes what is in its inputs and caches by then, and writes where it did before."""
    engines = built(make_pair(tmp_path / "pair"), tmp_path)
    engine, text = load_engine(engines / "target"), [(7 * i * i + 3) % 301 for i in range(30)]
    found = []
    for start in range(12):  # always 32 visible tokens
        step = engine.step(1, 1, 1, 32, 1)
        step.inputs["tokens"][:] = text[start]
        step.inputs["positions"][:] = step.inputs["write_index"][:] = start
        step.inputs["mask"][:] = np.arange(32) <= start
        step.inputs["scored_tokens"][:] = 0
        step.run()
        found.append(np.array(step.outputs["logits"][0]))
    (graph,) = recorded_steps()
    assert graph.replays == 11
    whole = target_step(engine, text[:12], 0, 2)["logits"]
    np.testing.assert_allclose(found, whole, atol=1e-4, rtol=1e-5)


def test_steps_are_recorded_again_after_their_memory_has_grown(gpu: None, tmp_path: Path) -> None:
    """A larger step drops those on the old memory, and the pool has no graph of a step any more."""
    engine = load_engine(built(make_pair(tmp_path / "pair"), tmp_path) / "target")
    text = [(7 * i + 3) % 301 for i in range(12)]
    for width in (1, 2, 8):
        logits = [target_step(engine, text[:width], 0)["logits"] for _ in range(3)]
        assert [graph.replays for graph in recorded_steps()] == [2]
        np.testing.assert_array_equal(logits[2], logits[0])


@pytest.mark.parametrize("name", ["dense", "gemma2", "qwen3.5"])
def test_texts_of_recorded_rounds(name: str, tmp_path: Path) -> None:
    """Graphs of target and drafter take turns in one memory; a hybrid's are by its counts too."""
    pair = make_pair(tmp_path / "pair") if name == "dense" else make(name, tmp_path)
    engines = built(pair, tmp_path)
    expected = texts(engines, 4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        assert texts(engines, 4) == expected
        # a target and a drafter, if the step was not dropped for a larger one
        assert len(recorded_steps()) >= 2
        assert max(graph.replays for graph in recorded_steps()) > 2


def test_the_stand_in_refuses_what_a_capture_does(gpu: None) -> None:
    device, numbers = Gpu(0), torch.zeros(3)
    with pytest.raises(AssertionError, match="waits for the GPU"):
        device.record(lambda: print(numbers[0].item()))
    with pytest.raises(AssertionError, match="cannot be waited for"):
        device.record(device.wait)
    with pytest.raises(AssertionError, match="default stream"):
        CUDAGraph().capture_begin(Pool(), "thread_local")
    with pytest.raises(AssertionError, match="within another"):
        device.record(lambda: CUDAGraph().capture_begin(Pool(), "thread_local"))


def test_the_stand_in_refuses_what_is_gone(gpu: None) -> None:
    device, numbers, pool = Gpu(0), torch.zeros(3), Pool()
    launch = device.record(lambda numbers=numbers: numbers.add_(1))
    launch()
    assert numbers.tolist() == [1, 1, 1]
    graph = CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool, "thread_local")
        torch.zeros(3) + numbers
        graph.capture_end()
        del launch, numbers
        with pytest.raises(AssertionError, match="memory that is gone"):
            graph.replay()
        del graph
        with pytest.raises(AssertionError, match="whose graphs are gone"):
            CUDAGraph().capture_begin(pool, "thread_local")


def test_a_recording_keeps_what_its_work_reads(gpu: None) -> None:
    device, numbers = Gpu(0), torch.zeros(3)
    launch = device.record(partial(numbers.add_, torch.ones(3)))
    launch()
    assert numbers.tolist() == [1, 1, 1]


def test_a_recording_runs_nothing_until_it_is_launched(gpu: None) -> None:
    device, numbers = Gpu(0), torch.zeros(3)
    launch = device.record(lambda: numbers.add_(1))
    assert numbers.tolist() == [0, 0, 0]
    launch()
    launch()
    assert numbers.tolist() == [2, 2, 2]
