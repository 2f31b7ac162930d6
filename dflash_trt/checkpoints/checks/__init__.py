"""The named checks of a pair, by subject; `pair.py` lists them.

A check is a function that takes a `Pair` and gives what it found. Its name is the check's, its
docstring says what goes wrong silently without it. It raises NotKnown where a refused model does
not say enough, CheckpointError where a file is wrong in itself.
"""

from typing import NamedTuple

OTHER_DRAFTER = "Use the drafter that was trained for this target"


class Found(NamedTuple):
    """what: a sentence that is true whether or not it is `ok`; fix: for when it is not."""

    ok: bool
    what: str
    fix: str = OTHER_DRAFTER
