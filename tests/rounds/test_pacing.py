"""How many rounds are issued ahead."""

from __future__ import annotations

import pytest

from hsswap.rounds.pacing import furthest, rounds_to_issue


@pytest.mark.parametrize(
    ("left", "under_way", "most", "expected"),
    [
        ([], 0, 4, 0),
        ([100], 0, 4, 4),
        ([100], 4, 4, 4),
        ([3], 0, 4, 3),  # each round makes one token at least
        ([3], 3, 4, 0),
        ([3], 2, 4, 1),
        ([1], 8, 4, 0),
        ([2, 50], 4, 4, 4),  # the longest sequence counts
        ([1], 0, 1, 1),
    ],
)
def test_rounds_to_issue(left: list[int], under_way: int, most: int, expected: int) -> None:
    assert rounds_to_issue(left, under_way, most) == expected


def test_furthest() -> None:
    """Never behind the capacity."""
    assert furthest(10, 3, 4, 100) == 25
    assert furthest(90, 3, 4, 100) == 100
