"""A target, a drafter and their pair as far as they can be read, refused models included."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from tokenizers import Tokenizer

from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.checkpoints.drafter import Drafter, load_drafter
from dflash_trt.checkpoints.files import REQUIRED, check_directory, load_tokenizer, read_json
from dflash_trt.checkpoints.spec import LayerSpec
from dflash_trt.checkpoints.target import Target, load_target
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.config import Method
from dflash_trt.errors import CheckpointError

Loaded = TypeVar("Loaded", Target, Drafter)
# objects of a config.json whose fields say more than those beside them
INNER = ("text_config", "transformer_layer_config", "dflash_config")

MAX_SIZE = 1 << 48  # a larger number is no size
OTHER_DRAFTER = "Use the drafter that was trained for this target"


@dataclass(frozen=True)
class ModelSummary(Generic[Loaded]):
    """One model: what its config says, and the model as the graphs take it."""

    role: str  # "target" or "drafter"
    directory: Path
    values: Mapping[str, Any]  # config.json, flat
    refusal: CheckpointError | None = None
    model: Loaded | None = None  # None: refused

    @property
    def absent(self) -> bool:
        return self.model is None and self.refusal is None

    @property
    def architecture(self) -> str:
        found = self.values.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else "unknown"

    @property
    def loaded(self) -> Loaded:
        if self.model is None:
            raise NotKnown(f"the {self.role} is refused")
        return self.model

    def number(self, name: str) -> int:
        """A field of the spec, for a refused model of its config; NotKnown unless an integer."""
        source = self.model.spec if self.model else None
        value = getattr(source, name) if hasattr(source, name) else self.values.get(name)
        if type(value) is not int or abs(value) > MAX_SIZE:
            raise NotKnown(f"the {self.role} states no {name}")
        return value

    @property
    def taps(self) -> tuple[int, ...]:
        """A drafter's target_layer_ids, 0 for the output of the first layer."""
        if isinstance(self.model, Drafter):
            return self.model.spec.target_layer_ids
        shift = 1 if (stored := self.values.get("aux_hidden_state_layer_ids")) else 0
        found = stored or self.values.get("target_layer_ids")
        if not isinstance(found, list) or not found or any(type(tap) is not int for tap in found):
            raise NotKnown("the drafter states no target_layer_ids")
        return tuple(tap - shift for tap in found)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.loaded.spec.layers

    @cached_property
    def weights(self) -> Weights | None:
        """Of a refused model too, where they can be read."""
        try:
            return self.model.weights if self.model else Weights(self.directory, self.values)
        except CheckpointError:
            return None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not (self.directory / REQUIRED).is_file():
            raise NotKnown(f"the {self.role} has no {REQUIRED}")
        return load_tokenizer(self.directory)

    @cached_property
    def tokens(self) -> dict[str, int]:
        """The tokenizer's vocabulary, added tokens included."""
        return self.tokenizer.get_vocab(with_added_tokens=True)

    @property
    def highest_token(self) -> int:
        return max(self.tokens.values(), default=-1)

    @cached_property
    def texts(self) -> dict[int, str]:
        """Its tokens by id."""
        return {token: text for text, token in self.tokens.items()}


NO_DRAFTER: ModelSummary[Drafter] = ModelSummary("drafter", Path(), {})


@dataclass(frozen=True)
class Pair:
    """What is checked; all but the models comes from the build config, None where there is none."""

    target: ModelSummary[Target]
    drafter: ModelSummary[Drafter]
    draft_tokens: int | None = None
    max_seq_len: int | None = None
    method: Method = "dflash"


def summarize_target(directory: Path) -> ModelSummary[Target]:
    """CheckpointError only when there is no config.json to read."""
    return _summary("target", directory, load_target)


def summarize_drafter(directory: Path) -> ModelSummary[Drafter]:
    """CheckpointError only when there is no config.json to read."""
    return _summary("drafter", directory, load_drafter)


def _summary(role: str, directory: Path, load: Callable[[Path], Loaded]) -> ModelSummary[Loaded]:
    values = config_values(directory, role)
    try:
        return ModelSummary(role, directory, values, model=load(directory))
    except CheckpointError as refusal:
        return ModelSummary(role, directory, values, refusal)


def config_values(directory: Path, role: str) -> dict[str, Any]:
    """config.json with the fields of its inner objects (`INNER`) over its own."""
    check_directory(directory, role)
    config = outer = read_json(directory / "config.json")
    for name in INNER:
        if isinstance(inner := config.get(name), dict):
            config = config | {key: value for key, value in inner.items() if value is not None}
    return config | {"architectures": outer.get("architectures")}


def finite(value: object) -> float | None:
    """A number as float, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        return None
    return float(value) if abs(value) < 1e300 else None
