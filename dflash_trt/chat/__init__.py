"""Chats: from messages to prompts by the tokenizer's own template, and formats of answers."""

from dflash_trt.chat.chat_model import (
    CHAT_CHECKS,
    ChatModel,
    ChatPrompt,
    about_chats,
    begun_answer,
    turn_end_ids,
)
from dflash_trt.chat.dialect import Dialect, call_numbers
from dflash_trt.chat.formats import (
    HARMONY,
    AnswerDelta,
    AnswerParser,
    AnswerPart,
    CallDelta,
    ContentDelta,
    ReasoningDelta,
    Span,
    parse_tools,
    required_tools,
)
from dflash_trt.chat.formats.harmony import has_channels
from dflash_trt.chat.render import Render, as_chat, load_chat_template, load_encoding
