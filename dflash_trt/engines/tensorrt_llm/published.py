"""Acceptance lengths that were published for a drafter, to hold a first generation against.

Tokens committed by a round, the target's own included: by drafter, draft tokens of a round and
data set, greedy.
"""

from collections.abc import Mapping

CARD = "model card of z-lab/gpt-oss-120b-DFlash, SGLang on H200, medium reasoning"
PAPER = "arXiv 2602.06036 v2, tables 1, 3, 5 and 11"

ByDataSet = Mapping[str, float]
PUBLISHED: Mapping[str, tuple[str, Mapping[int, ByDataSet]]] = {
    "gpt-oss-120b-DFlash": (
        CARD,
        {
            9: {"GSM8K": 5.3, "MATH-500": 5.4, "HumanEval": 4.4, "MBPP": 4.6, "MT-Bench": 3.7},
            5: {"GSM8K": 4.3, "MATH-500": 4.3, "HumanEval": 3.8, "MBPP": 3.9, "MT-Bench": 3.3},
            3: {"GSM8K": 3.3, "MATH-500": 3.3, "HumanEval": 3.1, "MBPP": 3.1, "MT-Bench": 2.7},
        },
    ),
    "gpt-oss-20b-DFlash": (PAPER, {7: {"MATH-500": 5.1, "HumanEval": 4.3, "MT-Bench": 4.2}}),
    "Qwen3-4B-DFlash-b16": (
        PAPER,
        {15: {"GSM8K": 6.53, "MATH-500": 7.84, "HumanEval": 6.64, "MBPP": 6.09, "MT-Bench": 4.35}},
    ),
    "Qwen3-8B-DFlash-b16": (
        PAPER,
        {15: {"GSM8K": 6.54, "MATH-500": 7.87, "HumanEval": 6.50, "MBPP": 5.95, "MT-Bench": 4.24}},
    ),
    "LLaMA3.1-8B-Instruct-DFlash-UltraChat": (
        PAPER,
        {9: {"GSM8K": 4.32, "HumanEval": 4.91, "Alpaca": 3.73}},
    ),
    "Qwen3-Coder-30B-A3B-DFlash": (
        PAPER,
        {15: {"HumanEval": 8.09, "LiveCodeBench": 6.42, "MBPP": 7.23}},
    ),
    "Qwen3-Coder-Next-DFlash": (PAPER, {15: {"MATH-500": 6.0, "HumanEval": 7.2, "MT-Bench": 3.9}}),
    "Qwen3.5-4B-DFlash": (PAPER, {15: {"MATH-500": 7.1, "HumanEval": 7.3, "MT-Bench": 5.6}}),
    "Qwen3.5-9B-DFlash": (PAPER, {15: {"MATH-500": 7.3, "HumanEval": 7.9, "MT-Bench": 5.5}}),
    "Qwen3.5-27B-DFlash": (PAPER, {15: {"MATH-500": 7.7, "HumanEval": 9.1, "MT-Bench": 5.5}}),
    "Qwen3.5-35B-A3B-DFlash": (PAPER, {15: {"MATH-500": 7.2, "HumanEval": 7.9, "MT-Bench": 5.4}}),
}


def published(drafter: str, draft_tokens: int | None) -> tuple[str, ByDataSet] | None:
    """Source and acceptance lengths; drafter: its name, without who published it."""
    source, lengths = PUBLISHED.get(drafter, ("", {}))
    found = lengths.get(draft_tokens or 0)
    return (source, found) if found else None
