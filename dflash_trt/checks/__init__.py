"""Checks: what one is, its findings, and those of a target, a drafter and their pair."""

from dflash_trt.checks.findings import (
    Check,
    Finding,
    Found,
    check,
    checks_for,
    run,
    warnings_of,
)
from dflash_trt.checks.fit import READER_CHECKS, check_pair, engine_kinds, pair_findings
from dflash_trt.checks.inspection import inspect
from dflash_trt.checks.tensorrt_llm import TENSORRT_LLM_CHECKS, drafter_layout
