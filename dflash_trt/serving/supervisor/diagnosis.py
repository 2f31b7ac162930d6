"""What Triton's log says of its end."""

import re

from dflash_trt.serving.log import Event

KILLED = "is not healthy"  # Triton's words for a model whose process was killed
# a Python model's exception: the message, then a traceback
NOT_LOADED = re.compile(r"failed to load '([^']+)' version \d+: (.+)")
NO_GPU = re.compile("CUDA|Cuda")  # of errors on a machine without one


def why_it_ended(events: list[Event]) -> str:
    """Return the reasons, most important first; there is always one."""
    messages = [event.message for event in events]
    failures = [*filter(None, map(NOT_LOADED.match, messages))]
    if failures:
        return "; ".join(f"model {match[1]} did not load: {match[2]}" for match in failures)
    errors = [
        event.message
        for event in events
        if event.level == "ERROR" and not NO_GPU.search(event.message)
    ]
    errors += [message for message in messages if message.startswith("error:")]
    return " | ".join((errors or messages)[-5:]) or "it said nothing"
