"""Every target family with a drafter of every format: the text is the target's own.

The cells of the table in docs/models.md. Drafters here are random, so that most drafts are taken
back. That each family and each format computes what its library does, and drafts that are accepted,
are in test_dense.py, test_moe.py, test_drafters.py, test_formats.py and test_dflash2.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import test_dense
import test_moe
from conftest import build_engines
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from pairs import Pair, write_pair, zlab_drafter
from test_dflash2 import DRAFTER as DFLASH2
from test_drafters import DRAFTER, FORMS, TARGET
from test_formats import to_speculators
from transformers import PretrainedConfig, Qwen3Config

from dflash_trt.checkpoints.pair import PAIR_CHECKS
from dflash_trt.decoding import Request, Scheduler, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.onnxruntime import Engine

pytestmark = pytest.mark.models

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
NEW_TOKENS, MAX_SEQ_LEN = 24, 64
PROMPTS = [[5, 17, 200, 44, 3], list(range(100, 119))]

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": test_dense.FAMILIES["llama"],
    "qwen2": test_dense.FAMILIES["qwen2"],
    "qwen3": lambda: Qwen3Config(**TARGET),
    "mistral": test_dense.FAMILIES["mistral"],
    "gemma2": test_dense.FAMILIES["gemma2"],
    "gemma3": test_dense.FAMILIES["gemma3-with-vision"],
    "gemma4": test_dense.FAMILIES["gemma4-31b"],
    "qwen3-moe": lambda: test_moe.CONFIGS["qwen3-moe"],
    "gpt-oss": lambda: test_moe.CONFIGS["gpt-oss"],
}
OWN = DRAFTER["dflash_config"]
FORMATS: dict[str, dict[str, Any]] = {
    "z-lab": DRAFTER | FORMS["sliding-causal"],
    "modelopt": DRAFTER
    | {"dflash_config": OWN | {"use_swa": True, "swa_window_size": 10, "causal": True}},
    "speculators": DRAFTER,
    "dflash2": DFLASH2 | {"dflash_config": DFLASH2["dflash_config"] | OWN},
}
CELLS = [f"{family}-{form}" for family in FAMILIES for form in FORMATS]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[int]]]:
    """What transformers makes of the prompts, by family."""
    return {}


def pair_of(family: str, form: str, directory: Path, **options: Any) -> Pair:
    """options: of `write_pair`."""
    kind = DFlash2DraftModel if form == "dflash2" else DFlashDraftModel
    pair = write_pair(directory, FAMILIES[family](), FORMATS[form], drafter_class=kind, **options)
    if form == "dflash2":  # loading gives its codebooks the names that published drafters have
        zlab_drafter(pair.drafter_dir).save_pretrained(pair.drafter_dir)
    if form == "speculators":  # with a draft from the anchor's own row
        to_speculators(pair, directory / form, from_anchor=True, ids=range(320))
        pair = Pair(pair.target_dir, directory / form)
    return pair


@pytest.mark.parametrize("cell", CELLS)
def test_text_is_the_targets(cell: str, tmp_path: Path, texts: dict[str, list[list[int]]]) -> None:
    family, form = next((f, d) for f in FAMILIES for d in FORMATS if cell == f"{f}-{d}")
    pair = pair_of(family, form, tmp_path)
    engines = tmp_path / "engines"
    _, drafter = build_engines(
        pair.target_dir, pair.drafter_dir, engines, slots=2, max_seq_len=MAX_SEQ_LEN
    )
    scheduler = Scheduler(
        in_process(Engine(engines / "target"), Engine(engines / "drafter")),
        slots=2,
        max_seq_len=MAX_SEQ_LEN,
        prefill_chunk=8,
        policy=Fixed(drafter.spec.block_size - 1),
    )
    sequences = [scheduler.submit(Request(prompt, NEW_TOKENS)) for prompt in PROMPTS]
    while scheduler.busy:
        scheduler.step()
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
    listed = re.findall(r"^\| `([\w-]+)` \| (error|warning) \|", TABLE.read_text(), re.MULTILINE)
    assert listed == [(check.name, check.severity) for check in PAIR_CHECKS]
