"""The thread that reads requests: templates and tokenizers take their time with a long prompt."""

import logging
import threading
from collections.abc import Callable

from dflash_trt.decoding import WaitingQueue

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Preprocessor:
    """Clients take turns, so that one's long prompts hold another's up by one of them at most."""

    def __init__(self) -> None:
        self._turns: WaitingQueue[Job] = WaitingQueue()
        self._waiting = threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="preprocessor", daemon=True)
        self._thread.start()

    def put(self, job: Job, client: str) -> None:
        self._turns.add(job, client)
        self._waiting.release()

    def close(self, timeout: float) -> None:
        """Ends the thread after what waits."""
        self._closed = True
        self._waiting.release()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            self._waiting.acquire()
            job = self._turns.take()
            if job is not None:
                try:
                    job()
                except Exception:  # such as an answer that cannot be sent
                    log.exception("a request could not be read")
            elif self._closed:
                return
