"""What waits for a drafter: of texts that it follows alone, within a bound."""

import numpy as np

from dflash_trt.decoding import FeatureBuffer, Features, Round, RoundSequence
from dflash_trt.decoding.feature_buffer import Passed
from dflash_trt.engines import MAX_BUFFERED, most_buffered

BLOCK_SIZE = 8
SIZE = 4  # of a token's features


def pass_on(
    buffer: FeatureBuffer, features: Features, start: int, count: int, follows: tuple[bool, ...]
) -> Passed:
    """Pass on `count` tokens of each row, whose features are their positions."""
    rows = [
        RoundSequence([0] * count, known=count, position=start, budget=99, follows=row_follows)
        for row_follows in follows
    ]
    values = np.arange(start, start + count, dtype=np.float32)
    taps = np.broadcast_to(values[None, :, None], (len(rows), count, SIZE))
    return buffer.pass_on(Round(0, rows, features), [0] * len(rows), taps)


def test_a_text_that_the_drafter_does_not_follow_stores_nothing() -> None:
    buffer = FeatureBuffer(most_buffered(BLOCK_SIZE))
    for start in range(0, MAX_BUFFERED, 16):
        passed = pass_on(buffer, Features.KEEP, start, 16, (True, False))
        assert passed.buffered == [start + 16, None]
    passed = pass_on(buffer, Features.DRAFT, MAX_BUFFERED, 1, (True, False))
    assert passed.before == [MAX_BUFFERED, 0]
    assert passed.buffered == [0, None]
    assert passed.features is not None
    assert passed.features[0, : MAX_BUFFERED + 1, 0].tolist() == [*range(MAX_BUFFERED + 1)]
    assert passed.features[1, :, 0].tolist() == [MAX_BUFFERED, *[0] * MAX_BUFFERED]


def test_one_that_is_followed_no_more_leaves_nothing_behind() -> None:
    """As after a new drafter: what was buffered before was for the old one."""
    buffer = FeatureBuffer()
    pass_on(buffer, Features.KEEP, 0, 5, (True,))
    assert pass_on(buffer, Features.KEEP, 5, 5, (False,)).buffered == [None]
    assert pass_on(buffer, Features.KEEP, 10, 5, (True,)).buffered == [5]


def test_features_beyond_the_bound_are_dropped() -> None:
    limit = most_buffered(BLOCK_SIZE)
    buffer = FeatureBuffer(limit)
    assert pass_on(buffer, Features.KEEP, 0, limit, (True,)).buffered == [limit]
    assert pass_on(buffer, Features.KEEP, limit, 1, (True,)).buffered == [None]
