"""How many rounds to issue: never none where tokens are wanted, never more than can be of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hsswap.rounds.pacing import Progress, furthest, rounds_to_issue

COUNTS = st.integers(0, 1000)
PROGRESS = st.builds(
    lambda left, rounds, more: Progress(left, rounds, rounds + more), COUNTS, COUNTS, COUNTS
)


@given(st.lists(PROGRESS, max_size=5), st.integers(0, 20), st.integers(1, 9))
def test_limits(running: list[Progress], under_way: int, most: int) -> None:
    """At most a burst; at least a round if nothing is under way; none for nobody."""
    rounds = rounds_to_issue(running, under_way, most)
    assert 0 <= rounds <= most
    assert (rounds > 0) or bool(under_way) or not running
    if running and all(p.left <= under_way for p in running):
        assert rounds <= (0 if under_way else 1)


def test_expectations() -> None:
    """Bursts shrink towards the end, by the acceptance so far."""
    assert rounds_to_issue([Progress(100, 0, 0)], 0, 8) == 8
    assert rounds_to_issue([Progress(5, 10, 10)], 0, 8) == 5
    assert rounds_to_issue([Progress(5, 10, 30)], 0, 8) == 2
    assert rounds_to_issue([Progress(5, 10, 30)], 2, 8) == 0
    assert rounds_to_issue([Progress(12, 10, 30)], 2, 8) == 2
    assert rounds_to_issue([Progress(1, 10, 30), Progress(12, 10, 20)], 2, 8) == 4


def test_furthest() -> None:
    """K + 1 rows a round, and never past the capacity."""
    assert furthest(10, 2, 3, 100) == 18
    assert furthest(10, 2, 3, 12) == 12
