"""A build of kind `tensorrt_llm` for the stand-in in `standins/`, which decodes on a CPU."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.checkpoints.outline import Pair, outline_drafter, outline_target
from dflash_trt.checkpoints.tokenizer import tokenizer_files
from dflash_trt.config import BuildConfig
from dflash_trt.serving.repository import write_llm_repository

STANDINS = Path(__file__).parent / "standins"


def write_llm_build(directory: Path, pair_dir: Path, args: dict[str, Any], **serving: Any) -> Path:
    """What serves a pair (`target/` and `drafter/` in `pair_dir`) over these arguments of `LLM`.

    speculative_config may leave out what every DFlash drafter has.
    """
    engine = directory / "engines" / "tensorrt_llm"
    engine.mkdir(parents=True)
    for role in ("target", "drafter"):
        (engine / role).symlink_to((pair_dir / role).resolve())
    speculative = {"decoding_type": "DFlash", "speculative_model": "drafter"}
    speculative |= args.get("speculative_config", {})
    args = {"model": "target", "max_num_tokens": 8192, **args, "speculative_config": speculative}
    (engine / "llm_args.yaml").write_text(yaml.safe_dump(args))
    (directory / "tokenizer").mkdir()
    for file in tokenizer_files(pair_dir / "target"):
        shutil.copyfile(file, directory / "tokenizer" / file.name)
    config = BuildConfig(
        name="tiny",
        target={"path": pair_dir / "target"},
        drafter={"path": pair_dir / "drafter"},
        engine={"kind": "tensorrt_llm"},
        serving=serving,
    )
    pair = Pair(outline_target(pair_dir / "target"), outline_drafter(pair_dir / "drafter"))
    write_llm_repository(directory, config, pair)
    manifest = {"dflash_trt": "", "name": "tiny", "config": {}, "files": {}}
    manifest["drafter"] = {"block_size": pair.drafter.number("block_size")}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


@contextmanager
def standins() -> Iterator[None]:
    """Servers that start meanwhile find the stand-in."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STANDINS), *([before] if before else [])])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
