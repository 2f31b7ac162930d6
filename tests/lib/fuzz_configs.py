"""Broken config.json files by the thousand: loaded, checked and inspected under a memory limit.

`python tests/lib/fuzz_configs.py DIRECTORY SEED CASES` takes `target/` and `drafter/`, whose
config.json it overwrites, and sound configs to spoil in `configs/target/` and `configs/drafter/`.
It prints what came of them as JSON; `unexpected` has every exception that is not our own. In a
process of its own, because the limit holds for a process.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import mutations

from dflash_trt.checkpoints import check_pair, inspect, load_drafter, load_target
from dflash_trt.cli.report import show
from dflash_trt.errors import DflashError

LIMIT = 1 << 30  # bytes of address space, beside what the imports take
NAMES = ("", "quantization_config", "text_config", "d2t")


def mutate(config: Any, chance: random.Random) -> Any:
    return mutations.mutate(config, chance, [*mutations.JUNK, {"rope_theta": 1}], NAMES)


def text_of(config: Any, chance: random.Random) -> bytes:
    text = mutations.text_of(config)
    if chance.random() < 0.05:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice([b"", b"\xff\xfe", b"\0", b"{"]) + text[at + 1 :]
    return text


def main(directory: Path, seed: int, cases: int) -> dict[str, Any]:
    """Every case spoils one of the two configs, or both."""
    chance = random.Random(seed)
    sound = {
        role: [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        for role in ("target", "drafter")
        for folder in [directory / "configs" / role]
    }
    target, drafter = directory / "target", directory / "drafter"
    came: Counter[str] = Counter()
    unexpected = []

    def attempt(what: str, call: Any, *arguments: Any) -> Any:
        try:
            result = call(*arguments)
        except DflashError:
            came[f"{what} refused"] += 1
        except Exception:
            unexpected.append({"config": text[-2000:].decode("ascii", "replace"), "error": error()})
        else:
            came[what] += 1
            return result
        return None

    def error() -> str:
        return traceback.format_exc()[-1500:]

    for _ in range(cases):
        spoiled = chance.choice([("target",), ("drafter",), ("target", "drafter")])
        for role in ("target", "drafter"):
            # the first one is that of the weights
            bases = sound[role]
            config = json.loads(
                json.dumps(bases[0] if chance.random() < 0.5 else chance.choice(bases))
            )
            for _ in range(chance.choice([1, 1, 2, 3]) if role in spoiled else 0):
                config = mutate(config, chance) if isinstance(config, dict | list) else config
            text = text_of(config, chance) if role in spoiled else json.dumps(config).encode()
            (directory / role / "config.json").write_bytes(text)
        loaded = attempt("target", load_target, target), attempt("drafter", load_drafter, drafter)
        if None not in loaded:
            attempt("pair", check_pair, *loaded, None)
        report = attempt("report", inspect, target, drafter)
        if report is not None:
            with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
                attempt("json", print, json.dumps(report))
                attempt("text", show, report)
    return {"came": came, "unexpected": unexpected}


if __name__ == "__main__":
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
