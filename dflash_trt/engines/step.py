"""The interface of engines, the tensors of a step, and loading an engine of any kind."""

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import numpy as np

from dflash_trt.engine_kinds import graph_facts
from dflash_trt.engines.info import EngineInfo, read_info
from dflash_trt.errors import EngineError

REPORT = "This is an error of dflash-trt: please report it with the server's log."
FIRST_BLOCK = 2**32  # numbers from here on are blocks of the prefix cache, outside the slots
FIRST_STATE = 2**33  # and from here on those of a hybrid that hold a whole state too
Tensors = dict[str, tuple[type[np.generic], tuple[int, ...]]]  # dtype and shape by name


@dataclass(frozen=True, eq=False)
class DeviceStep:
    """What a step leaves on a GPU."""

    gpu: Any  # `engines.gpu.Gpu`
    logits: Any  # a tensor of torch, `[scored_tokens, vocab]`
    start: Callable[[], object]  # runs the step; does not wait


@dataclass(frozen=True)
class Step:
    """Arrays by the graph's names, bound to one call."""

    # numpy's; features may be a tensor of torch on a GPU
    inputs: dict[str, Any]  # int64, except mask bool and features float32
    outputs: dict[str, Any]  # float32, except top_ids int64
    run: Callable[[], object]
    on_device: DeviceStep | None = None


Key = TypeVar("Key")
Value = TypeVar("Value")


class Bounded(dict[Key, Value]):
    """At most `limit` values; what was not used for longest goes first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def of(self, key: Key, make: Callable[[], Value]) -> Value:
        value = self.pop(key, None)
        if value is None:
            if len(self) >= self._limit:
                del self[next(iter(self))]
            value = make()
        self[key] = value
        return value


class Engine(Protocol):
    """A loaded model with its KV caches, `[slots, kv_heads, cache_len, head_dim]`.

    A caller rolls back by passing a lower `write_index` next time, and to a hybrid how many of the
    last drafts were accepted.
    """

    info: EngineInfo
    visible_step: int  # `visible` should be a multiple, so that few steps are bound
    least_tokens: (
        int  # 1, or 2: fewest tokens and scored tokens of a step, see `onnxruntime.least_tokens`
    )

    def step(
        self,
        first_slot: int,
        n: int,
        width: int,
        visible: int,
        scored_tokens: int,
        context: int = 0,
    ) -> Step:
        """Return a step of the sequences in `n` slots from the first on, to be filled and run.

        width: tokens per sequence; visible: tokens of a slot that the mask covers; scored_tokens:
        in all, that get logits; context: features per sequence, of a drafter. The arrays belong
        to the engine: fill all inputs before each run, because steps share memory; the next step
        overwrites the outputs.
        """

    def copy_kv(self, source: int, destination: int, tokens: int, start: int = 0) -> None:
        """Copy KV entries of tokens `start .. start+tokens-1` to the same place of another slot.

        One side may be a number from FIRST_BLOCK on: the tokens are stored under it, replacing what
        was there, or loaded from it.

        A hybrid's states go along with slots, whatever the tokens, and with numbers from
        FIRST_STATE on: such numbers hold the state without the last drafts.
        """

    def drop(self, block: int) -> None:
        """Drop what is stored under a number from FIRST_BLOCK on."""

    def clear(self, slot: int) -> None:
        """Write zeros to a slot: a masked entry must be finite, because it is multiplied by 0."""

    def reset_state(self, slot: int) -> None:
        """Make a slot's state that of no tokens, if the model is a hybrid."""


