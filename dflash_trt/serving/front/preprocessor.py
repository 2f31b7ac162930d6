"""The thread that reads requests: chat templates and tokenizers are slow for long prompts."""

import logging
import threading
from collections.abc import Callable

from dflash_trt.decoding import WaitingQueue

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Preprocessor:
    """Runs jobs one at a time; clients take turns, so each waits for one job of another's."""

    def __init__(self) -> None:
        self._queue: WaitingQueue[Job] = WaitingQueue()
        self._waiting = threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="preprocessor", daemon=True)
        self._thread.start()

    def put(self, job: Job, client: str) -> None:
        self._queue.add(job, client)
        self._waiting.release()

    def close(self, timeout: float) -> None:
        """Ends the thread after the jobs that wait; timeout: seconds."""
        self._closed = True
        self._waiting.release()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            self._waiting.acquire()
            job = self._queue.take()
            if job is not None:
                try:
                    job()
                except Exception:  # such as an answer that cannot be sent
                    log.exception("a request could not be read")
            elif self._closed:
                return
