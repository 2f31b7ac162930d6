"""The algorithm: rounds that verify and draft, and the scheduler that batches sequences."""

from dflash_trt.decoding.grammar import Grammar, Grammars
from dflash_trt.decoding.in_process import in_process, needs_drafter, rounds_with
from dflash_trt.decoding.lossless import LosslessReport, check_lossless
from dflash_trt.decoding.messages import (
    Checked,
    DraftInput,
    Int64,
    RoundOutput,
    RunRound,
    VerifyInput,
    no_drafts,
)
from dflash_trt.decoding.prefix_cache import BLOCK, PrefixCache, block_bytes
from dflash_trt.decoding.rounds import draft, verify
from dflash_trt.decoding.sampling_params import SamplingParams
from dflash_trt.decoding.scheduler import Scheduler, StepReport
from dflash_trt.decoding.sequence import Draft, Request, Sequence, check_request
from dflash_trt.decoding.waiting_queue import WaitingQueue
