"""A step's logits, on the host or on a GPU: which drafts they accept, and log-probabilities."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from dflash_trt.decoding.acceptance import Accepted, accept, accept_greedy
from dflash_trt.decoding.arrays import Float32
from dflash_trt.decoding.logprobs import log_probabilities
from dflash_trt.decoding.messages import Logprobs, RoundSequence
from dflash_trt.decoding.place_rules import place_rules
from dflash_trt.decoding.sampling import NO_TOKEN
from dflash_trt.engines import DeviceStep, Step

if TYPE_CHECKING:
    from dflash_trt.decoding.device_sampling import Chooser

_choosers: "WeakKeyDictionary[DeviceStep, Chooser]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Scored:
    """Tokens of a sequence, from its first place on, whose log-probabilities are requested."""

    sequence: int
    tokens: Sequence[int]
    alternatives: int


@dataclass(frozen=True)
class StepLogits(ABC):
    """The logits of a step of n sequences, as many places of each."""

    step: Step
    sequences: int
    skipped: int  # places of a sequence before the first that chooses a token

    @abstractmethod
    def accept(self, sequences: Sequence[RoundSequence]) -> list[Accepted | None]:
        """Run the step and accept each sequence's drafts up to the first that is not the target's.

        A sequence's result is None if at a place it needs its logits are not finite or no token is
        allowed.
        """

    @abstractmethod
    def log_probabilities(self, requested: Sequence[Scored]) -> list[Logprobs]:
        """Return those of tokens, and of the best in their places, after `accept`."""

    def _likeliest(self) -> list[list[int]]:
        """Return each sequence's likeliest tokens, NO_TOKEN where logits are not finite."""
        finite = np.isfinite(self.step.outputs["top_logits"])
        tokens = np.where(finite, self.step.outputs["top_ids"], NO_TOKEN)
        likeliest: list[list[int]] = tokens.reshape(self.sequences, -1)[:, self.skipped :].tolist()
        return likeliest


def logits_of(step: Step, sequences: int, skipped: int) -> StepLogits:
    if step.on_device is None:
        return HostLogits(step, sequences, skipped)
    return DeviceLogits(step, sequences, skipped, step.on_device)


@dataclass(frozen=True)
class HostLogits(StepLogits):
    def accept(self, sequences: Sequence[RoundSequence]) -> list[Accepted | None]:
        self.step.run()
        return accept(sequences, self._likeliest(), lambda: self._read[:, self.skipped :])

    def log_probabilities(self, requested: Sequence[Scored]) -> list[Logprobs]:
        return [
            log_probabilities(self._read[scored.sequence], scored.tokens, scored.alternatives)
            for scored in requested
        ]

    @cached_property
    def _read(self) -> Float32:
        logits: Float32 = self.step.outputs["logits"]
        return logits.reshape(self.sequences, -1, logits.shape[-1])


@dataclass(frozen=True)
class DeviceLogits(StepLogits):
    """What comes to the host are tokens and requested log-probabilities."""

    on_device: DeviceStep

    def accept(self, sequences: Sequence[RoundSequence]) -> list[Accepted | None]:
        ruled = [
            index
            for index, sequence in enumerate(sequences)
            if sequence.masks or not sequence.processor.greedy
        ]
        if not ruled:
            self.step.run()
            return _accept_choices(sequences, self._likeliest())
        self.on_device.start()
        first_rows = [self._first_row(index) + self.skipped for index in ruled]
        vocab = self.on_device.logits.shape[1]
        # made while the device runs the step
        rules = place_rules([sequences[index] for index in ruled], first_rows, vocab)
        chosen = self._chooser.start(rules)().tolist()
        choices = self._likeliest()
        for index in ruled:
            places = 1 + len(sequences[index].drafts)
            of_sequence, chosen = chosen[:places], chosen[places:]
            choices[index] = [
                NO_TOKEN if likeliest == NO_TOKEN else token
                for token, likeliest in zip(of_sequence, choices[index], strict=False)
            ]
        return _accept_choices(sequences, choices)

    def log_probabilities(self, requested: Sequence[Scored]) -> list[Logprobs]:
        if not requested:
            return []
        rows, tokens = list[int](), list[int]()
        for scored in requested:
            first = self._first_row(scored.sequence)
            rows += range(first, first + len(scored.tokens))
            tokens += scored.tokens
        most = max(scored.alternatives for scored in requested)
        together = self._chooser.log_probabilities(rows, tokens, most)
        results = []
        end = 0
        for scored in requested:
            lines = slice(end, end + len(scored.tokens))
            columns = slice(1 + scored.alternatives)
            results.append(Logprobs(together.values[lines, columns], together.ids[lines, columns]))
            end = lines.stop
        return results

    def _first_row(self, sequence: int) -> int:
        """Return the row of the logits with a sequence's first place."""
        rows: int = len(self.on_device.logits)
        return sequence * (rows // self.sequences)

    @property
    def _chooser(self) -> "Chooser":
        from dflash_trt.decoding.device_sampling import Chooser  # noqa: PLC0415  (it needs torch)

        if self.on_device not in _choosers:
            _choosers[self.on_device] = Chooser(self.on_device.gpu, self.on_device.logits)
        return _choosers[self.on_device]


def _accept_choices(
    sequences: Sequence[RoundSequence], choices: Sequence[Sequence[int]]
) -> list[Accepted | None]:
    return [
        accept_greedy(sequence.drafts, chosen)
        for sequence, chosen in zip(sequences, choices, strict=True)
    ]
