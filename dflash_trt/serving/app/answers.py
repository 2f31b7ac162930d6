"""Answers of our client in the formats of OpenAI's API."""

import codecs
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dflash_trt.chat import AnswerParser, CallDelta
from dflash_trt.checkpoints import Spell
from dflash_trt.serving.client import Chunk, Summary

Json = dict[str, Any]
UTF8 = codecs.getincrementaldecoder("utf-8")
LEAST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


def usage(summaries: Sequence[Summary], choices_per_prompt: int) -> Json:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "rounds", "drafted", "accepted")
    prompt, cached, completion, rounds, drafted, accepted = (
        sum(getattr(each, name) for each in summaries) for name in names
    )
    committed = sum(each.acceptance_length * each.rounds for each in summaries)
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
    _answer: AnswerParser | None = field(default=None, init=False)
    _called: bool = field(default=False, init=False)
    _first: bool = field(default=True, init=False)
    _given: int = field(default=0, init=False)  # characters of earlier tokens
    _utf8: codecs.IncrementalDecoder = field(default_factory=partial(UTF8, "replace"), init=False)

    def write(self, chunk: Chunk) -> list[Json]:
        """Return the choice, or a stream's pieces, each with one kind of news, as clients need."""
        chat = self.new_parser is not None
        news = self._message_or_deltas(chunk) if chat else [{"text": chunk.text}]
        logprobs = None
        if chunk.logprobs:
            logprobs = self._chat_logprobs(chunk) if chat else self._text_logprobs(chunk)
        told: Json = {"drafting": {"rounds": chunk.drafting}} if self.drafting else {}
        first, self._first = self._first, False
        place: Json = {"index": chunk.index, "logprobs": None, "finish_reason": None}
        place |= {"drafting": {"rounds": []}} if self.drafting else {}
        if not self.stream:
            return [{**place, **news[0], "logprobs": logprobs, **told, **self._finish(chunk)}]
        empty: Json = {"delta": {}} if chat else {"text": ""}
        pieces = [piece for piece in news if piece != empty]
        if not pieces and (logprobs or chunk.drafting):
            pieces = [empty]
        if pieces:
            pieces[-1] = {**pieces[-1], "logprobs": logprobs, **told}
        if first and chat:
            pieces.insert(0, {"delta": {"role": "assistant"}})
        if chunk.final:  # alone, because clients take it for the end
            pieces.append({**empty, **self._finish(chunk)})
        return [{**place, **piece} for piece in pieces]

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
        news = self._answer.push(chunk.text, last=chunk.final is not None)
        content = "" if self.only_calls else news.content
        calls = [call for call in news.calls if not (self.one_call and call.index)]
        self._called = self._called or bool(calls)
        if self.stream:
            deltas: list[Json] = []
            if news.reasoning:
                deltas.append({"reasoning_content": news.reasoning})
            if content:
                deltas.append({"content": content})
            for call in calls:
                begun = replace(call, arguments="") if call.id and call.arguments else None
                rest = replace(call, id="") if begun else call
                deltas += [{"tool_calls": [_call(each, True)]} for each in (begun, rest) if each]
            return [{"delta": delta} for delta in deltas]
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        if news.reasoning:
            message["reasoning_content"] = news.reasoning
        if content or not (calls or self.only_calls):
            message["content"] = content
        if calls:
            message["tool_calls"] = [_call(call, False) for call in calls]
        return [{"message": message}]

    def _chat_logprobs(self, chunk: Chunk) -> Json:
        def entry(token: int, logprob: float) -> Json:
            text, spelled = self._text(token), list(self.spell(token))
            return {"token": text, "bytes": spelled, "logprob": max(logprob, LEAST)}

        tops = chunk.top_logprobs or [{} for _ in chunk.logprobs]
        content = [
            {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top.items()]}
            for token, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, chunk: Chunk) -> Json:
        texts = [self._text(token) for token in chunk.token_ids]
        values: list[float | None] = [max(value, LEAST) for value in chunk.logprobs]
        tops: list[Json | None] = []
        for text, value, top in zip(texts, values, chunk.top_logprobs, strict=True):
            # the better of two with equal text; as in OpenAI's API always the token itself
            best = {self._text(token): max(each, LEAST) for token, each in reversed(top.items())}
            tops.append({text: value, **best})
        if self.echo and self._first:  # nothing before it predicts it
            values[0] = tops[0] = None
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": [self._next_offset(token) for token in chunk.token_ids],
        }

    def _next_offset(self, token: int) -> int:
        """Return the text offset where a token, or the character it is part of, begins."""
        offset = self._given
        self._given += len(self._utf8.decode(self.spell(token)))
        return offset

    def _text(self, token: int) -> str:
        return self.spell(token).decode(errors="replace")


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
