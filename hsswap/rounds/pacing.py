"""How many rounds to issue next: pure, from what the host knows and what is under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One sequence as last drained: tokens it may still make, rounds it ran, and the tokens these
    made.
    """

    left: int
    rounds: int
    made: int

    @property
    def tokens_a_round(self) -> float:
        """What a round makes, as measured; 1, the least, before there was any."""
        return max(1.0, self.made / self.rounds) if self.rounds else 1.0


def rounds_to_issue(running: Sequence[Progress], rounds_under_way: int, most_rounds: int) -> int:
    """Rounds of the next burst, for the sequences that run; 0: none before the next drain.

    As many as the slowest sequence is expected to need beyond those under way: a round that
    nobody needs costs a verify of filler. With nothing under way at least one.
    """
    if not running:
        return 0
    expected = max(
        progress.left / progress.tokens_a_round - rounds_under_way for progress in running
    )
    least = 0 if rounds_under_way else 1
    return max(least, min(most_rounds, int(-(-expected // 1))))


def furthest(position: int, rounds: int, k: int, capacity: int) -> int:
    """The position that a sequence cannot pass in so many rounds."""
    return min(capacity, position + rounds * (k + 1))
