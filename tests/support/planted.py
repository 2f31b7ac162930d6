"""Plant each fault of planted.yaml in a copy of the tree: what it names must fail there.

`python -m tests.support.planted [NUMBER ...]`, of which faults, from 0 on; all by default. Without
a fault the same must pass, which is tried before it. A fault takes some seconds to some minutes.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LIMIT = 1200  # seconds of a run; a fault that a test waits for without end is found
MORE = {"SCHEDULER_EXAMPLES": "300", "SPOILT_EXAMPLES": "60"}  # nor is what fails made small


class Fault(NamedTuple):
    """A replacement of `old` by `new` in `file`; fails: arguments of pytest."""

    name: str
    fails: str
    file: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        """Replace the text; ValueError unless it occurs once."""
        file = tree / self.file
        text = file.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}")
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


def faults() -> list[Fault]:
    listed = yaml.safe_load((ROOT / "tests/support/planted.yaml").read_text(encoding="utf-8"))
    return [Fault(**each) for each in listed]


def passes(fails: str, fault: Fault | None) -> bool:
    """Return whether a test passes in a copy of the tracked files, with or without the fault."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "tree")
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                # programs stay executable, and links links
                shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
        if fault is not None:
            fault.apply(tree)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", *shlex.split(fails)],
                cwd=tree,
                env=os.environ | MORE | {"PYTHONPATH": str(tree)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise SystemExit(f"selects no test: {fails}")
        return done.returncode == 0


def main(numbers: list[int]) -> int:
    listed = faults()
    asked = [(number, listed[number]) for number in numbers or range(len(listed))]
    clean = set[str]()
    missed = 0
    for number, fault in asked:
        if fault.fails not in clean and not passes(fault.fails, None):
            print(f"fails without a fault: {fault.fails}")
            return 1
        clean.add(fault.fails)
        found = not passes(fault.fails, fault)
        missed += not found
        print(f"{number} {fault.name}: {'found' if found else 'NOT FOUND'}", flush=True)
    print(f"{len(asked) - missed} of {len(asked)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
