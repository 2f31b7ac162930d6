"""Answers of our client in the formats of OpenAI's API."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_trt.chat import AnswerDelta, AnswerParser, CallDelta
from dflash_trt.checkpoints import Spell
from dflash_trt.serving.client import Chunk, Summary
from dflash_trt.serving.http.logprobs import ContentLogprobs, TextLogprobs, chat_logprobs

Json = dict[str, Any]


def usage(summaries: Sequence[Summary], choices_per_prompt: int) -> Json:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "rounds", "drafted", "accepted")
    prompt, cached, completion, rounds, drafted, accepted = (
        sum(getattr(summary, name) for summary in summaries) for name in names
    )
    committed = sum(summary.acceptance_length * summary.rounds for summary in summaries)
    return {
        **token_counts(prompt // choices_per_prompt, completion),
        "prompt_tokens_details": {"cached_tokens": cached // choices_per_prompt},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_length": round(committed / rounds, 4) if rounds else 0.0,
    }


def metrics(summary: Summary, round_tokens: Iterable[int], max_draft_tokens: int) -> Json:
    """Return one choice's figures as in vLLM's `--per-request-spec-decode-metrics`.

    AIPerf reads them and drops them unless they add up.
    """
    accepted = [count - 1 for count in round_tokens]  # the target's own token is no draft
    if accepted:  # an answer may end with a draft, before the last round's own token
        accepted[-1] += summary.accepted - sum(accepted)
    steps = len(accepted)
    return {
        "speculative_decoding": {
            "num_spec_steps": steps,
            "num_spec_tokens": max_draft_tokens,
            "num_draft_tokens": summary.drafted,
            "num_accepted_draft_tokens": sum(accepted),
            "mean_acceptance_length": 1 + sum(accepted) / steps if steps else 0.0,
            "draft_acceptance_rate": sum(accepted) / max(1, summary.drafted),
            "acceptance_histogram": [accepted.count(n) for n in range(max_draft_tokens + 1)],
            "per_step_accepted": accepted,
        }
    }


@dataclass
class ChoiceWriter:
    spell: Spell
    echo: bool  # the prompt comes first
    stream: bool
    new_parser: Callable[[bool], AnswerParser] | None = None  # of a chat; begins with reasoning?
    one_call: bool = False  # drop all but the first
    only_calls: bool = False  # truncated text is no content
    drafting: bool = False  # report rounds
    stop_ids: Collection[int] = ()  # tokens that the request stops at
    content_logprobs: ContentLogprobs | None = None  # of a response: those of its texts alone
    _answer: AnswerParser | None = field(default=None, init=False)
    _called: bool = field(default=False, init=False)
    _first: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._text_logprobs = TextLogprobs(self.spell, echo=self.echo)

    def write(self, chunk: Chunk) -> list[Json]:
        """Return the choice, or a stream's pieces, each with one kind of news, as clients need."""
        chat = self.new_parser is not None
        news = self._message_or_deltas(chunk) if chat else [{"text": chunk.text}]
        logprobs = self._logprobs(chunk)
        report: Json = {"drafting": {"rounds": chunk.drafting}} if self.drafting else {}
        first, self._first = self._first, False
        place: Json = {"index": chunk.index, "logprobs": None, "finish_reason": None}
        place |= {"drafting": {"rounds": []}} if self.drafting else {}
        if not self.stream:
            return [{**place, **news[0], "logprobs": logprobs, **report, **self._finish(chunk)}]
        empty: Json = {"delta": {}} if chat else {"text": ""}
        pieces = [piece for piece in news if piece != empty]
        if not pieces and (logprobs or chunk.drafting):
            pieces = [empty]
        if pieces:
            pieces[-1] = {"logprobs": logprobs, **pieces[-1], **report}
        if first and chat:
            pieces.insert(0, {"delta": {"role": "assistant"}})
        if chunk.final:  # alone, because clients take it for the end
            pieces.append({**empty, **self._finish(chunk)})
        return [{**place, **piece} for piece in pieces]

    def _logprobs(self, chunk: Chunk) -> Json | None:
        """Return those of all tokens; None if they belong to a part of the answer."""
        if not chunk.logprobs or self.content_logprobs is not None:
            return None
        if self.new_parser is None:
            return self._text_logprobs.of(chunk)
        return {"content": chat_logprobs(self.spell, chunk), "refusal": None}

    def _finish(self, chunk: Chunk) -> Json:
        """Return why the choice ended and, as in vLLM, the word or token it stopped at."""
        if chunk.final is None:
            return {}
        reason: str = chunk.final.finish_reason
        stop: str | int | None = chunk.final.stop_word or None
        if reason == "stop" and chunk.token_ids and chunk.token_ids[-1] in self.stop_ids:
            stop = chunk.token_ids[-1]
        if reason == "stop" and self._called:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": stop}

    def _message_or_deltas(self, chunk: Chunk) -> list[Json]:
        if self._answer is None:
            assert self.new_parser is not None
            self._answer = self.new_parser(chunk.thinking)
        if self.content_logprobs is not None and chunk.logprobs:
            self.content_logprobs.add(chunk)
        news = self._answer.push(chunk.text, last=chunk.final is not None)
        content = "" if self.only_calls else news.content
        calls = [call for call in news.calls if not (self.one_call and call.index)]
        self._called = self._called or bool(calls)
        if self.stream:
            return self._deltas(news, content, calls)
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        if news.reasoning:
            message["reasoning_content"] = news.reasoning
        if content or not (calls or self.only_calls):
            message["content"] = content
        if calls:
            message["tool_calls"] = [_call(call, False) for call in calls]
        return [{"message": message}]

    def _deltas(self, news: AnswerDelta, content: str, calls: Iterable[CallDelta]) -> list[Json]:
        deltas: list[Json] = []
        if news.reasoning:
            deltas.append({"delta": {"reasoning_content": news.reasoning}})
        if content:
            deltas.append({"delta": {"content": content}, **self._of_content(news)})
        for call in calls:
            deltas += _call_deltas(call)
        return deltas

    def _of_content(self, news: AnswerDelta) -> Json:
        if self.content_logprobs is None:
            return {}
        return {"logprobs": {"content": self.content_logprobs.of(news.content_spans)}}


def _call_deltas(call: CallDelta) -> list[Json]:
    """Return a call's pieces: its name first, then its arguments."""
    parts = [call]
    if call.id and call.arguments:
        parts = [replace(call, arguments=""), replace(call, id="")]
    return [{"delta": {"tool_calls": [_call(part, True)]}} for part in parts]


def _call(call: CallDelta, stream: bool) -> Json:
    place = {"index": call.index} if stream else {}
    if not call.id:  # more of the arguments
        return {**place, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {**place, "id": call.id, "type": "function", "function": function}


def token_counts(prompt: int, completion: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def to_sse(data: Json, kind: str = "") -> bytes:
    name = f"event: {kind}\n" if kind else ""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return f"{name}data: {text}\n\n".encode()
