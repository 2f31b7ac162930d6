"""The corpus: Python's standard library, its byte-level tokenizer, and windows of 64 tokens."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END, MASK = "<|endoftext|>", "<|MASK|>"
END_ID, MASK_ID = 0, 1
PROMPT = 64
# Tests, plus two folders of generated tables and topics that are nothing like code.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data"}


def is_held_out(name: str) -> bool:
    """Choose one file in twenty, by the hash of its path inside the library."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def read_files() -> dict[str, str]:
    """Return texts by path inside the library, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED.isdisjoint(name.split("/")[:-1]):
            try:
                files[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return files


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_files(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return all files in one row of ids, each followed by the end token."""
    rows = tokenizer.encode_batch(texts)
    return torch.tensor([token for row in rows for token in (*row.ids, END_ID)])


def line_starts(tokenizer: Tokenizer, ids: Tensor) -> Tensor:
    """Return positions after a token of newlines only, where unindented lines start."""
    texts = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    newline = torch.tensor([text != "" and text.strip("\n") == "" for text in texts])
    return (newline[ids[: -2 * PROMPT]]).nonzero()[:, 0] + 1


def windows(ids: Tensor, starts: Tensor, length: int) -> Tensor:
    return ids[starts[:, None] + torch.arange(length)]


def read_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of the first `PROMPT` tokens of each text in prompts.jsonl."""
    lines = (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode(json.loads(line)["text"]).ids[:PROMPT] for line in lines]


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
