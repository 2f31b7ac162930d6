"""The first rank: what an `LLM` asks for goes to all of them. `--action stop` ends the job."""

import os
import sys
from multiprocessing.connection import Listener

from mpi4py.futures import MPICommExecutor
from mpi4py.MPI import COMM_WORLD

from tensorrt_llm.llmapi.mpi_session import address, connect, key


def serve() -> None:
    """Serve one client after the other until one says `stop`."""
    served = False
    with MPICommExecutor(COMM_WORLD) as ranks, Listener(address(), authkey=key()) as listener:
        assert ranks is not None
        while True:
            with listener.accept() as client:
                try:
                    word = client.recv()
                    if word == "stop":
                        return
                    assert word == "start"
                    if served:  # the LLM of a process that died: its ranks never come back
                        client.send(0)
                        continue
                    served = True
                    workers = [ranks.submit(os.getpid) for _ in range(COMM_WORLD.size - 1)]
                    client.send(1 + sum(worker.result() > 0 for worker in workers))
                    served = client.recv() != "shutdown"
                except (EOFError, OSError):
                    continue


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            serve()
        case ["--action", "stop"]:
            with connect() as connection:
                connection.send("stop")
        case arguments:
            sys.exit(f"no such arguments: {arguments}")
