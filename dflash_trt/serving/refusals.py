"""Words of a refusal that tell its kind and when to ask again: Triton carries a text alone."""

import math
import re

LATER = "Try again later."
CLIENT_LIMIT = "sequences are the most of one client"
MAX_WAIT = 60  # seconds
_AGAIN = re.compile(r"Try again in (\d+) s\.")
OVER_LIMIT, UNAVAILABLE = 429, 503  # HTTP status codes


def try_again_in(seconds: float) -> str:
    return f"Try again in {min(max(1, math.ceil(seconds)), MAX_WAIT)} s."


def retry_after(message: str) -> int:
    """Return the seconds that a refusal names; 1 if it names none."""
    named = _AGAIN.search(message)
    return int(named[1]) if named else 1


def refusal_status(message: str) -> int | None:
    """Return the HTTP status of a request that would be taken later; None for another error."""
    if CLIENT_LIMIT in message:
        return OVER_LIMIT
    if LATER in message or _AGAIN.search(message):
        return UNAVAILABLE
    return None