def step_tensors(
    info: EngineInfo, n: int, width: int, visible: int, scored_tokens: int, context: int
) -> tuple[Tensors, Tensors]:
    """Return inputs and outputs of a step, without caches; see `Engine.step`."""
    inputs: Tensors = {
        "tokens" if info.role == "target" else "block": (np.int64, (n, width)),
        "positions": (np.int64, (n, context + width)),
        "write_index": (np.int64, (n,)),
        "mask": (np.bool_, (n, 1, width, visible)),
        "scored_tokens": (np.int64, (scored_tokens,)),
    }
    outputs: Tensors = {
        "top_ids": (np.int64, (scored_tokens, info.best)),
        "top_logits": (np.float32, (scored_tokens, info.best)),
        "logits": (np.float32, (scored_tokens, info.vocab_size)),
    }
    if info.states is not None:
        inputs["known"] = (np.int64, (1,))
        inputs["accepted"] = (np.int64, (n,))
    if info.role == "target" and info.feature_size:
        outputs["features"] = (np.float32, (n, width, info.feature_size))
    elif info.role == "drafter":
        inputs["features"] = (np.float32, (n, context, info.feature_size))
    if info.pair_scores:
        outputs["pair_scores"] = (np.float32, (scored_tokens, info.best, info.best))
    return inputs, outputs


class LoadedEngine(ABC):
    """An `engines.step.Engine` over arrays of numpy or torch."""

    visible_step: int

    def __init__(self, info: EngineInfo, most_steps: int) -> None:
        self.info = info
        # bound steps by the arguments of `step`
        self._steps: Bounded[tuple[int, ...], Step] = Bounded(most_steps)
        self._room: dict[str, tuple[int, Any]] = {}
        self._alike: list[Any] = []  # by shape: [caches, slots, heads, KV entries, head_dim]
        self._states: dict[str, Any] = {}  # a hybrid's, by name: [layers, slots, ...]
        self._caches: dict[str, Any] = {}
        self.least_tokens = 1
        self._blocks: dict[int, list[Any]] = {}  # kept tokens by number, by group
        self._kept_states: dict[int, dict[str, Any]] = {}  # by number, by name

    @abstractmethod
    def _zeros(self, shape: tuple[int, ...]) -> Any: ...

    def _state_zeros(self, shape: tuple[int, ...]) -> Any:
        """Return zeros for a hybrid's states, which are float32 whatever KV caches are."""
        return self._zeros(shape)

    @abstractmethod
    def _copy(self, source: Any, destination: Any) -> None: ...

    @abstractmethod
    def _bind(
        self, first_slot: int, n: int, width: int, visible: int, scored_tokens: int, context: int
    ) -> Step: ...

    def step(
        self,
        first_slot: int,
        n: int,
        width: int,
        visible: int,
        scored_tokens: int,
        context: int = 0,
    ) -> Step:
        slots = self.info.slots
        if first_slot + n > slots:
            raise EngineError(
                f"A step of slots {first_slot} to {first_slot + n - 1} was asked of {slots}", REPORT
            )
        sizes = (first_slot, n, width, visible, scored_tokens, context)
        return self._steps.of(sizes, lambda: self._within_caches(*sizes))

    def _within_caches(
        self, first_slot: int, n: int, width: int, visible: int, scored_tokens: int, context: int
    ) -> Step:
        step = self._bind(first_slot, n, width, visible, scored_tokens, context)
        within = partial(_run_within, step.inputs, context + width, self.info)
        on_device = step.on_device
        if on_device is not None:
            on_device = replace(on_device, start=partial(within, on_device.start))
        return Step(step.inputs, step.outputs, partial(within, step.run), on_device)

    def copy_kv(self, source: int, destination: int, tokens: int, start: int = 0) -> None:
        if destination >= FIRST_BLOCK:
            self._blocks[destination] = [
                self._zeros((len(x), x.shape[2], tokens, x.shape[4])) for x in self._alike
            ]
        for group in range(len(self._alike)):
            copied = self._kv_entries(source, group, start, tokens)
            replaced = self._kv_entries(destination, group, start, tokens)
            self._copy(copied, replaced)
        if self._states:
            self._copy_state(source, destination)

    def _kv_entries(self, number: int, group: int, start: int, tokens: int) -> Any:
        """Return KV entries of some tokens of a slot, or all of a block, in caches of one size."""
        if number >= FIRST_BLOCK:
            return self._blocks[number][group]
        return self._alike[group][:, number, :, start : start + tokens]

    def drop(self, block: int) -> None:
        self._blocks.pop(block, None)
        self._kept_states.pop(block, None)

    def clear(self, slot: int) -> None:
        for caches in self._alike:
            self._copy(self._zeros((1,)), caches[:, slot])
        self.reset_state(slot)

    def reset_state(self, slot: int) -> None:
        for states in self._states.values():
            self._copy(self._state_zeros((1,)), states[:, slot])

    def _copy_state(self, source: int, destination: int) -> None:
        """Copy a hybrid's states between slots and kept ones; blocks have none."""
        if destination >= FIRST_STATE:
            self._kept_states[destination] = {}
            for name, state in self._without_drafts(source).items():
                copy = self._state_zeros(tuple(state.shape))
                self._copy(state, copy)
                self._kept_states[destination][name] = copy
        elif source >= FIRST_STATE:
            for name, state in self._without_drafts(destination).items():
                self._copy(self._kept_states[source][name], state)
        elif source < FIRST_BLOCK and destination < FIRST_BLOCK:
            for states in self._states.values():
                self._copy(states[:, source], states[:, destination])

    def _without_drafts(self, slot: int) -> dict[str, Any]:
        """Return a slot's state before the last drafts, and what its convolutions read first."""
        assert self.info.states is not None
        inputs = self._states["inputs"][:, slot, : self.info.states.window]
        return {"state": self._states["state"][:, slot], "inputs": inputs}

    def _make_caches(self) -> None:
        # equal caches share one array, so that tokens are moved in all layers at once
        by_size: dict[tuple[int, int], list[str]] = {}
        for layer, size in enumerate(self.info.caches):
            by_size.setdefault(size, []).extend((f"key_{layer}", f"value_{layer}"))
        for (heads, head_dim), names in by_size.items():
            shape = (len(names), self.info.slots, heads, self.info.cache_len, head_dim)
            self._alike.append(self._zeros(shape))
            self._caches.update(zip(names, self._alike[-1], strict=True))
        if (states := self.info.states) is not None:
            for name, of_slot in states.caches.items():
                whole = self._state_zeros((states.layers, self.info.slots, *of_slot))
                self._states[name] = whole
                self._caches |= {f"{name}_{layer}": part for layer, part in enumerate(whole)}

    def _buffer(self, name: str, shape: tuple[int, ...], make: Callable[[int], Any]) -> Any:
        """Return the buffer of this name, made by `make(size)`; shared, because it may be large."""
        size = math.prod(shape)
        room, buffer = self._room.pop(name, (0, None))
        if buffer is None or room < size:
            # doubled, so that it seldom grows; the old one goes first, and steps that reference it
            room = size if buffer is None else 2 * size
            self._steps.clear()
            del buffer
            buffer = make(room)
        self._room[name] = room, buffer
        return buffer


