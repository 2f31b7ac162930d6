"""The name that a request keeps through all processes, their logs and its answer."""

import re
import uuid
from contextvars import ContextVar

CONTEXT = ("traceparent", "tracestate")  # headers of W3C Trace Context
HEADER = "x-request-id"  # over HTTP and gRPC; Triton makes a parameter of the request of it
_FORM = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # what may stand in a header and a log
current: ContextVar[str] = ContextVar("request_id", default="")


def request_id(*given: object) -> str:
    """The first one given that can be one; else a new one."""
    fitting = (each for each in given if isinstance(each, str) and _FORM.fullmatch(each))
    return next(fitting, None) or uuid.uuid4().hex
