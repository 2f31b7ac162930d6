"""Schedulers and prefix cache against models, in any order of events; `make prove` tries more."""

from __future__ import annotations

from cache_model import CacheModel
from hypothesis import settings
from scheduler_model import SchedulerModel

QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)

CacheModel.TestCase.settings = SchedulerModel.TestCase.settings = QUICK
TestCache, TestScheduler = CacheModel.TestCase, SchedulerModel.TestCase
