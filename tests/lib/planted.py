"""Plants each fault of planted.yaml in a copy of the tree and says whether the campaign finds it.

`python tests/lib/planted.py [--own] [NUMBER ...]` runs the first tenth of every part, with `--own`
only of the part that the fault names, until the first finding; numbers: which faults, from 0 on.
Before, a seed of each part must find nothing in a copy without a fault.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
SHARE, A_SEED = "0.1", "1e-9"


class Fault(NamedTuple):
    name: str
    part: str
    file: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        """ValueError unless the old text stands there once."""
        file = tree / self.file
        text = file.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}")
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


def faults() -> list[Fault]:
    listed = yaml.safe_load((ROOT / "tests/lib/planted.yaml").read_text(encoding="utf-8"))
    return [Fault(**each) for each in listed]


def copy_tree(tree: Path) -> None:
    """What git knows, without its history, so that no results are taken over."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)


def hunt(fault: Fault | None, share: str, parts: Iterable[str]) -> str:
    """What such a share of the parts, or of all, finds in a copy with the fault; empty: nothing."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "tree")
        copy_tree(tree)
        if fault is not None:
            fault.apply(tree)
        command = [sys.executable, tree / "tests/lib/prove.py", "--first", share, *parts]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        for text in (tree / "build/prove/results.jsonl").read_text().splitlines():
            line = json.loads(text or '{"wrong": []}')
            if line["wrong"]:
                said = line["wrong"][0].strip().splitlines()
                words = next((each for each in said if "Error" in each), said[-1])
                return f"{line['part']} {line['seed']}: {words[:200]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", type=int, nargs="*")
    parser.add_argument("--own", action="store_true")
    asked, listed, missed = parser.parse_args(), faults(), 0
    numbers = asked.numbers or range(len(listed))
    own = {number: [listed[number].part] if asked.own else [] for number in numbers}
    if found := hunt(None, A_SEED, {part for parts in own.values() for part in parts}):
        print(f"without a fault: {found}")
        return 1
    for number in numbers:
        start = time.monotonic()
        found = hunt(listed[number], SHARE, own[number])
        missed += not found
        words = f"found by {found!r}" if found else "NOT FOUND"
        print(
            f"{number} {listed[number].name}: {words}, {time.monotonic() - start:.0f} s", flush=True
        )
    print(f"{len(numbers) - missed} of {len(numbers)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
