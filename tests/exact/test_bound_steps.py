"""Steps are bound once, and are few in memory, however many lengths prompts have."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.engines.step import Bounded, Step
from dflash_trt.errors import EngineError


def test_what_was_not_used_for_longest_makes_room_for_another() -> None:
    bound: list[int] = []

    def bind(key: int) -> Step:
        bound.append(key)
        return Step({}, {}, list)

    steps: Bounded[tuple[int], Step] = Bounded(3)
    for key in (1, 2, 3, 1, 4, 1, 3, 2, 1):
        steps.of((key,), partial(bind, key))
    assert bound == [1, 2, 3, 4, 2]
    assert [*steps] == [(3,), (2,), (1,)]


def test_all_steps_share_their_memory(built: Path) -> None:
    engine = Engine(built / "engines" / "drafter")
    steps = [engine.step(0, 1, 8, 128, 7, context=length) for length in (100, 30, 60)]
    for name, array in {**steps[0].inputs, **steps[0].outputs}.items():
        for step in steps[1:]:
            assert np.shares_memory(array, {**step.inputs, **step.outputs}[name]), name


def test_a_step_that_needs_more_memory_leaves_none_on_the_old(built: Path) -> None:
    engine = Engine(built / "engines" / "drafter")
    small = engine.step(0, 1, 8, 128, 7, context=30)
    large = engine.step(0, 1, 8, 128, 7, context=100)
    again = engine.step(0, 1, 8, 128, 7, context=30)
    assert not np.shares_memory(small.inputs["features"], large.inputs["features"])
    assert np.shares_memory(again.inputs["features"], large.inputs["features"])


@pytest.mark.parametrize(("role", "context"), [("target", 0), ("drafter", 2)])
def test_a_step_beyond_the_caches_is_refused(built: Path, role: str, context: int) -> None:
    engine = Engine(built / "engines" / role)
    step = engine.step(0, 1, 2, 32, 2, context=context)
    for array in step.inputs.values():
        array[...] = 0
    step.inputs["write_index"][:] = engine.info.cache_len - 2 - context
    step.run()
    step.inputs["write_index"][:] += 1
    with pytest.raises(EngineError, match=f"the {role} would write up to entry"):
        step.run()
    slots = engine.info.slots
    with pytest.raises(EngineError, match=f"was asked of {slots}"):
        engine.step(1, slots, 1, 32, 1, context=context)
