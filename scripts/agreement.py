"""How often a quantized model's greedy token is the unquantized one's: ours beside llama.cpp's.

    python scripts/agreement.py MODEL.gguf

`llama-quantize` and `llama-perplexity` have to be on the PATH. The text is the longer pages of
Python's own help (`pydoc_data`), in chunks of 512 tokens of which the second half counts, as
`llama-perplexity --kl-divergence` does it. docs/benchmarks.md shows the table.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from dflash_trt.build.engines import build_target
from dflash_trt.chat import load_encoding
from dflash_trt.checkpoints import load_target, locate_argument
from dflash_trt.engines import read_info
from dflash_trt.engines.accuracy import teacher_forced
from dflash_trt.engines.onnxruntime import KIND, load_session
from dflash_trt.graphs import Storage

CHUNK, CHUNKS = 512, 20
SCORED = slice(CHUNK // 2, CHUNK - 1)


class Row(NamedTuple):
    name: str
    agreement: float
    kl: float  # nats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    model = parser.parse_args().model
    pages = "\n\n".join(sorted(page for page in topics.values() if len(page) > 1000))
    with tempfile.TemporaryDirectory() as name:
        rows = [*ours(model, pages, Path(name)), *llama_cpp(model, pages, Path(name))]
    tokens = CHUNKS * (SCORED.stop - SCORED.start)
    print(f"| {tokens:,} tokens | greedy token equal | KL |\n|---|---:|---:|")
    for row in rows:
        print(f"| {row.name} | {row.agreement:.1%} | {row.kl:.2g} |")


def ours(model: Path, pages: str, folder: Path) -> Iterator[Row]:
    at = locate_argument(str(model), "target", lambda *_: None)
    target = load_target(at)
    ids = load_encoding(at)(pages)
    texts = [ids[CHUNK * i : CHUNK * (i + 1)] for i in range(CHUNKS)]
    logits = {}
    for bits in (None, 8, 4):
        engine = folder / f"ours-{bits}"
        storage = Storage(link=False, bits=bits)
        build_target(target, None, engine, slots=1, max_seq_len=CHUNK, threads=2, storage=storage)
        info = read_info(engine, KIND)
        found = teacher_forced(load_session(engine, info, ort.SessionOptions()), info, texts)
        logits[bits] = found.reshape(CHUNKS, CHUNK, -1)[:, SCORED].reshape(-1, found.shape[-1])
        if bits:
            same = (logits[None].argmax(-1) == logits[bits].argmax(-1)).mean()
            p, q = (_log_softmax(logits[each]) for each in (None, bits))
            yield Row(f"ours, int{bits}", float(same), float((np.exp(p) * (p - q)).sum(-1).mean()))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.subtract(logits, logits.max(-1, keepdims=True), dtype=np.float64)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def llama_cpp(model: Path, pages: str, folder: Path) -> Iterator[Row]:
    text, base = folder / "pages.txt", folder / "base.kl"
    text.write_text(pages, encoding="utf-8")
    line = ["-f", str(text), "-c", str(CHUNK), "--chunks", str(CHUNKS), "-t", "2"]
    line += ["--kl-divergence-base", str(base)]
    files = {"as it is": model}
    for kind in ("F32", "Q8_0", "Q4_0"):
        files[kind] = folder / f"{kind}.gguf"
        told(["llama-quantize", "--allow-requantize", str(model), str(files[kind]), kind])
    told(["llama-perplexity", "-m", str(files.pop("F32")), *line])
    for kind, file in files.items():
        found = told(["llama-perplexity", "-m", str(file), *line, "--kl-divergence"])
        figures = [re.findall(rf"{each}: +([\d.]+)", found) for each in ("Same top p", "Mean +KLD")]
        (same,), (kl,) = figures
        yield Row(f"llama.cpp, {kind}", float(same) / 100, float(kl))


def told(line: list[str]) -> str:
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
