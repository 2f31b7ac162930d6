"""Our client's results in the shapes of OpenAI's API."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from dflash_trt.chat import Answer, CallDelta, Spell
from dflash_trt.serving.client import Chunk, Summary

Json = dict[str, Any]
LEAST = -9999.0  # OpenAI's word for minus infinity, which JSON cannot say


def usage(summaries: Sequence[Summary], each_n: int) -> Json:
    """Token counts as OpenAI has them, and how drafting went; each_n: choices of a prompt."""
    completion, rounds, drafted, accepted = (
        sum(getattr(each, name) for each in summaries)
        for name in ("completion_tokens", "rounds", "drafted", "accepted")
    )
    committed = sum(each.acceptance_length * each.rounds for each in summaries)
    return {
        **_tokens(sum(each.prompt_tokens for each in summaries) // each_n, completion),
        "prompt_tokens_details": {
            "cached_tokens": sum(each.cached_tokens for each in summaries) // each_n
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_length": round(committed / rounds, 4) if rounds else 0.0,
    }


def usage_so_far(chunk: Chunk) -> Json:
    """Token counts of a choice up to this chunk."""
    return _tokens(chunk.prompt_tokens, chunk.completion_tokens)


def metrics(summary: Summary, round_tokens: Iterable[int], max_draft_tokens: int) -> Json:
    """The figures of one choice as vLLM's `--per-request-spec-decode-metrics` gives them.

    AIPerf reads them and drops them unless they add up.
    """
    accepted = [count - 1 for count in round_tokens]  # a round's own token is no draft
    if accepted:  # an answer may end with a draft, before the own token of its last round
        accepted[-1] += summary.accepted - sum(accepted)
    steps = len(accepted)
    histogram = [accepted.count(count) for count in range(max_draft_tokens + 1)]
    return {
        "speculative_decoding": {
            "num_spec_steps": steps,
            "num_spec_tokens": max_draft_tokens,
            "num_draft_tokens": summary.drafted,
            "num_accepted_draft_tokens": sum(accepted),
            "mean_acceptance_length": 1 + sum(accepted) / steps if steps else 0.0,
            "draft_acceptance_rate": sum(accepted) / max(1, summary.drafted),
            "acceptance_histogram": histogram,
            "per_step_accepted": accepted,
        }
    }


@dataclass
class ChoiceWriter:
    """Writes one choice, whole or piece by piece.

    answer: separates reasoning, calls and content of a chat, given whether it begins with the
    first; one_call: only the first is given out; echo: the prompt comes first; drafting: rounds
    are told.
    """

    spell: Spell
    echo: bool
    stream: bool
    answer: Callable[[bool], Answer] | None = None
    one_call: bool = False
    drafting: bool = False
    _answer: Answer | None = field(default=None, init=False)
    _called: bool = field(default=False, init=False)
    _first: bool = field(default=True, init=False)
    _offset: int = field(default=0, init=False)  # characters of tokens given before

    def write(self, chunk: Chunk) -> Json:
        chat = self.answer is not None
        said = self._message(chunk) if chat else {"text": chunk.text}
        logprobs = None
        if chunk.logprobs:
            logprobs = self._chat_logprobs(chunk) if chat else self._text_logprobs(chunk)
        self._first = False
        reason = chunk.final.finish_reason if chunk.final else None
        if reason == "stop" and self._called:
            reason = "tool_calls"
        told = {"drafting": {"rounds": chunk.drafting}} if self.drafting else {}
        return {"index": chunk.index, **said, "logprobs": logprobs, "finish_reason": reason, **told}

    def _message(self, chunk: Chunk) -> Json:
        if self._answer is None:
            assert self.answer is not None
            self._answer = self.answer(chunk.thinking)
        news = self._answer.push(chunk.text, last=chunk.final is not None)
        calls = [call for call in news.calls if not (self.one_call and call.index)]
        self._called = self._called or bool(calls)
        message: Json = {"role": "assistant"} if self._first else {}
        if news.reasoning:
            message["reasoning_content"] = news.reasoning
        if news.content or not (self.stream or calls):
            message["content"] = news.content
        if calls:
            message["tool_calls"] = [_call(call, self.stream) for call in calls]
        if not self.stream:
            message = {"content": None, "refusal": None, **message}
        return {"delta" if self.stream else "message": message}

    def _chat_logprobs(self, chunk: Chunk) -> Json:
        def entry(token: int, logprob: float) -> Json:
            spelled = self.spell(token)
            return {
                "token": spelled.decode(errors="replace"),
                "bytes": list(spelled),
                "logprob": max(logprob, LEAST),
            }

        tops = chunk.top_logprobs or [{} for _ in chunk.logprobs]
        content = [
            {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top.items()]}
            for token, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, chunk: Chunk) -> Json:
        texts = [self._text(token) for token in chunk.token_ids]
        offsets = list(accumulate(map(len, texts), initial=self._offset))
        self._offset = offsets.pop()
        values: list[float | None] = [max(value, LEAST) for value in chunk.logprobs]
        # the better of two that read alike
        tops: list[Json | None] = [
            {self._text(token): max(value, LEAST) for token, value in reversed(top.items())}
            for top in chunk.top_logprobs
        ]
        if self.echo and self._first:  # nothing comes before it that would predict it
            values[0] = tops[0] = None
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        """A token as text, with U+FFFD for the bytes of a character that it splits."""
        return self.spell(token).decode(errors="replace")


def _call(call: CallDelta, stream: bool) -> Json:
    function = {"name": call.name} if call.id else {}
    begin = {"id": call.id, "type": "function"} if call.id else {}
    place = {"index": call.index} if stream else {}
    return {**place, **begin, "function": {**function, "arguments": call.arguments}}


def _tokens(prompt: int, completion: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
