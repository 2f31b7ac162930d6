"""What the policy chooses, without engines: by costs and chances that are made up here."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest
from offers import MOST, SECOND, Costs, all_kept, chain, linear, looked_up, tree, widths

from dflash_trt.decoding.speculation.evidence import LONGEST_REST
from dflash_trt.decoding.speculation.offers import Choice, Proposal, Row
from dflash_trt.decoding.speculation.policy import CLEARLY, Adaptive, Fixed
from dflash_trt.decoding.speculation.timings import OLD, REFRESH, SOON, TIMED, Timings


@pytest.mark.parametrize(
    ("steps", "values", "width"),
    [
        (linear(0.1), [0.9, 0.5, 0.05], 2),  # 1.9 / 1.1, 2.4 / 1.2, 2.45 / 1.3
        (linear(0.4), [0.9, 0.5, 0.05], 1),  # 1.9 / 1.4, 2.4 / 1.8
        (linear(1.0), [0.9, 0.5, 0.05], 0),  # 1.9 / 2
        (linear(0.0), [0.9, 0.5, 0.05], 3),
        ([1, 2, 2, 2, 2], [0.9, 0.9, 0.9, 0.9], 4),  # not yet by 1.9 / 2, but by 4.6 / 2
        ([1, 1, 1, 4, 4], [0.9, 0.8, 0.7, 0.6], 2),
        (linear(0.1), [0.05, 0.04], 0),
    ],
)
def test_width_follows_costs_and_chances(steps: Seq[float], values: Seq[float], width: int) -> None:
    choice = Adaptive(Costs(steps), MOST, MOST).choose([Row([chain(values)], False)], 0)
    assert widths(choice) == [width]


def test_a_batch_has_one_width() -> None:
    """Two rows alike, one hopeless: what the three together gain per time, 3 / 1 at width 0."""
    rows = [Row([chain(values)], False) for values in ([0.9, 0.8], [0.9, 0.8], [0.0, 0.0])]
    policy = Adaptive(Costs([1, 1.5, 2.4]), MOST, MOST)
    assert widths(policy.choose(rows, 0)) == [1, 1, 0]  # 4.8 / 1.5, 6.4 / 2.4
    assert widths(policy.choose([rows[0], rows[2]], 0)) == [0, 0]  # 2.9 / 1.5, 3.7 / 2.4
    rows = [rows[0], Row([], False), Row([chain([0.9])], True)]
    assert widths(Adaptive(Costs([1, 1, 1]), MOST, MOST).choose(rows, 0)) == [2, 0, 1]


def test_width_is_the_best_of_all() -> None:
    """Against all widths one by one, of random batches of chains and costs."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        steps = 1 + np.r_[0, np.cumsum(rng.exponential(0.3, MOST))]
        n = int(rng.integers(1, 5))
        chances = rng.beta(2, 1, (n, MOST)).cumprod(1)
        lengths = rng.integers(0, MOST + 1, n)
        rows = [
            Row([chain(line[:length].tolist())] if length else [], False)
            for line, length in zip(chances, lengths, strict=True)
        ]
        choice = Adaptive(Costs(steps.tolist()), MOST, MOST).choose(rows, 0)
        rates = [
            (n + sum(line[: min(w, k)].sum() for line, k in zip(chances, lengths, strict=True)))
            / steps[w]
            for w in range(lengths.max() + 1)
        ]
        best = max(rates)  # which has to be clearly better than plain decoding
        clear = best if best > CLEARLY * rates[0] else rates[0]
        assert rates[choice.width] == pytest.approx(clear)
        assert widths(choice) == [min(choice.width, length) for length in lengths]


def test_the_first_nodes_of_a_tree_are_taken() -> None:
    values = [0.6, 0.3, 0.2, 0.02]
    (taken,) = (
        Adaptive(Costs(linear(0.1)), MOST, MOST)
        .choose([Row([tree([0, 0, 1, 3], values)], False)], 0)
        .taken
    )
    assert taken is not None
    assert (list(taken.tokens), list(taken.parents)) == ([0, 1, 2], [0, 0, 1])


def test_fixed_takes_all() -> None:
    row = Row([chain([0.1] * MOST)], False)
    choice = Fixed(MOST).choose([row, Row([], False)], 0)
    assert (widths(choice), choice.draft) == ([MOST, 0], MOST)
    assert Fixed(0).choose([Row([], False)], 0) == Choice([None], 0)


