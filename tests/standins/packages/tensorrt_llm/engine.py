"""The engine's thread: our scheduler over ONNX engines made of the two checkpoints."""

import queue
import tempfile
import threading
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.builder.engines import EngineOptions, build_drafter, build_target
from dflash_trt.checkpoints import load_drafter, load_target
from dflash_trt.decoding import Grammars, Proposer, Request, Scheduler, SequenceState, in_process
from dflash_trt.engines.onnxruntime import Engine as OnnxEngine
from dflash_trt.errors import RequestError as OurRequestError
from dflash_trt.speculation import Fixed
from tensorrt_llm.errors import EngineDeadError, RequestError
from tensorrt_llm.results import RequestOutput, Response
from tensorrt_llm.sampling_params import SamplingParams

BLOCK = 32  # tokens, of the KV cache


class Engine:
    """An engine that reports progress every `stream_interval` iterations."""

    def __init__(self, args: dict[str, Any]) -> None:
        speculative = args.get("speculative_config") or {}
        target = load_target(Path(args["model"]))
        method, drafts = speculative.get("decoding_type"), speculative.get("max_draft_len", 0)
        drafter = None
        if method == "DFlash":
            drafter = load_drafter(Path(speculative["speculative_model"]))
            if drafts > drafter.spec.block_size - 1:
                raise ValueError(f"lower max_draft_len to at most {drafter.spec.block_size - 1}")
        sizes = EngineOptions(
            slots=args["max_batch_size"], max_seq_len=args["max_seq_len"], threads=1
        )
        with tempfile.TemporaryDirectory() as scratch:
            for role in ("target", "drafter"):
                (Path(scratch) / role).mkdir()
            build_target(target, drafter and drafter.spec, Path(scratch) / "target", sizes)
            engine = None
            if drafter:
                build_drafter(drafter, target, Path(scratch) / "drafter", sizes)
                engine = OnnxEngine(Path(scratch) / "drafter")
            rounds = in_process(OnnxEngine(Path(scratch) / "target"), engine)
        self._scheduler = Scheduler(
            rounds,
            slots=args["max_batch_size"],
            max_seq_len=args["max_seq_len"],
            prefill_chunk=args["max_seq_len"],
            policy=Fixed(drafts),
            proposer=Proposer(drafts, lookup=method in ("NGram", "Eagle3"), candidates=1),
        )
        self._max_seq_len: int = args["max_seq_len"]
        self._end_ids = target.spec.eos_token_ids
        self._interval: int = args.get("stream_interval", 1)
        self._plain = not speculative
        self._enable_penalty: bool = speculative.get("enable_penalty", False)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._live: dict[int, tuple[SequenceState, RequestOutput]] = {}
        self._told: dict[int, int] = {}  # tokens that a request knows of; -1: it waits for all
        tokenizer = Tokenizer.from_file(str(Path(args["model"]) / "tokenizer.json"))
        self._grammars = Grammars(tokenizer, target.spec.vocab_size, target.spec.eos_token_ids)
        self._guides_by: str | None = args.get("guided_decoding_backend")
        self._reuses: bool = args.get("kv_cache_config", {}).get("enable_block_reuse", True)
        self._tail: int = speculative.get("context_recompute_tail") or 0
        self._seen: dict[str | None, set[tuple[int, ...]]] = {}
        self._cached: dict[int, int] = {}
        self.dead: EngineDeadError | None = None
        self.stats: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self, output: RequestOutput, params: SamplingParams, streaming: bool, salt: str | None
    ) -> None:
        if self.dead is not None:
            raise self.dead
        self._inbox.put((output, params, streaming, salt))

    def abort(self, request_id: int) -> None:
        self._inbox.put(request_id)

    def die(self) -> None:
        """Fail every pending and later request, as when a rank is gone."""
        self._inbox.put(EngineDeadError("the engine is dead"))

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            while not (self._scheduler.has_work and self._inbox.empty()):
                message = self._inbox.get()
                if message is None:
                    return
                if isinstance(message, EngineDeadError):
                    self.dead = message
                    for _, output in self._live.values():
                        output._put(Response([], 0, 0.0, error=message))
                    return
                if isinstance(message, int):
                    self._end(message)
                else:
                    self._begin(*message)
            for sequence in self._scheduler.step():
                self._tell(next(n for n, (each, _) in self._live.items() if each is sequence))
            report = self._scheduler.report
            if report is not None and report.sequences:
                drafted, accepted = map(sum, zip(*report.sequences, strict=True))
                count = len(report.sequences)
                self.stats.append(
                    {
                        "specDecodingStats": {
                            "numDraftTokens": drafted,
                            "numAcceptedTokens": accepted,
                            "numRequestsWithDraftTokens": count,
                            "acceptanceLength": (accepted + count) / count,
                        }
                    }
                )

    def _begin(
        self, output: RequestOutput, params: SamplingParams, streaming: bool, salt: str | None
    ) -> None:
        refusal, matcher = None, None
        if not self._plain:
            refusal = params._refused_with_a_drafter(self._enable_penalty)
        if params.guided_decoding is not None and refusal is None:
            if self._guides_by is None:
                refusal = (
                    "Request is specified with GuidedDecodingParams, but GuidedDecoder is not setup"
                )
            else:
                try:
                    grammar = params.guided_decoding._ours(self._guides_by)
                    matcher = grammar and self._grammars.matcher(grammar)
                except (ValueError, OurRequestError) as error:
                    refusal = str(error)
        if refusal is not None:
            output._put(Response([], 0, 0.0, error=RequestError(refusal)))
            return
        stop_ids = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= set(self._end_ids[:1] if params.end_id is None else [params.end_id])
        prompt = output.prompt_token_ids
        request = Request(
            prompt,
            min(params.max_tokens, self._max_seq_len - len(prompt)),
            sampling=params._ours(),
            stop_ids=frozenset(stop_ids),
        )
        self._cached[output.request_id] = self._reused(salt, prompt)
        self._live[output.request_id] = self._scheduler.submit(request, matcher), output
        self._told[output.request_id] = 0 if streaming else -1

    def _reused(self, salt: str | None, prompt: list[int]) -> int:
        """Return the number of tokens in whole blocks that earlier prompts of this salt began with.

        Excludes the tail that KV cache manager V2 recomputes (`_spec_recompute_claim_limit`). Our
        engine computes all tokens anyway; upstream keeps generated texts too.
        """
        if not self._reuses:
            return 0
        blocks = [tuple(prompt[: i + BLOCK]) for i in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        seen = self._seen.setdefault(salt, set())
        known = max((len(block) for block in blocks if block in seen), default=0)
        seen.update(blocks)
        limit = 0 if self._tail < 0 else max(0, len(prompt) - self._tail)
        return min(known, len(prompt) - 1, limit) // BLOCK * BLOCK

    def _end(self, request_id: int) -> None:
        if request_id in self._live:
            self._scheduler.finish(self._live[request_id][0], "cancelled")
            self._tell(request_id)

    def _tell(self, request_id: int) -> None:
        sequence, output = self._live[request_id]
        iterations, told = 1 + sequence.rounds, self._told[request_id]
        waits = told < 0 or (told > 0 and iterations % self._interval > 0)
        if sequence.finish_reason is None and waits:
            return
        output._put(
            Response(
                sequence.tokens[max(told, 0) :],
                iterations,
                len(sequence.tokens) / iterations,
                sequence.finish_reason,
                sequence.drafted,
                sequence.accepted,
                cached=self._cached[request_id],
            )
        )
        self._told[request_id] = len(sequence.tokens)
        if sequence.finish_reason is not None:
            del self._live[request_id], self._told[request_id], self._cached[request_id]
