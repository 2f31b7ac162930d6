"""Answers of our client in the formats of OpenAI's API."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_trt.chat import (
    AnswerDelta,
    AnswerParser,
    AnswerPart,
    CallDelta,
    ContentDelta,
    ReasoningDelta,
)
from dflash_trt.checkpoints import Spell
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.http.logprobs import TextLogprobs, chat_logprobs

Json = dict[str, Any]


def usage(ended: Sequence[Chunk], choices_per_prompt: int) -> Json:
    """Return the totals of choices; ended: their last chunks."""
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "rounds", "drafted", "accepted")
    prompt, cached, completion, rounds, drafted, accepted = (
        sum(getattr(chunk, name) for chunk in ended) for name in names
    )
    committed = sum(chunk.acceptance_length * chunk.rounds for chunk in ended)
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


def metrics(last: Chunk, round_tokens: Iterable[int], max_draft_tokens: int) -> Json:
    """Return one choice's figures as in vLLM's `--per-request-spec-decode-metrics`.

    AIPerf reads them and drops them unless they add up. last: the choice's last chunk;
    round_tokens: of all its rounds.
    """
    accepted = [count - 1 for count in round_tokens]  # the target's own token is no draft
    if accepted:  # an answer may end with a draft, before the last round's own token
        accepted[-1] += last.accepted - sum(accepted)
    steps = len(accepted)
    return {
        "speculative_decoding": {
            "num_spec_steps": steps,
            "num_spec_tokens": max_draft_tokens,
            "num_draft_tokens": last.drafted,
            "num_accepted_draft_tokens": sum(accepted),
            "mean_acceptance_length": 1 + sum(accepted) / steps if steps else 0.0,
            "draft_acceptance_rate": sum(accepted) / max(1, last.drafted),
            "acceptance_histogram": [accepted.count(n) for n in range(max_draft_tokens + 1)],
            "per_step_accepted": accepted,
        }
    }


class ChatReader:
    """Reads a choice's chunks as what a chat's answer is made of: reasoning, content and calls."""

    def __init__(
        self,
        new_parser: Callable[[bool], AnswerParser],
        *,
        one_call: bool = False,
        only_calls: bool = False,
    ) -> None:
        """Begin a choice.

        new_parser: takes whether it begins with reasoning; one_call: drop all calls but the first;
        only_calls: the answer was forced to be calls, so that truncated text is no content.
        """
        self._new_parser = new_parser
        self._one_call = one_call
        self.only_calls = only_calls
        self._parser: AnswerParser | None = None
        self.called = False

    def read(self, chunk: Chunk) -> AnswerDelta:
        if self._parser is None:
            self._parser = self._new_parser(chunk.thinking)
        reason = chunk.finish_reason
        news = self._parser.push(chunk.text, last=reason != "", cut=reason == "length")
        news.parts = [part for part in news.parts if not self._drops(part)]
        self.called = self.called or bool(news.calls)
        return news

    def _drops(self, part: AnswerPart) -> bool:
        if isinstance(part, ContentDelta):
            return self.only_calls
        return self._one_call and isinstance(part, CallDelta) and part.index > 0


@dataclass
class ChoiceWriter:
    """Writes a choice of chat completions, or without a reader of text completions."""

    spell: Spell
    echo: bool  # the prompt comes first
    stream: bool
    reader: ChatReader | None = None
    drafting: bool = False  # report rounds
    stop_ids: Collection[int] = ()  # tokens that the request stops at
    hidden: Collection[int] = ()  # tokens that are not in a text completion
    _first: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._text_logprobs = TextLogprobs(self.spell, self.hidden, echo=self.echo)

    def write(self, chunk: Chunk) -> list[Json]:
        """Return the choice, or a stream's pieces, each with one kind of news, as clients need."""
        news = self._news(chunk)
        logprobs = self._logprobs(chunk)
        report: Json = {"drafting": {"rounds": chunk.drafting}} if self.drafting else {}
        first, self._first = self._first, False
        place: Json = {"index": chunk.index, "logprobs": None, "finish_reason": None}
        place |= {"drafting": {"rounds": []}} if self.drafting else {}
        if not self.stream:
            return [{**place, **news[0], "logprobs": logprobs, **report, **self._finish(chunk)}]
        empty: Json = {"text": ""} if self.reader is None else {"delta": {}}
        pieces = [piece for piece in news if piece != empty]
        if not pieces and (logprobs or chunk.drafting):
            pieces = [empty]
        if pieces:
            pieces[-1] = {**pieces[-1], "logprobs": logprobs, **report}
        if first and self.reader is not None:
            pieces.insert(0, {"delta": {"role": "assistant"}})
        if chunk.finish_reason:  # alone, because clients take it for the end
            pieces.append({**empty, **self._finish(chunk)})
        return [{**place, **piece} for piece in pieces]

    def _news(self, chunk: Chunk) -> list[Json]:
        if self.reader is None:
            return [{"text": chunk.text}]
        news = self.reader.read(chunk)
        if self.stream:
            return [{"delta": delta} for delta in _deltas(news)]
        return [{"message": _message(news, only_calls=self.reader.only_calls)}]

    def _logprobs(self, chunk: Chunk) -> Json | None:
        if not chunk.logprobs:
            return None
        if self.reader is None:
            return self._text_logprobs.of(chunk)
        return {"content": chat_logprobs(self.spell, chunk), "refusal": None}

    def _finish(self, chunk: Chunk) -> Json:
        """Return why the choice ended and, as in vLLM, the word or token it stopped at."""
        reason = chunk.finish_reason
        if not reason:
            return {}
        stop: str | int | None = chunk.stop_word or None
        if reason == "stop" and chunk.token_ids and chunk.token_ids[-1] in self.stop_ids:
            stop = chunk.token_ids[-1]
        if reason == "stop" and self.reader is not None and self.reader.called:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": stop}


def _message(news: AnswerDelta, *, only_calls: bool) -> Json:
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    if news.reasoning:
        message["reasoning_content"] = news.reasoning
    if news.content or not (news.calls or only_calls):
        message["content"] = news.content
    if news.calls:
        message["tool_calls"] = [_call(call, False) for call in news.calls]
    return message


def _deltas(news: AnswerDelta) -> list[Json]:
    deltas: list[Json] = []
    for part in news.parts:
        if isinstance(part, ReasoningDelta):
            deltas.append({"reasoning_content": part.text})
        elif isinstance(part, ContentDelta):
            deltas.append({"content": part.text})
        else:
            deltas += _call_deltas(part)
    return deltas


def _call_deltas(call: CallDelta) -> list[Json]:
    """Return a call's pieces: its name first, then its arguments."""
    parts = [call]
    if call.id and call.arguments:
        parts = [replace(call, arguments=""), replace(call, id="")]
    return [{"tool_calls": [_call(part, True)]} for part in parts]


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
