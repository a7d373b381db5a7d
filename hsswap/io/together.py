"""What one thread moves in one go; the checksums of it are the loop's thread's.

A thread that gives the GIL back for the 4 us of a checksum has it again before the loop wakes up,
which then waits for 5 ms; reads of 64 KiB came at 0.93 of the speed, for 32 us of processor where
these take 22; writes came at 500 MB/s for 172 us, at 1,550 for 42 in groups (2 cores, 2026-12-01).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from hsswap.errors import HsswapError
from hsswap.io.base import SpanReads, Transfer
from hsswap.io.counted import Ended, EndedSpans
from hsswap.io.hooks import run_hook

TOGETHER = 16
"""At most: of spans that are read, or writes that are made, by one thread in one go. They cost it a
way through the queue and the loop once."""
GROUP_BYTES = 2 << 20
"""Of the writes of a group at most, of which checksums are taken in one turn of the loop: 0.2 ms
from memory. A needed read waits for them. A longer write has its checksum taken by a thread."""


@dataclass(eq=False, slots=True)
class SpanGroup:
    """Spans that one thread reads, one after the other, and that end together; those that failed
    alone. ``ended``: what became of them.
    """

    reads: SpanReads
    numbers: list[int]
    ended: list[EndedSpans] = field(default_factory=list)

    def failed(self, error: HsswapError) -> list[EndedSpans]:
        """What became of them when the whole group failed."""
        return [(self.reads, self.numbers, error)]


def verified(ended: EndedSpans) -> EndedSpans:
    """Spans as a thread left them, after a hook that is for the loop's thread."""
    reads, numbers, error = ended
    if error is None and reads.quick:
        error = run_hook(reads.verify, reads, numbers)
    return reads, numbers, error


@dataclass(eq=False, slots=True)
class WriteGroup:
    """Writes of one priority, ready for a thread. ``errors``: what became of each."""

    transfers: list[Transfer]
    nbytes: int
    errors: list[HsswapError | None] = field(default_factory=list)

    def join(self, other: WriteGroup) -> bool:
        """Take over what another has, if that is not too much."""
        if self.nbytes + other.nbytes > GROUP_BYTES:
            return False
        if len(self.transfers) + len(other.transfers) > TOGETHER:
            return False
        self.transfers += other.transfers
        self.nbytes += other.nbytes
        return True

    def ended(self, error: HsswapError | None) -> Sequence[Ended]:
        """What became of them. ``error``: of all, where the whole group failed."""
        errors = self.errors if error is None else [error] * len(self.transfers)
        return [
            (transfer, problem, transfer.nbytes)
            for transfer, problem in zip(self.transfers, errors, strict=True)
        ]


def prepare_some(waiting: deque[Transfer]) -> tuple[WriteGroup, list[Ended]]:
    """Take out of the front what a turn of the loop may prepare, of one priority: what is ready for
    a thread now, if any, and what ended because its hook failed.

    Taken out last, so that KeyboardInterrupt in a hook loses none.
    """
    group, failed = WriteGroup([], 0), list[Ended]()
    nbytes, priority = 0, waiting[0].priority
    for transfer in islice(waiting, TOGETHER):
        nbytes += transfer.nbytes
        if transfer.priority is not priority or (nbytes > GROUP_BYTES and nbytes > transfer.nbytes):
            break
        error = None if transfer.prepare is None else run_hook(transfer.prepare, transfer)
        if error is None:
            group.transfers.append(transfer)
            group.nbytes += transfer.nbytes
        else:
            failed.append((transfer, error, transfer.nbytes))
    for _ in range(len(group.transfers) + len(failed)):
        waiting.popleft()
    return group, failed
