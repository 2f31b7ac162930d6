"""Schedulers, slots, queue and kept prefixes against a model, in any order of events.

`SCHEDULER_EXAMPLES=5000` tries more than the 60 orders of `make test`.
"""

from __future__ import annotations

import os

from hypothesis import settings
from scheduler_model import SchedulerModel

EXAMPLES = os.environ.get("SCHEDULER_EXAMPLES", "")

SchedulerModel.TestCase.settings = settings(
    max_examples=int(EXAMPLES or 60),
    stateful_step_count=40,
    deadline=None,
    derandomize=not EXAMPLES,
)
TestScheduler = SchedulerModel.TestCase
