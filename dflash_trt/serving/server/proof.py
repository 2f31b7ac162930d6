"""Whether the next build may take over: memory for two, and what it generates."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from dflash_trt.build import Manifest, read_manifest
from dflash_trt.errors import ServerError
from dflash_trt.files import size_of
from dflash_trt.machine import free_memory
from dflash_trt.serving.server.process import Server
from dflash_trt.tensorrt_llm import gpus

# texts of several kinds: what a drafter is good at differs by them
TEXTS = (
    "def main():\n    ",
    "import os\nimport sys\n\n",
    "Once upon a time there was ",
    "The capital of France is",
    '{"name": "',
    "1, 2, 3, 4, 5, 6, ",
)
TOKENS = 32  # of each
TIMEOUT = 120.0  # seconds for each
PAUSE = 0.2  # seconds before a server with a full queue is asked again
GB = 1e9
DRAFTER_FILES = "engines/drafter/model."


def acceptance(server: Server) -> float:
    """Tokens a round (tau) over `TEXTS`, greedy, one after the other; ServerError without."""
    rounds = 0
    for text in TEXTS:
        deadline = time.monotonic() + TIMEOUT
        while (out := server.health.generate(text, TOKENS, TIMEOUT)) is None:
            if time.monotonic() > deadline or server.ended() is not None:
                raise ServerError(
                    f"{server.repository.parent} does not generate",
                    f"Read the log: {server.log.path}",
                )
            time.sleep(PAUSE)
        if out["completion_tokens"][0] != TOKENS:
            raise ServerError(
                f"{server.repository.parent} generates {out['completion_tokens'][0]} tokens where "
                f"{TOKENS} were asked for",
                f"Read the log: {server.log.path}",
            )
        rounds += out["rounds"][0]
    return len(TEXTS) * (TOKENS - 1) / rounds  # the first token comes from prefill


def prove(server: Server, last: float, least: float, say: Callable[[str], None]) -> float:
    """Its acceptance; ServerError where that is below its share `least` of the last build's."""
    found = acceptance(server)
    say(f"swap: it commits {found:.2f} tokens a round, {last:.2f} before")
    if found < least * last:
        raise ServerError(
            f"it commits {found:.2f} tokens a round, and the running build {last:.2f}",
            "Serve a better drafter, or allow the fall with a lower --least-acceptance",
        )
    return found


def check_memory(pids: Iterable[int], old: Path, new: Path, part: str = "engines") -> None:
    """ServerError where there is no room for the new build beside the old one's processes.

    part: what is loaded. An estimate: memory is taken to grow with its files.
    """
    share = size_of(new / part) / max(1, size_of(old / part))
    need, free = share * sum(map(memory_of, pids)), free_memory()
    where = "memory"
    if _on_gpu(old) or _on_gpu(new):
        for gpu in gpus():
            used = share * (gpu.memory_bytes - gpu.free_bytes)
            if used - gpu.free_bytes > need - free:
                need, free, where = used, gpu.free_bytes, f"memory of GPU {gpu.index}"
    if need > free:
        raise ServerError(
            f"{new} takes about {need / GB:.1f} GB of {where} beside the running one, and "
            f"{free / GB:.1f} GB are free",
            "Stop `serve` and start it with the new build, or give the machine more",
        )


def same_but_drafter(old: Manifest, new: Manifest) -> bool:
    """Whether two builds differ in the drafter's weights alone, so that a server keeps the rest."""

    def rest(manifest: Manifest) -> Manifest:
        files = manifest["files"].items()
        kept = {name: entry for name, entry in files if not name.startswith(DRAFTER_FILES)}
        return {**kept, "bom.cdx.json": None, "name": manifest["name"]}

    return old["config"]["serving"].get("mode") == "ensemble" and rest(old) == rest(new)


def _on_gpu(build: Path) -> bool:
    engine = read_manifest(build)["config"]["engine"]
    return bool(engine["kind"] != "onnxruntime" or engine.get("device") == "cuda")


def memory_of(pid: int) -> int:
    """Bytes that a process holds, its share of what is mapped by several."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0