def test_choices_are_rare_where_they_are_dear_and_nothing_pays() -> None:
    """Of 8 rows they take more than three times their share of a plain step, of 64 25 times it."""
    many, one = [Row([chain([0.1])], False)] * 8, [Row([chain([0.1])], False)]
    by_times = ((1, [1, 3, 3]), (8, [1, 3, 7, 15, 25, 25]), (512, [1, 3, 7, 15, 31, 63, 63]))
    for times, rests in by_times:
        policy = Adaptive(Costs(linear(1.0), drafter=5.0), MOST, MOST)
        assert [policy.choose(many * times, 0).rest for _ in rests] == rests
    repeating = [Row([looked_up(16)], False)] * 8
    assert policy.choose(repeating, 0).width == 0  # 1.95 / 2
    cheap = Adaptive(Costs(linear(0.1), drafter=5.0), MOST, MOST)
    taken = cheap.choose(repeating, 0)
    assert (taken.width, taken.rest) == (MOST, 0)
    assert cheap.choose(many, 0).rest == 1  # it begins anew
    assert Adaptive(Costs(linear(1.0), drafter=5.0), MOST, MOST).choose(one, 0).rest == 0


def test_a_single_wide_round_does_not_begin_rests_anew() -> None:
    policy = Adaptive(Costs(linear(0.1), drafter=5.0), MOST, MOST)
    rows, repeating = [Row([], False)] * 64, [Row([looked_up(16)], False)] * 64
    assert [policy.choose(rows, 0).rest for _ in range(5)] == [1, 3, 7, 15, 25]
    rests = []
    for offered in (repeating, rows, repeating, repeating, rows):
        choice = policy.choose(offered, 0)
        rests.append(choice.rest)
        all_kept(policy, choice)
    assert rests == [0, 25, 0, 0, 13]


def test_what_choices_are_found_to_take_sets_how_often_there_is_one() -> None:
    """Of one row a tenth of a plain step: twenty rounds each, where they bring something."""
    costs = Costs(linear(1.0), drafter=5.0)
    rests = {}
    for share in (0.001, 0.1):
        policy, row = Adaptive(costs, MOST, MOST), Row([chain([0.1])], False)
        for _ in range(3 * TIMED):
            rests[share] = policy.choose([row], 0).rest
            policy.timed(SECOND, 0.0, share * SECOND)
    assert rests == {0.001: 0, 0.1: 20}


def test_choices_that_never_pay_get_rarer_still() -> None:
    policy = Adaptive(Costs(linear(0.1), drafter=5.0), MOST, MOST)
    rows = [Row([], False)] * 64
    rests = [policy.choose(rows, 0).rest for _ in range(16)]
    assert (rests[:5], rests[-1]) == ([1, 3, 7, 15, 25], LONGEST_REST)
    # and are as frequent as before when they have found something
    choice = policy.choose([Row([looked_up(16)], False)] * 64, 0)
    assert choice.width == MOST
    all_kept(policy, choice)
    assert max(policy.choose(rows, 0).rest for _ in range(6)) == 25


def test_plain_steps_are_timed_when_others_were() -> None:
    """What all costs are relative to has to be seen once: wide steps take thrice their time."""
    costs = Costs(linear(0.1))
    policy, rows = Adaptive(costs, MOST, MOST), [Row([chain([0.9, 0.8])], False)]
    widths = []
    for _ in range(2 * REFRESH):
        width = policy.choose(rows, 0).width
        widths.append(width)
        policy.timed(costs.verify(1, 1 + width, 0) * (3 if width else 1), 0.0, 0.0)
    first = [2] * (2 + TIMED) + [0] * TIMED  # the drafter's first two rounds are not counted
    assert widths[: len(first)] == first
    assert widths[-1] == 0  # 2.7 / 3.6


def test_a_drafter_that_has_to_run_does() -> None:
    policy = Adaptive(Costs(linear(0.3), 5.0), MOST, MOST)
    row = Row([chain([0.1] * MOST)], False)
    for _ in range(20):
        policy.choose([row], 0)
    assert not policy.choose([row], 0).draft
    assert policy.choose([row], 0, feed=True).draft


def test_a_sequence_of_which_features_are_lost_is_not_drafted_for() -> None:
    policy = Adaptive(Costs(linear(0.1), 0.1), MOST, MOST)
    good = Row([chain([0.9**k for k in range(1, 8)])], False)
    assert all(policy.choose([good], 0).draft for _ in range(50))
    assert not any(policy.choose([good, good._replace(lost=True)], 0).draft for _ in range(500))
    assert policy.choose([good], 0).draft


