"""`make test-gpu` without a network: `python tests/gpu/offline.py WHEELS [CONFIG PROMPTS]...`

WHEELS holds what the machine's own Python lacks, this package among it; `NAME.whl.part-0`,
`NAME.whl.part-1` and so on are one wheel in pieces. The tests' report is `build/gpu.xml`. Each
CONFIG, of at least 8 slots, is built, measured on PROMPTS, and its texts are kept, in `build/gpu`.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "build" / "gpu"
BENCH = [
    *(f"--methods={name}" for name in ("plain", "dflash", "adaptive", "adaptive-no-lookup")),
    *(f"--draft-tokens={count}" for count in range(1, 8)),
    *("--repeats", "2", "--max-tokens", "64"),
]


def install(wheels: Path, site: Path) -> None:
    joined = OUTPUT / "wheels"
    joined.mkdir(parents=True, exist_ok=True)
    for part in sorted(wheels.glob("*.part-*"), key=lambda part: int(part.name.rpartition("-")[2])):
        with (joined / part.stem).open("ab") as stream:
            stream.write(part.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    every = [*wheels.glob("*.whl"), *joined.glob("*.whl")]
    subprocess.run([*pip, "--no-compile", "--target", site, *every], check=True)


def main(wheels: Path, pairs: list[str]) -> int:
    site = OUTPUT / "site"
    if not site.exists():
        install(wheels, site)
    path = os.pathsep.join([str(ROOT), str(site)])
    environment = os.environ | {"PYTHONPATH": path}

    def run(*words: str | Path) -> int:
        return subprocess.run([sys.executable, *words], env=environment, check=False).returncode

    codes = [run("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "--junitxml", "build/gpu.xml")]
    for config, prompts in zip(pairs[::2], pairs[1::2], strict=True):
        built = OUTPUT / Path(config).stem
        bench = ["-m", "dflash_trt", "bench", "engine", built, "--prompts", prompts, *BENCH]
        codes += [run("-m", "dflash_trt", "build", config, "--output", built)]
        codes += [run("-m", "tests.gpu.texts", built, prompts, OUTPUT / f"{built.name}-texts.json")]
        for batch in ("1", "8"):
            results = OUTPUT / f"{built.name}-{batch}.json"
            count = str(max(4, int(batch)))
            codes += [run(*bench, "--batch", batch, "--prompt-count", count, "--output", results)]
    return max(codes)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
