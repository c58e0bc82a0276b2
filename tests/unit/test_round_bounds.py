"""How wide a round may be, so that nobody waits longer for it than was decided."""

from __future__ import annotations

from mlxbcd.methods.proposing import Proposer
from mlxbcd.spec.costs import VerifyCosts

WITHIN_S = 0.405


def proposer() -> Proposer:
    """On a machine where a round of n tokens takes 0.1 s and 0.01 more for each."""
    costs = VerifyCosts({1: 0.11, 101: 1.11})
    costs.saw_plain(1, 0.11)
    return Proposer({}, costs, None, None)


def test_a_round_is_as_wide_as_its_time_allows() -> None:
    assert proposer().widest(1, 100, WITHIN_S) == 29
    assert proposer().widest(1, 10, WITHIN_S) == 10


def test_the_first_round_after_a_join_is_careful_and_the_next_goes_by_what_it_took() -> None:
    one = proposer()
    one.joined()
    assert one.widest(1, 100, WITHIN_S) == one.widest(1, 100, WITHIN_S) == 9, "asking changes nothing"
    one.took(1, 10, 0.2)
    assert one.widest(1, 100, WITHIN_S) == 29, "it took what was expected"
    one.took(1, 30, 0.8)
    assert one.widest(1, 100, WITHIN_S) == 9, "it took twice as long"


def test_one_stall_does_not_end_rounds() -> None:
    one = proposer()
    one.took(1, 2, 1000.0)
    widths = []
    for _ in range(60):
        widths.append(one.widest(1, 100, WITHIN_S))
        one.ease()
    assert widths[0] < 4
    assert widths[-1] == 29
