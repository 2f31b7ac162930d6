"""`make demo`: build the demo pair, serve it with Triton, stream Python code from it."""

import subprocess
import sys
from pathlib import Path

from dflash_trt.serving.server import running_server

ROOT = Path(__file__).resolve().parent.parent
PROMPT = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self, items=None):
'''


def run(*arguments: str) -> None:
    """Run one `dflash-trt` command as a user would."""
    shown = [f"${argument!r}" if "\n" in argument else argument for argument in arguments]
    print(f"\n$ dflash-trt {' '.join(shown)}", flush=True)
    command = [sys.executable, "-m", "dflash_trt", *arguments]
    subprocess.run(command, check=True, cwd=ROOT)


def main() -> None:
    run("build", "build_configs/pycode.yaml", "--output", "build/pycode")
    print("\n$ dflash-trt serve build/pycode", flush=True)
    with running_server(ROOT / "build" / "pycode") as ports:
        print(f"Triton is ready on 127.0.0.1:{ports.grpc} (gRPC) and :{ports.http} (HTTP)")
        run("generate", PROMPT, "--url", f"127.0.0.1:{ports.grpc}", "--max-tokens", "160")


if __name__ == "__main__":
    main()
