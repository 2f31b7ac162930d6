"""The end of a process whose engine is dead: `serve` starts again what ends."""

import os
import threading

LAST_WORDS = 0.2  # seconds in which the answer leaves the process


def end_process() -> None:
    """Soon, from a thread of its own."""
    threading.Timer(LAST_WORDS, os._exit, [1]).start()
