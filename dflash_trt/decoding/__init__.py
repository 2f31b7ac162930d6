"""The decoding algorithm: verify and draft rounds, and the scheduler that batches sequences."""

from dflash_trt.decoding.feature_buffer import FeatureBuffer
from dflash_trt.decoding.grammar import Grammar, Grammars
from dflash_trt.decoding.lossless import LosslessReport, check_lossless
from dflash_trt.decoding.messages import (
    Candidates,
    Copy,
    DraftResult,
    Logprobs,
    Round,
    RoundResult,
    RoundSequence,
    RunRound,
    SequenceResult,
)
from dflash_trt.decoding.prefix_cache import BLOCK, PrefixCache, block_bytes
from dflash_trt.decoding.profiling import measure
from dflash_trt.decoding.proposer import Proposer
from dflash_trt.decoding.rounds import draft, in_process, verify
from dflash_trt.decoding.sampling import SamplingParams
from dflash_trt.decoding.scheduler import Scheduler, StepReport
from dflash_trt.decoding.sequence import Draft, Request, SequenceState, check_request
from dflash_trt.decoding.state_cache import StateCache, open_prefix_cache
from dflash_trt.decoding.strategy import strategy
from dflash_trt.decoding.waiting_queue import WaitingQueue
from dflash_trt.speculation import Features
