"""Methods of decoding and servers, measured: runs, their files, reports and comparisons.

Everything here loads the runtime's modules: import it where it is used.
"""

from dflash_trt.bench.engine import METHODS, Plan, measure_engine
from dflash_trt.bench.load import Goal, Load, measure_server
from dflash_trt.bench.matrix import METHODS as SERVED_METHODS
from dflash_trt.bench.matrix import THINKING, Matrix, read_prompt_sets, run_matrix
from dflash_trt.bench.matrix_report import matrix_page
from dflash_trt.bench.page import Page, Table, to_html, to_markdown, write_page
from dflash_trt.bench.prompts import load_asked, load_task
from dflash_trt.bench.protocols import Ask
from dflash_trt.bench.report import engine_page, measured_on, published_tables, server_page
from dflash_trt.bench.results import (
    Cell,
    Level,
    MatrixCell,
    MatrixRun,
    Run,
    Sample,
    ServerRun,
    read_run,
    write_run,
)
from dflash_trt.bench.run import run_engine
from dflash_trt.bench.stats import (
    compare,
    compare_servers,
    full_rates,
    plain_of,
    rates,
    speedups,
    spread,
    verified,
)
