"""A target, a drafter and their pair, as far as readable, refused models included."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from tokenizers import Tokenizer

from dflash_trt.checkpoints.directory import REQUIRED, has_tokenizer, load_tokenizer
from dflash_trt.checkpoints.fields import ORIGINAL, Config
from dflash_trt.checkpoints.spec import DrafterSpec, LayerSpec, Rope, TargetSpec
from dflash_trt.config import Method
from dflash_trt.errors import CheckpointError
from dflash_trt.weights.json_file import read_json
from dflash_trt.weights.weights import Weights

Spec = TypeVar("Spec", TargetSpec, DrafterSpec)
# objects of a config.json whose fields take precedence over those beside them
INNER = ("text_config", "transformer_layer_config", "dflash_config")

MAX_SIZE = 1 << 48  # a larger number is no valid size
OTHER_DRAFTER = "Use the drafter that was trained for this target"


class NotKnown(Exception):
    """A value that a check needs is unknown."""


@dataclass(frozen=True)
class Model(Generic[Spec]):
    role: str  # "target" or "drafter"
    directory: Path
    values: Mapping[str, Any]  # config.json, flat
    refusal: CheckpointError | None = None
    read: tuple[Spec, Weights] | None = None  # None: refused, or absent

    @property
    def absent(self) -> bool:
        return self.read is None and self.refusal is None

    @property
    def only_config(self) -> bool:
        """Whether config.json is all that is here of the model."""
        return [file.name for file in self.directory.iterdir()] == ["config.json"]

    @property
    def spec(self) -> Spec:
        return self._read()[0]

    @property
    def weights(self) -> Weights:
        return self._read()[1]

    @property
    def architecture(self) -> str:
        names = self.values.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else "unknown"

    def number(self, name: str) -> int:
        """Return a field of the spec, or of a refused model's config; NotKnown if no integer."""
        spec = self.read[0] if self.read else None
        value = getattr(spec, name, self.values.get(name))
        if type(value) is not int or abs(value) > MAX_SIZE:
            raise NotKnown(f"the {self.role} states no {name}")
        return value

    def number_or_none(self, *names: str) -> int | None:
        for name in names:
            with suppress(NotKnown):
                return self.number(name)
        return None

    @property
    def taps(self) -> tuple[int, ...]:
        """A drafter's target_layer_ids; 0 is the output of the first layer."""
        if self.read and isinstance(self.read[0], DrafterSpec):
            return self.read[0].target_layer_ids
        first = 1  # the id of the first layer's output
        taps = self.values.get("aux_hidden_state_layer_ids")
        if not taps:
            first = 0
            taps = self.values.get("target_layer_ids")
        if not isinstance(taps, list) or not taps or any(type(tap) is not int for tap in taps):
            raise NotKnown("the drafter states no target_layer_ids")
        return tuple(tap - first for tap in taps)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.spec.layers

    @cached_property
    def stored(self) -> Weights | None:
        """The weights, if readable, even of a refused model."""
        try:
            return self.read[1] if self.read else Weights(self.directory, self.values)
        except CheckpointError:
            return None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not has_tokenizer(self.directory):
            raise NotKnown(f"the {self.role} has no {REQUIRED}")
        return load_tokenizer(self.directory)

    @cached_property
    def tokens(self) -> dict[str, int]:
        return self.tokenizer.get_vocab(with_added_tokens=True)

    @property
    def highest_token(self) -> int:
        return max(self.tokens.values(), default=-1)

    @cached_property
    def token_texts(self) -> dict[int, str]:
        return {token: text for text, token in self.tokens.items()}

    def _read(self) -> tuple[Spec, Weights]:
        if self.read is None:
            raise NotKnown(f"the {self.role} is refused")
        return self.read


Target = Model[TargetSpec]
Drafter = Model[DrafterSpec]
NO_DRAFTER: Drafter = Model("drafter", Path(), {})


@dataclass(frozen=True)
class Pair:
    """The subject of checks; fields besides the models are from the build config, or None."""

    target: Target
    drafter: Drafter
    draft_tokens: int | None = None
    max_seq_len: int | None = None
    method: Method = "dflash"


def open_model(
    role: str, directory: Path, read: Callable[[Config], tuple[Spec, Weights]]
) -> Model[Spec]:
    """Apply `read`, whose refusal is stored; CheckpointError only if config.json is unreadable."""
    file = directory / "config.json"
    config = read_json(file)
    try:
        return Model(role, directory, flat(config), read=read(Config(file, config)))
    except CheckpointError as refusal:
        return Model(role, directory, flat(config), refusal)


def unless_refused(model: Model[Spec]) -> Model[Spec]:
    if model.refusal is not None:
        raise model.refusal
    return model


def for_length(model: Model[Spec], length: int) -> Model[Spec]:
    """Return the model with dynamic RoPE fixed for texts of this length.

    Beyond the original length it rotates more slowly, for all texts alike, as in vLLM. transformers
    instead changes it with each length, and cached keys keep the RoPE of their time.
    """
    spec = model.spec

    def stretched(rope: Rope) -> Rope:
        factor = rope.parameters.get("factor", 1.0)
        original = rope.parameters.get(ORIGINAL, 1.0)
        if rope.kind != "dynamic" or length <= original:
            return rope
        scale = (factor * factor - factor + 1) ** (rope.dim / (rope.dim - 2))
        return replace(rope, theta=rope.theta * scale)

    layers = tuple(replace(layer, rope=stretched(layer.rope)) for layer in spec.layers)
    return replace(model, read=(replace(spec, layers=layers), model.weights))


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(config)
    for name in INNER:
        inner = fields.get(name)
        if isinstance(inner, dict):
            fields |= {key: value for key, value in inner.items() if value is not None}
    return fields | {"architectures": config.get("architectures")}


def finite_or_none(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)
