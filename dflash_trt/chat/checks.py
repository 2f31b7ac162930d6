"""Checks of a target's chat template, and what `inspect` says of it."""

from typing import Any

from tokenizers import Tokenizer

from dflash_trt.chat.chat_model import ChatModel
from dflash_trt.chat.render import AGAIN, Render, as_chat, load_chat_template
from dflash_trt.chat.templates import LimitError
from dflash_trt.checkpoints import Pair, eos_token_ids
from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.errors import CheckpointError, DflashError, RequestError

SAID, ASKED = "probe said", "probe asked"


@check("error")
def chat_template(pair: Pair) -> Found:
    """The server loads it when it starts; one that makes too much would hold it up."""
    try:
        _template(pair)(messages=as_chat("Hello"), add_generation_prompt=True)
    except LimitError as error:
        raise CheckpointError(f"{error.problem} ({pair.target.directory})", AGAIN) from None
    except RequestError as error:
        return Found(False, error.problem, "Send what it takes", "warning")
    return Found(True, "the chat template writes a plain message")


@check("warning")
def end_of_turn(pair: Pair) -> Found:
    """An answer that is not ended by what the model writes at its end goes on with another turn."""
    target = pair.target
    ends = eos_token_ids(target.directory, target.number("vocab_size"))
    token = _written_after_answers(_template(pair), target.tokenizer)
    if token is None:
        return Found(True, "the chat template writes no token after an answer")
    text = target.texts[token]
    return Found(
        token in ends,
        f"the chat template writes {text!r} after an answer, "
        + ("which ends a text" if token in ends else f"and texts end with {list(ends)} alone"),
        f"Add its id, {token}, to eos_token_id in generation_config.json",
    )


CHAT_CHECKS = (chat_template, end_of_turn)


def about_chats(pair: Pair) -> dict[str, Any] | None:
    """Return what the template showed of chats; None where there is none."""
    try:
        model = ChatModel(pair.target.tokenizer, _template(pair))
    except (DflashError, NotKnown):
        return None
    dialect = model.dialect
    return {
        "calls": dialect.format.name if dialect.format else "in a form that is not known here",
        "tools": "shown" if dialect.shows_tools else "told in words",
        "thoughts": dialect.thoughts or "left out",
        **model.chats,
    }


def _template(pair: Pair) -> Render:
    template = load_chat_template(pair.target.directory)
    if template is None:
        raise NotKnown("the target has no chat template")
    return template


def _written_after_answers(render: Render, tokenizer: Tokenizer) -> int | None:
    """The first added token after the last answer, or after one that a question follows."""
    added = tokenizer.get_added_tokens_decoder()
    chat = [*as_chat("Hello"), {"role": "assistant", "content": SAID}]
    for messages in (chat, [*chat, *as_chat(ASKED)]):
        try:
            text = render(messages=messages).partition(SAID)[2].partition(ASKED)[0]
        except RequestError:
            continue
        found = [
            (text.find(token.content), -len(token.content), at)
            for at, token in added.items()
            if token.content in text
        ]
        if found:
            return min(found)[2]
    return None
