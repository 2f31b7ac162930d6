"""The decoder over TensorRT-LLM: one `tensorrt_llm.LLM`, whose process drives all ranks.

It gets at most as many sequences as it decodes together, one request per sequence; others stay in
our waiting queue. Only the LLM API is used (`tests/standins/packages` gives the version).
"""

import asyncio
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dflash_trt.decoding import Grammar, Request, SamplingParams, SequenceState, WaitingQueue
from dflash_trt.errors import BuildError, RequestError
from dflash_trt.request_schema import WithTensorRTLLM, fields_with_tensorrt_llm
from dflash_trt.serving.model.metrics import Metrics
from dflash_trt.serving.model.request_handler import INTERNAL, INVALID, Deliver
from dflash_trt.serving.processes import end_process
from dflash_trt.tensorrt_llm import ARGS_FILE, with_local_target
from dflash_trt.wire import Settings

log = logging.getLogger(__name__)

GUIDES = {"json_schema": "json", "regex": "regex", "lark": "grammar"}  # `GuidedDecodingParams`
FINAL = "<|start|>assistant<|channel|>final<|message|>"  # begins gpt-oss's final answer
FAILED = "TensorRT-LLM failed on this request. The server's log says why."
REASONS = {"stop": "stop", "length": "length", "timeout": "cancelled", "cancelled": "cancelled"}
REFUSED = fields_with_tensorrt_llm(WithTensorRTLLM.REFUSED)
PENALTIES = fields_with_tensorrt_llm(WithTensorRTLLM.PENALTY)
PASSED_ON = {*fields_with_tensorrt_llm(WithTensorRTLLM.PASSED), *PENALTIES}
# variables of the MPI job that started this process; TensorRT-LLM starts its own ranks. Its Triton
# model, all_models/llmapi/tensorrt_llm/1/model.py, clears the same
MPI_JOB = re.compile(
    r"OMPI_(COMM_WORLD_|UNIVERSE_SIZE|FIRST_RANKS|APP_CTX_NUM_PROCS|MCA_orte_)|ORTE_"
    r"|PMIX_(?!MCA_)|PMI_(RANK|SIZE|FD|SPAWNED|APPNUM)$"
)


def limits(args: Mapping[str, Any]) -> dict[str, str]:
    for name in ("max_batch_size", "max_seq_len"):
        if not args.get(name):
            raise BuildError(f"{ARGS_FILE} states no {name}", "Give engine.args one, build again")
    # with attention data parallelism every rank has a batch of its own
    ranks = args.get("tensor_parallel_size", 1) if args.get("enable_attention_dp") else 1
    return {
        "slots": str(args["max_batch_size"] * ranks),
        "max_seq_len": str(args["max_seq_len"]),
        "block_size": str(1 + ((args.get("speculative_config") or {}).get("max_draft_len") or 0)),
        "prefill_chunk": "0",  # TensorRT-LLM decides this and speculation
        "speculation": "{}",
    }


