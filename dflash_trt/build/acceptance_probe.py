"""Acceptance of a pair in temporary engines: `dflash-trt inspect --deep`.

The engines are in a temporary directory (TMPDIR) of the size of a build, so that a pair can be
judged before building.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.chat import as_chat, load_encoding
from dflash_trt.checkpoints import Drafter, Report, Target, load_drafter, load_target
from dflash_trt.checkpoints.findings import Finding, Found, check
from dflash_trt.config import Speculation
from dflash_trt.errors import BuildError
from dflash_trt.prompts import read_prompts

if TYPE_CHECKING:
    from dflash_trt.decoding import LosslessReport

PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter to a neighbor asking to borrow a ladder.",
    "Translate into French: The train to Lyon leaves at nine o'clock tomorrow morning.",
    'Complete this JSON object: {"name": "Ada", "born": 1815, "known for": [',
)
TOKENS = 64  # decoded per prompt
MAX_SEQ_LEN = 1024
# fraction of rounds that keep the first draft: 60 to 85 % with trained drafters, less with one for
# another fine-tune, almost none with one for another model
LEAST_KEPT = 0.3


@dataclass(frozen=True)
class Measured:
    """Results of greedy decoding with whole blocks; tau = 1 + sum(kept)."""

    prompts: int
    tokens: int
    tau: float
    kept: list[float]  # fraction of rounds that kept draft token 1, 2, ..
    identical: int  # prompts with the same text as the target alone
    finding: Finding


def measure(
    target_directory: Path, drafter_directory: Path, prompts: Path | None, report: Report
) -> Measured:
    """Decode the prompts of a file as for `verify`, or `PROMPTS`.

    With a chat template `PROMPTS` are messages, because drafters learn from answers. The pair must
    have passed its checks. Raises RequestError for the file, BuildError if the engines cannot be
    written.
    """
    target, drafter = load_target(target_directory), load_drafter(drafter_directory)
    length = longest_sequence(target, drafter)
    tokens = min(TOKENS, length // 2)
    asked = _prompts(target, prompts, length - tokens)
    try:
        with tempfile.TemporaryDirectory(prefix="dflash-trt-") as name:
            write_engines(target, drafter, Path(name), length, report)
            found = decode(Path(name), asked, tokens, report)
    except OSError as error:
        raise BuildError(
            f"cannot write engines to {tempfile.gettempdir()}: {error.strerror or error}",
            "Set TMPDIR to a folder with room for them",
        ) from error
    return Measured(
        len(asked), sum(map(len, found.outputs)), found.tau, found.kept, found.identical,
        acceptance(found.kept[0]),
    )  # fmt: skip


def longest_sequence(target: Target, drafter: Drafter | None) -> int:
    """Return the tokens that both models have positions for, at most `MAX_SEQ_LEN`."""
    known = [model.spec.max_position_embeddings for model in (target, drafter) if model]
    return min(*known, MAX_SEQ_LEN)


def write_engines(
    target: Target, drafter: Drafter | None, engines: Path, max_seq_len: int, report: Report
) -> None:
    """Write `engines/target` and `engines/drafter` for one sequence, with links if possible."""
    # imported here: it loads the graph builder
    from dflash_trt.build.engines import EngineOptions, build_drafter, build_target  # noqa: PLC0415
    from dflash_trt.graphs import Storage  # noqa: PLC0415

    options = EngineOptions(slots=1, max_seq_len=max_seq_len, storage=Storage(link=True))
    report("building engines", 0, 2)
    build_target(target, drafter.spec if drafter else None, engines / "target", options)
    report("building engines", 1, 2)
    if drafter is not None:
        build_drafter(drafter, target, engines / "drafter", options)
    report("building engines", 2, 2)


def decode(
    engines: Path, prompts: Sequence[Sequence[int]], tokens: int, report: Report
) -> "LosslessReport":
    """Decode `tokens` tokens after each prompt, greedily, with whole blocks."""
    from dflash_trt.decoding import check_lossless  # noqa: PLC0415  (it loads the runtime)

    return check_lossless(
        engines,
        prompts,
        tokens,
        Speculation(policy="fixed"),
        lambda done: report("prompts", done, len(prompts)),
    )


@check("warning")
def acceptance(first: float) -> Found:
    """Check acceptance: a drafter for another fine-tune of the target passes all other checks."""
    what = f"the first draft token is kept in {first:.0%} of the rounds"
    if first >= LEAST_KEPT:
        return Found(True, what)
    return Found(
        False,
        f"{what}; trained drafters keep it in 60 to 85 %",
        "Check that the drafter was trained for this target, not for another fine-tune of it",
    )


def _prompts(target: Target, file: Path | None, longest: int) -> list[list[int]]:
    if file is None:
        return chat_prompts(target.directory, longest)
    return read_prompts(
        file,
        load_encoding(target.directory),
        vocab_size=target.spec.vocab_size,
        longest=longest,
    )


def chat_prompts(directory: Path, longest: int) -> list[list[int]]:
    """Return `PROMPTS` as token ids, by a directory's tokenizer and chat template."""
    encode = load_encoding(directory)
    asked = [encode(as_chat(text))[:longest] for text in PROMPTS]
    return [ids for ids in asked if ids]
