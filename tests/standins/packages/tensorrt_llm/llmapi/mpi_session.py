"""The way from an `LLM` to the ranks that `trtllm-llmapi-launch` started.

As tensorrt_llm/llmapi/mpi_session.py@00a1352 and mgmn_leader_node.py have it: the first rank's
address and key are in the environment, one client has the connection at a time, the number of ranks
must be the model's, and ranks that serve an `LLM` take no other before it has been shut down. There
it is ZeroMQ with pickled functions, here `multiprocessing.connection` with words.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from urllib.parse import urlsplit

WAIT = 30.0  # seconds
JOB = ("OMPI_COMM_WORLD_", "PMIX_RANK", "SLURM_")  # the launcher takes them away


def is_launched() -> bool:
    return os.environ.get("TLLM_SPAWN_PROXY_PROCESS") == "1"


def address() -> tuple[str, int]:
    parts = urlsplit(os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"])
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def key() -> bytes:
    return bytes.fromhex(os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"])


def connect() -> Connection:
    """Connect once the first rank listens: ZeroMQ waits for that, too."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return Client(address(), authkey=key())
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Session:
    """The ranks of an `LLM`; `on_death` is called if they end before it does."""

    def __init__(self, world_size: int, on_death: Callable[[], None]) -> None:
        if not is_launched():
            if "triton_python_backend_utils" in sys.modules:  # NVIDIA's 26.07 image, by a report
                raise RuntimeError("MPI_ERR_SPAWN: could not spawn processes")
            self._connection = None
            return
        left = [name for name in os.environ if name.startswith(JOB)]
        if left:
            raise RuntimeError(f"MPI would be initialized twice in one job: {left[0]} is set")
        size = int(os.environ["tllm_mpi_size"])  # noqa: SIM112
        if size != world_size:
            raise ValueError(
                f"External MPI session has {size} workers but the model needs "
                f"world_size={world_size}."
            )
        self._connection = connect()
        self._connection.send("start")
        if self._connection.recv() != size:
            raise RuntimeError("the ranks serve another LLM")
        self._over = False
        threading.Thread(target=self._watch, args=(on_death,), daemon=True).start()

    def shutdown(self) -> None:
        if self._connection is not None:
            self._over = True
            self._connection.send("shutdown")

    def _watch(self, on_death: Callable[[], None]) -> None:
        assert self._connection is not None
        try:
            self._connection.recv()
        except (EOFError, OSError):
            if not self._over:
                on_death()
