"""Does this drafter belong to this target? Whatever would make acceptance collapse has a name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from dflash_trt.checkpoints.checks import Found, numerics, sizes, taps, tensors, tokens
from dflash_trt.checkpoints.drafter import Drafter
from dflash_trt.checkpoints.outline import NotKnown, Outline, Pair, config_values
from dflash_trt.checkpoints.target import Target
from dflash_trt.errors import CheckpointError, PairError

Look = Callable[[Pair], Found]
Severity = Literal["error", "warning", "note"]
# error: cannot run, or never drafts well; warning: suspicious, or worse than it could be; note: of
# an engine kind only (engines/tensorrt_llm/checks)
OF_TARGET: tuple[tuple[Look, Severity], ...] = (
    (tensors.target_head, "error"),
    (tensors.target_tensors, "error"),
    (tokens.tokenizer_fits, "error"),
)
CHECKS: tuple[tuple[Look, Severity], ...] = (
    *OF_TARGET,
    (sizes.hidden_size, "error"),
    (sizes.vocabulary, "error"),
    (sizes.target_layers, "error"),
    (taps.taps_in_range, "error"),
    (taps.last_layer_not_tapped, "error"),
    (taps.fc_width, "error"),
    (taps.taps_stated, "warning"),
    (taps.taps_off_by_one, "warning"),
    (taps.taps_in_order, "warning"),
    (tokens.mask_in_vocabulary, "error"),
    (tokens.mask_as_published, "warning"),
    (tokens.mask_in_tokenizer, "warning"),
    (tokens.mask_is_special, "warning"),
    (tokens.mask_is_no_end, "warning"),
    (tokens.same_tokenizer, "error"),
    (sizes.block_size, "error"),
    (sizes.block_size_stated, "warning"),
    (sizes.draft_tokens, "error"),
    (sizes.context_length, "warning"),
    (sizes.sliding_window, "warning"),
    (tensors.no_own_vocabulary, "error"),
    (tensors.drafter_tensors, "error"),
    (tensors.vocabulary_map, "error"),
    (tensors.dtype, "warning"),
    (numerics.rope_theta, "warning"),
    (numerics.rope_scaling, "warning"),
    (numerics.embedding_scale, "warning"),
    (numerics.logit_softcap, "warning"),
    (numerics.verifier, "warning"),
)


@dataclass(frozen=True)
class Finding:
    """What one check says of a pair; `fix` is empty where it passed."""

    name: str
    result: Literal["passed", "note", "warning", "error", "not checked"]
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.found}. {self.fix}."


def check_pair(
    target: Target, drafter: Drafter, draft_tokens: int | None, max_seq_len: int | None = None
) -> list[Finding]:
    """The warnings of a pair that can run.

    draft_tokens, max_seq_len: what the build config fixes, or None.
    Raises PairError for a wrong pair, CheckpointError for a missing tensor or a broken tokenizer.
    """
    pair = Pair(
        Outline(
            "target", target.directory, config_values(target.directory, "target"), model=target
        ),
        Outline(
            "drafter", drafter.directory, config_values(drafter.directory, "drafter"), model=drafter
        ),
        draft_tokens,
        max_seq_len,
    )
    warnings = []
    for check in CHECKS:
        finding = _look(pair, *check)
        if finding.result == "error":
            raise PairError(finding.found, finding.fix)
        if finding.result == "warning":
            warnings.append(finding)
    return warnings


def findings(pair: Pair) -> Iterator[Finding]:
    """Every check's, in order; without a drafter those of the target."""
    for look, severity in OF_TARGET if pair.drafter.absent else CHECKS:
        try:
            yield _look(pair, look, severity)
        except CheckpointError as error:
            yield Finding(_name(look), "error", error.problem, error.fix)


def _look(pair: Pair, look: Look, severity: Severity) -> Finding:
    try:
        found = look(pair)
    except NotKnown as missing:
        return Finding(_name(look), "not checked", str(missing))
    if found.ok:
        return Finding(_name(look), "passed", found.what)
    return Finding(_name(look), severity, found.what, found.fix)


def _name(look: Look) -> str:
    return look.__name__.replace("_", "-")
