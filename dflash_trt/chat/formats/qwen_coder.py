"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

Values have lines of their own.
"""

from functools import partial

from dflash_trt.chat.formats import tagged

TAGS = tagged.Tags(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
)
SIGN = f"{TAGS.open}\n{TAGS.function}"
read = partial(tagged.read, TAGS)
calls = partial(tagged.calls, TAGS)
