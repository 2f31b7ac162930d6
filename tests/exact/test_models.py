"""Every target family with a drafter of every format: the text is the target's own.

The cells of the table in docs/models.md. Drafters here are random, so that most drafts are taken
back. That each family and each format computes what its library does, and drafts that are accepted,
are in test_families.py, test_formats.py and test_dflash2.py.
"""

import re
from pathlib import Path

import pytest

from dflash_trt.chat import CHAT_CHECKS
from dflash_trt.checks.pair import PAIR_CHECKS
from dflash_trt.checks.target import TARGET_CHECKS
from dflash_trt.decoding import Request, in_process
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Fixed
from tests.support import reference
from tests.support.builds import build_engines
from tests.support.equality import run_all, scheduler_of
from tests.support.families import FAMILIES, FORMATS, pair_of

pytestmark = pytest.mark.models

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
NEW_TOKENS, MAX_SEQ_LEN = 24, 64
PROMPTS = [[5, 17, 200, 44, 3], list(range(100, 119))]

CELLS = [f"{family}-{form}" for family in FAMILIES for form in FORMATS]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[int]]]:
    return {}


@pytest.mark.parametrize("cell", CELLS)
def test_text_is_the_targets(cell: str, tmp_path: Path, texts: dict[str, list[list[int]]]) -> None:
    family, form = next((f, d) for f in FAMILIES for d in FORMATS if cell == f"{f}-{d}")
    pair = pair_of(family, form, tmp_path)
    engines = tmp_path / "engines"
    _, drafter = build_engines(
        pair.target_dir, pair.drafter_dir, engines, slots=2, max_seq_len=MAX_SEQ_LEN
    )
    scheduler = scheduler_of(
        in_process(Engine(engines / "target"), Engine(engines / "drafter")),
        Fixed(drafter.spec.block_size - 1),
        slots=2,
        max_seq_len=MAX_SEQ_LEN,
        prefill_chunk=8,
    )
    sequences = run_all(scheduler, [Request(prompt, NEW_TOKENS) for prompt in PROMPTS])
    if family not in texts:  # the target is the same with every drafter
        texts[family] = reference.greedy(pair.target_dir, PROMPTS, NEW_TOKENS)
    assert [sequence.tokens for sequence in sequences] == texts[family]
    assert all(sequence.drafted > sequence.accepted for sequence in sequences)


def test_the_table_has_every_cell_and_only_tests_that_are_there() -> None:
    text = TABLE.read_text(encoding="utf-8")
    for cell in CELLS:
        assert f"`{cell}`" in text
    named = set(re.findall(r"(test_\w+)\.py::(test_\w+)", text))
    assert len(named) > 10
    for file, name in named:
        [at] = Path(__file__).parents[1].glob(f"*/{file}.py")
        assert f"def {name}(" in at.read_text(encoding="utf-8")


def test_the_list_of_checks_is_complete() -> None:
    row = r"^\| `([\w-]+)` \| (error|warning|note) \|"
    listed = re.findall(row, TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    checks = [*TARGET_CHECKS, *PAIR_CHECKS, *CHAT_CHECKS]
    assert sorted(listed) == sorted((check.name, check.severity) for check in checks)
