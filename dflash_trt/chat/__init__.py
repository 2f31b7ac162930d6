"""Messages to prompts, by the tokenizer's own template."""

from dflash_trt.chat.harmony import Channels, has_channels
from dflash_trt.chat.render import (
    Render,
    as_chat,
    load_chat_template,
    load_encoding,
    parse_json,
    parse_messages,
    try_chat_template,
)