def guide(grammar: Grammar, backend: str | None, *, channels: bool) -> dict[str, Any]:
    """Return `GuidedDecodingParams`' arguments; RequestError for what `backend` does not support.

    channels: the grammar applies to the final one, as in `trtllm-serve`
    (`_response_format_to_guided_decoding_params` of `tensorrt_llm/serve/openai_protocol.py`).
    """
    if backend is None:
        raise RequestError(
            f"{grammar.name} is not possible: this server was built without guided decoding",
            "Send the request without, or build with engine.args.guided_decoding_backend.",
        )
    if grammar.kind == "lark" and backend != "llguidance":
        raise RequestError(
            f"{grammar.name} is in llguidance's language, which this server cannot read",
            "Send a JSON schema or a regular expression, or build with "
            "engine.args.guided_decoding_backend: llguidance.",
        )
    if not channels or grammar.kind == "lark":  # a Lark grammar includes the channels
        return {GUIDES[grammar.kind]: grammar.text}
    if backend != "xgrammar":
        raise RequestError(
            f"{grammar.name}: the model answers in channels, and {backend} cannot wait for one",
            "Send a whole grammar, or build with engine.args.guided_decoding_backend: xgrammar.",
        )
    content: dict[str, Any] = {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "json_schema":
        content = {"type": "json_schema", "json_schema": json.loads(grammar.text)}
    tag = {"begin": FINAL, "content": content, "end": ""}
    tags = {"type": "triggered_tags", "triggers": [FINAL], "tags": [tag], "stop_after_first": True}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": tags})}


class RefusedError(Exception):
    """A refusal by TensorRT-LLM; the message is for the client."""


class TensorRTLLM:
    """A `request_handler.Decoder` on TensorRT-LLM."""

    def __init__(
        self,
        settings: Settings,
        args: Mapping[str, Any],
        metrics: Metrics,
        *,
        channels: bool = False,
    ) -> None:
        """Load the LLM, which takes minutes; channels: see `chat.has_channels`."""
        for name in [name for name in os.environ if MPI_JOB.match(name)]:
            del os.environ[name]
        # Triton's embedded interpreter ignores the variable
        sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        import tensorrt_llm.sampling_params  # noqa: PLC0415

        self._args = args
        self._slots = settings.slots
        self._end_id = min(settings.eos_token_ids, default=0)
        self._metrics = metrics
        self._sampling_params = tensorrt_llm.SamplingParams
        self._guided_params = tensorrt_llm.sampling_params.GuidedDecodingParams
        self._channels = channels
        self._drafts = settings.block_size - 1
        self._llm = tensorrt_llm.LLM(**with_local_target(args))
        self._running: dict[SequenceState, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)

    def is_ready_for(self, request: Request) -> bool:
        return True  # TensorRT-LLM compiles grammars

    def new_sequence(self, request: Request) -> SequenceState:
        self.check(request)
        return SequenceState(request)

    def check(self, request: Request) -> None:
        """Raise RequestError for what TensorRT-LLM with a drafter refuses, ignores or cannot do."""
        if not request.drafting and self._drafts:
            raise RequestError(
                "drafting: false is not possible: TensorRT-LLM drafts for all requests or none",
                "Leave it out.",
            )
        requested = _not_default(request.sampling)
        for name in REFUSED:
            if name in requested:
                raise RequestError(
                    f"{name} is not possible: with a drafter TensorRT-LLM does not have it",
                    "Leave it out.",
                )
        drafter = self._args.get("speculative_config")
        for name in PENALTIES:
            if name in requested and drafter and not drafter.get("enable_penalty"):
                raise RequestError(
                    f"{name} is not possible: this server was built without penalties",
                    "Leave it out, or build with engine.args.speculative_config.enable_penalty.",
                )
        self._to_guided_decoding_params(request)
        longest = self._args.get("max_num_tokens", 8192)
        if len(request.prompt) > longest and not self._args.get("enable_chunked_prefill"):
            raise RequestError(
                f"The prompt has {len(request.prompt)} tokens; this server takes {longest}",
                "Shorten it, or build with engine.args.enable_chunked_prefill.",
            )

    def start(self, queue: WaitingQueue[SequenceState], deliver: Deliver) -> None:
        self._queue, self._deliver = queue, deliver
        self._thread.start()

    def wake(self) -> None:
        with suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._cancel_and_start)

    def load_drafter(self, engine: Path) -> None:
        raise NotImplementedError  # it is part of the LLM

    def close(self, timeout: float) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(timeout)
        self._llm.shutdown()

    # --- in the loop's thread ---------------------------------------------------------------------

    def _cancel_and_start(self) -> None:
        for sequence, task in self._running.items():
            if sequence.dropped:
                task.cancel()
        while len(self._running) < self._slots and (waiting := self._queue.take()) is not None:
            waiting.started = time.monotonic()
            task = self._running[waiting] = self._loop.create_task(self._decode(waiting))
            # a callback, because a task cancelled early never runs
            task.add_done_callback(partial(self._finish, waiting))
        self._metrics.set_gauges(active=len(self._running), waiting=len(self._queue))

    def _stop(self) -> None:
        self._slots = 0
        for task in self._running.values():
            task.cancel()
        self._loop.call_later(0, self._loop.stop)

    async def _decode(self, sequence: SequenceState) -> None:
        request = sequence.request
        try:
            result = self._llm.generate_async(
                list(request.prompt),
                self._to_sampling_params(request),
                streaming=True,
                cache_salt=request.cache_salt or None,
            )
        except Exception as error:
            if isinstance(error, ValueError) or _is_a(error, "RequestError"):
                raise RefusedError(str(error)) from error
            raise
        try:
            async for _ in result:
                self._commit(sequence, result)
                if sequence.finish_reason is not None:
                    return
                self._deliver(sequence)
            raise RuntimeError("the generation ended without a reason")
        except Exception as error:
            # a grammar is compiled only when the prompt has run
            if request.grammar and not sequence.tokens and _is_a(error, "RequestError"):
                raise RefusedError(str(error)) from error
            raise
        finally:
            if not result.finished:
                with suppress(Exception):  # after shutdown there is nothing to abort
                    result.abort()

    def _to_sampling_params(self, request: Request) -> Any:
        requested = _not_default(request.sampling)
        return self._sampling_params(
            max_tokens=request.max_tokens,
            temperature=request.sampling.temperature,  # 0: greedy
            end_id=self._end_id,  # then it needs no tokenizer
            stop_token_ids=sorted(request.stop_ids - {self._end_id}) or None,
            include_stop_str_in_output=True,
            ignore_eos=self._end_id not in request.stop_ids,
            detokenize=False,  # ours finds stop words
            return_perf_metrics=True,
            guided_decoding=self._to_guided_decoding_params(request),
            **{name: requested[name] for name in requested.keys() & PASSED_ON},
        )

    def _to_guided_decoding_params(self, request: Request) -> Any:
        if request.grammar is None:
            return None
        backend = self._args.get("guided_decoding_backend")
        return self._guided_params(**guide(request.grammar, backend, channels=self._channels))

    def _commit(self, sequence: SequenceState, result: Any) -> None:
        """Commit a response: tokens of one or more iterations (`stream_interval`)."""
        output = result.outputs[0]
        first = not sequence.tokens
        if first:
            sequence.cached_tokens = result.cached_tokens
            self._metrics.count_prompt(len(sequence.request.prompt) - sequence.cached_tokens)
        taken = sequence.commit(output.token_ids_diff)
        if sequence.finish_reason is None and output.finish_reason is not None:
            sequence.finish_reason = REASONS[output.finish_reason]
        # mean over all iterations including prefill; None: unknown
        average = result.avg_decoded_tokens_per_iter
        rounds = round(output.length / average) - 1 if average else sequence.rounds + (not first)
        counts = _spread(taken - first, rounds - sequence.rounds)
        sequence.committed_per_round += counts
        sequence.accepted += sum(counts) - len(counts)
        sequence.drafted += len(counts) * self._drafts  # an upper bound
        if sequence.finish_reason is not None:
            self._count_drafts(sequence, output.request_perf_metrics)

    def _count_drafts(self, sequence: SequenceState, perf_metrics: Any) -> None:
        if perf_metrics is not None and perf_metrics.speculative_decoding.total_draft_tokens:
            sequence.drafted = perf_metrics.speculative_decoding.total_draft_tokens
            sequence.accepted = perf_metrics.speculative_decoding.total_accepted_draft_tokens
        accepted = [count - 1 for count in sequence.committed_per_round]
        if accepted:  # a text may end with a draft, before the last round's own token
            accepted[-1] += sequence.accepted - sum(accepted)
        left, rounds = sequence.drafted, []
        for count in accepted:  # all rounds draft equally, except the last
            rounds.append((min(self._drafts, left), count))
            left -= rounds[-1][0]
        self._metrics.count_drafts(rounds)

    def _finish(self, sequence: SequenceState, task: "asyncio.Task[None]") -> None:
        del self._running[sequence]
        code, message = INTERNAL, FAILED
        if task.cancelled():
            sequence.finish_reason = "cancelled"
            self._count_drafts(sequence, None)
        elif isinstance(error := task.exception(), RefusedError):
            sequence.finish_reason = "error"
            code, message = INVALID, str(error)
        elif error:
            log.error("a generation failed", exc_info=error)
            sequence.finish_reason = "error"
            if _is_a(error, "EngineDeadError"):  # every later request would fail too
                end_process()
        self._deliver(sequence, code, message)
        self._cancel_and_start()


def _not_default(sampling: SamplingParams) -> dict[str, Any]:
    neutral = vars(SamplingParams())
    return {name: value for name, value in vars(sampling).items() if value != neutral[name]}


def _is_a(error: BaseException, class_name: str) -> bool:  # not every version has the class
    return any(cls.__name__ == class_name for cls in type(error).__mro__)


def _spread(tokens: int, rounds: int) -> list[int]:
    """Spread tokens evenly over rounds: TensorRT-LLM does not report tokens per round."""
    rounds = max(rounds, tokens > 0)
    return [tokens * (i + 1) // rounds - tokens * i // rounds for i in range(rounds)]
