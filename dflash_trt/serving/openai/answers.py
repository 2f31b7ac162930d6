"""Our client's results in the shapes of OpenAI's API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.chat.harmony import Channels
from dflash_trt.serving.client import Choice, Chunk, Summary
from dflash_trt.serving.openai.spelling import Spell

Json = dict[str, Any]
LEAST = -9999.0  # OpenAI's word for minus infinity, which JSON cannot say


@dataclass(frozen=True)
class Style:
    """How one of the two endpoints says it; `offset`: characters of tokens given before."""

    id_prefix: str
    object: str
    chunk_object: str
    whole: Callable[[Choice, Spell], Json]
    piece: Callable[[Chunk, Spell, int | None], Json]  # offset None: the choice's first


def usage(choices: Sequence[Summary], each_n: int) -> Json:
    """Token counts as OpenAI has them, and how drafting went; each_n: choices of a prompt."""
    prompt = sum(choice.prompt_tokens for choice in choices) // each_n
    completion, rounds, drafted, accepted = (
        sum(getattr(each, name) for each in choices)
        for name in ("completion_tokens", "rounds", "drafted", "accepted")
    )
    committed = sum(each.acceptance_length * each.rounds for each in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_length": round(committed / rounds, 4) if rounds else 0.0,
    }


def so_far(chunk: Chunk) -> Json:
    """Token counts of a choice up to this chunk."""
    return {
        "prompt_tokens": chunk.prompt_tokens,
        "completion_tokens": chunk.completion_tokens,
        "total_tokens": chunk.prompt_tokens + chunk.completion_tokens,
    }


def metrics(summary: Summary, round_tokens: Sequence[int], most_drafts: int) -> Json:
    """The figures of one choice as vLLM's `--per-request-spec-decode-metrics` gives them.

    AIPerf reads them and drops them unless they add up.
    """
    accepted = [count - 1 for count in round_tokens]  # a round's own token is no draft
    if accepted:  # an answer may end with a draft, before the own token of its last round
        accepted[-1] += summary.accepted - sum(accepted)
    steps = len(accepted)
    return {
        "speculative_decoding": {
            "num_spec_steps": steps,
            "num_spec_tokens": most_drafts,
            "num_draft_tokens": summary.drafted,
            "num_accepted_draft_tokens": sum(accepted),
            "mean_acceptance_length": 1 + sum(accepted) / steps if steps else 0.0,
            "draft_acceptance_rate": sum(accepted) / max(1, summary.drafted),
            "acceptance_histogram": [accepted.count(count) for count in range(most_drafts + 1)],
            "per_step_accepted": accepted,
        }
    }


def _chat_whole(choice: Choice, spell: Spell) -> Json:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _chat_logprobs(choice, spell),
        "finish_reason": choice.summary.finish_reason,
    }


def _chat_piece(chunk: Chunk, spell: Spell, offset: int | None) -> Json:
    role = {"role": "assistant"} if offset is None else {}
    return {
        "index": chunk.index,
        "delta": {**role, "content": chunk.text},
        "logprobs": _chat_logprobs(chunk, spell),
        "finish_reason": chunk.final.finish_reason if chunk.final else None,
    }


def tell_apart(message: Json, channels: Channels, *, last: bool) -> None:
    """Moves what was thought out of a message's `content`, as other servers of gpt-oss do."""
    message["reasoning_content"], message["content"] = channels.push(message["content"], last=last)


def _text_whole(choice: Choice, spell: Spell) -> Json:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": _text_logprobs(choice, spell, 0),
        "finish_reason": choice.summary.finish_reason,
    }


def _text_piece(chunk: Chunk, spell: Spell, offset: int | None) -> Json:
    return {
        "index": chunk.index,
        "text": chunk.text,
        "logprobs": _text_logprobs(chunk, spell, offset or 0),
        "finish_reason": chunk.final.finish_reason if chunk.final else None,
    }


def _chat_logprobs(part: Choice | Chunk, spell: Spell) -> Json | None:
    def entry(token: int, logprob: float) -> Json:
        spelled = spell(token)
        return {
            "token": spelled.decode(errors="replace"),
            "bytes": list(spelled),
            "logprob": max(logprob, LEAST),
        }

    if not part.logprobs:
        return None
    tops = part.top_logprobs or [{} for _ in part.logprobs]
    content = [
        {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top.items()]}
        for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(part: Choice | Chunk, spell: Spell, offset: int) -> Json | None:
    if not part.logprobs:
        return None
    texts = [text(token, spell) for token in part.token_ids]
    return {
        "tokens": texts,
        "token_logprobs": [max(value, LEAST) for value in part.logprobs],
        "top_logprobs": [
            # the better of two that read alike
            {text(token, spell): max(value, LEAST) for token, value in reversed(top.items())}
            for top in part.top_logprobs
        ],
        "text_offset": [offset + sum(map(len, texts[:k])) for k in range(len(texts))],
    }


def without_first(choice: Json) -> None:
    """The first token of an echoed prompt has no log-probability."""
    if logprobs := choice["logprobs"]:
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None


def text(token: int, spell: Spell) -> str:
    """A token as text, with U+FFFD for the bytes of a character that it splits."""
    return spell(token).decode(errors="replace")


CHAT = Style("chatcmpl-", "chat.completion", "chat.completion.chunk", _chat_whole, _chat_piece)
TEXT = Style("cmpl-", "text_completion", "text_completion", _text_whole, _text_piece)
