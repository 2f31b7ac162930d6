"""Request ids, kept through all processes, logs and the answer."""

import re
import uuid
from contextvars import ContextVar

CONTEXT = ("traceparent", "tracestate")  # headers of W3C Trace Context
HEADER = "x-request-id"  # over HTTP and gRPC; Triton makes it a request parameter
_FORM = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # safe in a header and a log
current: ContextVar[str] = ContextVar("request_id", default="")


def request_id(*given: object) -> str:
    """Return the first valid id given, else a new one."""
    fitting = (each for each in given if isinstance(each, str) and _FORM.fullmatch(each))
    return next(fitting, None) or uuid.uuid4().hex
