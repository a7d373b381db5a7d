"""How many rounds to issue next: pure, from what the host knows and what is under way."""

from __future__ import annotations

from collections.abc import Sequence


def rounds_to_issue(left: Sequence[int], rounds_under_way: int, most_rounds: int) -> int:
    """Rounds of the next burst; 0: none before the next drain.

    ``left``: of each sequence that runs, the tokens it may still make as last drained. A round
    makes one at least, so more rounds than that are never of use. How many fewer are needed depends
    on drafts that nobody knows yet; a captured round that has nothing to do is passed over on the
    device, while a device without work would wait for the next drain.
    """
    return max(0, min(most_rounds, max(left, default=0) - rounds_under_way))


def furthest(position: int, rounds: int, k: int, capacity: int) -> int:
    """The position that a sequence cannot pass in so many rounds."""
    return min(capacity, position + rounds * (k + 1))
