"""Clients take turns, and none of them keeps the others out."""

from __future__ import annotations

import random

import pytest
from dflash_trt.serving.front.admission import Admission

from dflash_trt.decoding import WaitingQueue


def _taken(turns: WaitingQueue[str]) -> list[str]:
    return list(iter(turns.take, None))


def test_clients_take_turns_and_priority_orders_only_ones_own() -> None:
    turns: WaitingQueue[str] = WaitingQueue()
    for i, priority in enumerate((0, 5, -1)):
        turns.add(f"a{i}", "a", priority)
    turns.add("b0", "b", 9)
    turns.add("b1", "b", 9)
    turns.add("c0", "c", -100)
    assert len(turns) == 6
    assert _taken(turns) == ["a2", "b0", "c0", "a0", "b1", "a1"]


def test_who_comes_again_comes_after_those_who_wait() -> None:
    turns: WaitingQueue[str] = WaitingQueue()
    turns.add("a0", "a")
    turns.add("b0", "b")
    assert turns.take() == "a0"
    turns.add("a1", "a")
    assert _taken(turns) == ["b0", "a1"]


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost_and_each_clients_order_is_kept(seed: int) -> None:
    rng, turns, waiting, number = random.Random(seed), WaitingQueue[int](), dict[int, str](), 0
    for _ in range(300):
        done = rng.random()
        if done < 0.5:
            waiting[number] = rng.choice("abc")
            turns.add(number, waiting[number])
            number += 1
        elif done < 0.8:
            item = turns.take()
            assert (item is None) == (not waiting)
            if item is not None:
                assert item == min(each for each in waiting if waiting[each] == waiting[item])
                del waiting[item]
        elif number:
            item = rng.randrange(number)
            assert turns.remove(item, waiting.get(item, "a")) == (item in waiting)
            waiting.pop(item, None)
        assert len(turns) == len(waiting)
        for client in "abc":
            own = [each for each in waiting if waiting[each] == client]
            assert turns.newest(client) == own[::-1]


def test_who_has_most_is_evicted_for_who_has_two_fewer() -> None:
    admission = Admission(4, None)
    admission.admit("a", 3)
    admission.admit("b", 1)
    assert admission.excess(1) == 1
    assert admission.victim("b", 1) == "a"  # then both have two
    assert admission.victim("a", 1) is None
    assert admission.victim("c", 2) is None  # it would hold more than who is evicted
    admission.release("a", 1)
    admission.admit("b", 1)
    assert admission.victim("b", 1) is None
    assert admission.victim("c", 1) == "a"


def test_a_limit_of_one_client() -> None:
    admission = Admission(10, 3)
    admission.admit("a", 2)
    assert not admission.over_client_limit("a", 1)
    assert admission.over_client_limit("a", 2)
    assert not admission.over_client_limit("b", 3)
    admission.release("a", 2)
    assert not admission.over_client_limit("a", 3)
