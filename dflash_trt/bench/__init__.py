"""Benchmarks of decoding methods: in turns in one process, and by AIPerf over a server.

Everything here loads the runtime's modules: import it only where it is used.
"""

from dflash_trt.bench.engine import METHODS, Plan, run_engine, sampling_rules
from dflash_trt.bench.matrix import Load, Matrix, matrix_table, run_matrix
from dflash_trt.bench.prompts import load_prompts, load_task
from dflash_trt.bench.report import engine_report
from dflash_trt.bench.results import Run, SamplingRule, record_of