def _run_within(
    inputs: dict[str, Any], written: int, info: EngineInfo, run: Callable[[], object]
) -> None:
    """Run a step that writes so many KV entries of a sequence, if its caches have room."""
    end = int(inputs["write_index"].max()) + written
    if end > info.cache_len:
        raise EngineError(
            f"A step of the {info.role} would write up to entry {end} of caches of "
            f"{info.cache_len}",
            REPORT,
        )
    run()


def load_engine(directory: Path, alone: bool = False) -> Engine:
    """Load a target or a drafter; EngineError if that fails.

    alone: in this process; another process with an engine takes turns on the same cores. Engines on
    a GPU then have features on the host, too.
    """
    info = read_info(directory)
    loader = module_of(graph_facts(info.kind).engine)
    engine: Engine = loader.Engine(directory, alone=alone)
    return engine


def check_machine(info: EngineInfo) -> None:
    """Raise EngineError for what an engine needs and this machine lacks, before it is loaded."""
    name = graph_facts(info.kind).machine
    if name is not None:
        module_of(name).check_machine(info)


def module_of(name: str) -> ModuleType:
    """Import a module that a kind names."""
    return importlib.import_module(f"dflash_trt.engines.{name}")


def role_directories(engines: Path) -> list[Path]:
    drafter = engines / "drafter"
    return [engines / "target", *([drafter] if drafter.is_dir() else [])]


def load_engines(engines: Path) -> tuple[Engine, Engine | None]:
    target, *others = map(load_engine, role_directories(engines))
    return target, others[0] if others else None


def read_infos(engines: Path) -> list[EngineInfo]:
    return [read_info(directory) for directory in role_directories(engines)]
