"""x"""

from typing import Any

from dflash_trt.jobs.job import Job


def prepare(*_: Any) -> Job:
    raise NotImplementedError