def test_copies_that_are_not_taken_are_found_to_be_wrong() -> None:
    """Each kind for itself: those that the drafter contradicts promise less to begin with."""
    policy, copy = Adaptive(Costs(linear(0.1)), MOST, MOST), looked_up(3)
    doubted = copy._replace(doubted=True)

    def width(proposal: Proposal) -> int:
        return policy.choose([Row([proposal], False)], 0).width

    assert width(copy) > width(doubted) > 0
    for _ in range(20):
        policy.missed(copy, copy.tokens[0] + 1)
    assert width(copy) == 0 < width(doubted)
    for _ in range(40):
        policy.missed(copy, copy.tokens[0])
    assert width(copy) > width(doubted)
    policy.missed(chain([0.9]), 0)  # says nothing of copies
    assert width(copy) > width(doubted)


def test_the_drafter_rests_behind_texts_that_repeat_themselves() -> None:
    """Not behind any copy: then there would be no drafts when it turns out to be wrong."""
    for match, drafts in ((16, False), (2, True)):
        policy = Adaptive(Costs(linear(0.01), 0.01), MOST, MOST)
        choice = policy.choose([Row([looked_up(match)], False)], 0)
        assert choice.width == MOST
        assert (choice.draft > 0) == drafts


def test_plain_steps_behind_the_drafter_do_not_count() -> None:
    """They take longer: two rounds in a row verify nothing, and the first does not draft."""
    costs = Costs(linear(0.01), 0.01)
    policy, rows = Adaptive(costs, MOST, MOST), [Row([chain([0.9] * MOST)], False)]
    choices = []
    for _ in range(2 * OLD):
        choices.append(policy.choose(rows, 0))
        behind = len(choices) > 1 and choices[-2].draft > 0
        slow = 1.0 if choices[-1].width or not behind else 9.0
        policy.timed(slow * costs.verify(1, 1 + choices[-1].width, 0), 0.01 * SECOND, 0.0)
    later = [(choice.width, choice.draft > 0) for choice in choices[OLD // 2 :]]
    assert later.count((0, False)) == later.count((0, True)) == 1
    assert later[later.index((0, False)) + 1] == (0, True)
    # nine times as long, wide steps would be free
    steps, _ = policy._timings.costs(1, 0, drafting=True)
    assert steps == pytest.approx(linear(0.01), rel=0.1)


@pytest.mark.parametrize(("chances", "rounds"), [([0.3], SOON), ([0.9] * MOST, OLD)])
def test_plain_steps_are_timed_sooner_where_they_lose_little(
    chances: list[float], rounds: int
) -> None:
    costs = Costs(linear(0.1), 0.01)
    policy, rows = Adaptive(costs, MOST, MOST), [Row([chain(chances)], False)]
    plain = []
    for round_ in range(4 * OLD):
        width = policy.choose(rows, 0).width
        plain += [] if width else [round_]
        policy.timed(costs.verify(1, 1 + width, 0), 0.01 * SECOND, 0.0)
    assert rounds <= plain[-1] - plain[-3] <= rounds + 3  # in pairs


def test_plain_steps_that_change_are_found_out_where_they_are_rare() -> None:
    """On a machine that others use: faster ones by the first, slower ones by a few."""
    policy = Adaptive(Costs(linear(0.01), 0.01), MOST, MOST)
    rows = [Row([chain([0.9] * MOST)], False)]
    for slow, rounds in ((2.0, OLD), (1.0, OLD + TIMED), (2.0, 3 * OLD)):
        for _ in range(rounds):
            plain = not policy.choose(rows, 0).width
            policy.timed((slow if plain else 1.0) * SECOND, 0.01 * SECOND, 0.0)
        assert policy._timings.plain(1, 0) == pytest.approx(slow * SECOND)


def test_a_plain_step_is_known_to_take_what_it_was_found_to() -> None:
    """Whatever the table says: of contexts that are near each other it has one time."""

    class Growing(Costs):
        def verify(self, n: int, width: int, context: int) -> float:
            return SECOND * (1 + context / 100)

    timings = Timings(Growing(linear(0.1)), MOST)
    for _ in range(TIMED):
        timings.add((1, 0, 10), 0, SECOND, 0.0, 0.0)
    assert timings.plain(1, 10) == pytest.approx(SECOND)
