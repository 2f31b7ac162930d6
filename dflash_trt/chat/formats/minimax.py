"""MiniMax M2: `<invoke name="f"><parameter name="k">value</parameter></invoke>`, in a block.

Several calls share `<minimax:tool_call>..</minimax:tool_call>`, which also ends a thought.
"""

from functools import partial

from dflash_trt.chat.formats import tagged

TAGS = tagged.Tags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=",
    "</invoke>",
    "<parameter name=",
    "</parameter>",
    quote='"',
    line_end="",
    shared=True,
)
SIGN = f'{TAGS.open}\n{TAGS.function}"'
read = partial(tagged.read, TAGS)
calls = partial(tagged.calls, TAGS)
