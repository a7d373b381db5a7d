"""Drafters that need no model of their own."""

from __future__ import annotations

from hsswap.driver.base import Device, Stream
from hsswap.driver.round_checks import NGRAM_LONGEST
from hsswap.driver.round_operations import NgramWork
from hsswap.errors import ArgumentError, shown
from hsswap.rounds.buffers import StreamBufs
from hsswap.rounds.contracts import Drafter


class NgramDrafter(Drafter):
    """Drafts what followed when the sequence's last tokens stood in it before.

    The last ``longest`` tokens are looked for first, then fewer, down to ``shortest``. Costs one
    small kernel; pays where text repeats itself (code, quotations, lists).
    """

    def __init__(self, device: Device, *, shortest: int = 1, longest: int = 3) -> None:
        whole = isinstance(shortest, int) and isinstance(longest, int)
        if not whole or not 1 <= shortest <= longest <= NGRAM_LONGEST:
            raise ArgumentError(
                f"n-grams of {shown(shortest)} to {shown(longest)} tokens; give whole numbers from "
                f"1 to {NGRAM_LONGEST}, in order"
            )
        self._kernels = device.round_kernels()
        self._shortest, self._longest = shortest, longest

    def draft(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Drafter`."""
        work = NgramWork(
            bufs.history, bufs.pos_ctr, bufs.pend, bufs.drafts, self._shortest, self._longest
        )
        self._kernels.ngram_draft(stream, work)
