"""Checks of a target's chat template, and its description for `inspect`."""

from pathlib import Path
from typing import Any

from dflash_trt.chat.chat_model import ChatModel
from dflash_trt.chat.render import AGAIN, as_chat, load_chat_template
from dflash_trt.chat.templates import LimitError
from dflash_trt.checkpoints import NO_DRAFTER, Model, Pair, eos_token_ids
from dflash_trt.checkpoints.findings import Found, NotKnown, check
from dflash_trt.errors import CheckpointError, DflashError, RequestError

SAID, ASKED = {"role": "assistant", "content": "probe said"}, as_chat("probe asked")


@check("error")
def chat_template(pair: Pair) -> Found:
    """Check that the template renders a plain message within the limits, as serving requires."""
    try:
        _chats(pair).prompt(ASKED, template_values={"add_generation_prompt": True})
    except LimitError as error:
        raise CheckpointError(f"{error.problem} ({pair.target.directory})", AGAIN) from None
    except RequestError as error:
        return Found(False, error.problem, "Send what it takes", "warning")
    return Found(True, "the chat template writes a plain message")


@check("warning")
def end_of_turn(pair: Pair) -> Found:
    """Check that the token after an answer ends the text, or another turn would follow."""
    target, model = pair.target, _chats(pair)
    known = target.read[0].eos_token_ids if target.read else None
    ends = known or eos_token_ids(target.directory, target.number("vocab_size"))
    added = {token.content for token in target.tokenizer.get_added_tokens_decoder().values()}
    chat = [*as_chat("Hello"), SAID]
    for messages in (chat, [*chat, *ASKED]):  # after the last answer, or between two turns
        try:
            text = model.prompt(messages, template_values={}).text.partition(SAID["content"])[2]
        except RequestError as error:
            raise NotKnown(error.problem) from None
        text = text.partition(ASKED[0]["content"])[0]
        if found := [(text.find(token), -len(token), token) for token in added if token in text]:
            token = min(found)[2]
            ended = target.tokens[token] in ends
            what = f"the chat template writes {token!r} after an answer, "
            what += "which ends a text" if ended else f"and texts end with {list(ends)} alone"
            fix = f"Add its id, {target.tokens[token]}, to eos_token_id in generation_config.json"
            return Found(ended, what, fix)
    return Found(True, "the chat template writes no token after an answer")


CHAT_CHECKS = (chat_template, end_of_turn)


def about_chats(target: Path) -> dict[str, Any] | None:
    """Return what probing a directory's template showed; None without a template."""
    try:
        model = _chats(Pair(Model("target", target, {}), NO_DRAFTER))
    except (DflashError, NotKnown):
        return None
    dialect = model.dialect
    return {
        "calls": dialect.format.name if dialect.format else "in a form that is not known here",
        "tools": "shown" if dialect.shows_tools else "described in text",
        "thoughts": dialect.thoughts or "left out",
        **model.chats,
    }


def _chats(pair: Pair) -> ChatModel:
    template = load_chat_template(pair.target.directory)
    if template is None:
        raise NotKnown("the target has no chat template")
    return ChatModel(pair.target.tokenizer, template)
