"""What drafting is found to bring, by what its rounds gained and what steps cost then."""

from dflash_trt.decoding.speculation.evidence import STAKE, Worth


def test_a_new_stake_where_steps_are_cheaper_than_when_it_gained_or_was_tried() -> None:
    worth = Worth(True, STAKE, STAKE)
    assert not worth.cheaper(2.0)
    worth.add(-STAKE - 1, 2.0)
    assert not worth.pays
    assert not worth.cheaper(1.9)
    assert worth.cheaper(1.6)
    worth.try_again(1.6)
    assert worth.pays
    worth.add(-1.0, 2.0)
    assert not worth.cheaper(2.0)
    worth.add(-STAKE, 2.0)
    assert not worth.pays
    # tried in vain at that already
    assert not worth.cheaper(1.6)
    assert worth.cheaper(1.3)
    worth.try_again(1.3)
    worth.add(2 * STAKE, 1.3)
    assert not worth.cheaper(2.0)
    while worth.pays:
        worth.add(-STAKE, 2.0)
    # it gained where steps took that
    assert worth.cheaper(1.6)
