"""How likely drafts were under the target, for the rows that ask, beside log-probabilities."""

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.decoding.messages import verify_input
from dflash_trt.decoding.rounds import committed_logprobs
from dflash_trt.decoding.sampling import SamplingParams

VOCAB = 50


def encoded(*rows: SamplingParams) -> npt.NDArray[np.object_]:
    return np.array([LogitsProcessor(each, 1, ()).encode() for each in rows], object)


def test_of_drafts_those_that_follow_what_was_kept() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (2, 6, VOCAB)).astype(np.float32)
    tokens = [[9, 4, 5, 6, 7, 8], [9, 4, 5]]
    rows = [[6, 1, 20, 9], [3, 1, 20, 9]]
    asks = encoded(SamplingParams(include_drafting=True), SamplingParams(logprobs=2))
    x = verify_input([0, 0, 1], rows, tokens, asks)
    values, ids = committed_logprobs(x, [(2, 11), (1, 12)], logits)
    assert (values.shape, ids.shape) == ((2, 6, 4), (2, 6, 3))
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found = np.exp(values[0, :, -1])
    expected = [probabilities[0, node, token] for node, token in ((0, 4), (1, 5), (2, 6))]
    np.testing.assert_allclose(found[1:4], expected, rtol=1e-4)
    assert np.isnan(found[[0, 4, 5]]).all()  # these follow one that was refused
    # the other row has what it has alone
    alone = verify_input([0, 0, 1], rows[1:], tokens[1:], asks[1:])
    own, own_ids = committed_logprobs(alone, [(1, 12)], logits[1:, :3])
    np.testing.assert_array_equal(values[1, :3, :3], own[0])
    np.testing.assert_array_equal(ids[1, :3], own_ids[0])


def test_nothing_is_made_where_nobody_asks() -> None:
    x = verify_input([0, 0, 1], [[3, 1, 20, 9]], [[9, 4, 5]])
    values, ids = committed_logprobs(x, [(1, 12)], np.zeros((1, 3, VOCAB), np.float32))
    assert values.shape == ids.shape == (1, 1, 1)
