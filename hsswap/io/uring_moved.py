"""Between drive and caller: what a ring has moved, until its bytes were looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hsswap.io.base import Operation
from hsswap.io.counted import Ended, EndedSpans
from hsswap.io.hooks import run_hook
from hsswap.io.uring_limits import FIRST_TRANSFERS, TurnEnds


class Unverified:
    """In the order they were moved. They have no place in the drive's queue any more.

    ``may``: what this turn of the loop may end. ``count``: transfers and spans.
    """

    def __init__(self) -> None:
        self.may = TurnEnds()
        self.count = 0
        self._transfers: deque[Ended] = deque()
        self._spans: deque[EndedSpans] = deque()

    def add(self, transfers: Sequence[Ended], spans: Sequence[EndedSpans]) -> None:
        """The drive is done with these; the hooks of the transfers are quick."""
        self._transfers += transfers
        self._spans += spans
        self.count += len(transfers) + sum(len(numbers) for _, numbers, _ in spans)

    def verify(self, ended: deque[Ended], ended_spans: deque[EndedSpans]) -> None:
        """Run hooks, as many as this turn may, and pass on what has none or has had it."""
        before = len(ended)
        self._verify_spans(ended_spans)
        self._verify_transfers(ended)
        self.count -= len(ended) - before

    def _verify_spans(self, ended: deque[EndedSpans]) -> None:
        while self._spans:
            reads, numbers, error = self._spans.popleft()
            if error is None:
                room = self.may.take(len(numbers), reads.span_bytes)
                if len(numbers) > room:
                    self._spans.appendleft((reads, numbers[room:], None))
                    if not room:
                        break
                    numbers = numbers[:room]
                error = run_hook(reads.verify, reads, numbers)
            self.count -= len(numbers)
            ended.append((reads, numbers, error))

    def _verify_transfers(self, ended: deque[Ended]) -> None:
        """As many as the turn may besides; a few in any case, because spans might never cease."""
        moved, may, first = self._transfers, self.may, True
        for _ in range(min(len(moved), max(may.transfers, FIRST_TRANSFERS))):
            transfer, error, nbytes = moved[0]
            verify = transfer.verify
            if verify is not None and error is None and transfer.operation is Operation.READ:
                if nbytes > may.nbytes and not first:
                    break
                may.nbytes -= nbytes
                first = False
                error = run_hook(verify, transfer)
            moved.popleft()
            ended.append((transfer, error, nbytes))
