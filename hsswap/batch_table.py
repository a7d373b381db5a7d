"""Where the blocks of many sequences lie in one layer, as one launch over all of them reads it.

The table of a batch takes time in all its blocks to build, while most steps change none of them: a
step's row goes to a block that is in the table already. So it is kept, in memory that the device
reaches, and built anew, elsewhere, when a sequence's own table (:mod:`hsswap.resident_table`) has
changed or the batch is another.
"""

from __future__ import annotations

from typing import NamedTuple

from hsswap.driver.tensor import Tensor
from hsswap.resident_table import ResidentTable, TableMemory


class Row(NamedTuple):
    """A sequence of a batch: its table, which is whole, and the blocks that are attended."""

    table: ResidentTable
    start: int
    stop: int


class BatchTable:
    """The table of the batch that was attended last, of those that begin with one sequence.

    All methods are called under the swap's lock.
    """

    def __init__(self, memory: TableMemory) -> None:
        self.left: list[tuple[int, int]] = []
        """Room that launches enqueued so far may still read, to be given back behind them."""
        self._memory = memory
        self._place: tuple[int, int] | None = None
        self._entries: Tensor | None = None
        self._rows: list[Row] = []
        self._versions: list[int] = []

    def units(self, rows: list[Row]) -> Tensor | None:
        """Entries ``[S, H, B]``, -1 behind the end of shorter sequences; None: no room.

        To be asked after the tables were settled.
        """
        versions = [row.table.version for row in rows]
        if self._entries is not None and versions == self._versions and rows == self._rows:
            return self._entries
        self.leave()
        width = max(row.stop - row.start for row in rows)
        first = self._memory.take(len(rows) * width)
        if first is None:
            return None
        self._place = (first, len(rows) * width)
        self._rows, self._versions = rows, versions
        self._entries = self._memory.entries(first, width, len(rows))
        for entries, row in zip(self._entries.array(), rows, strict=True):
            count = row.stop - row.start
            entries[:, :count] = row.table.unit_slots(row.start, row.stop)
            entries[:, count:] = -1
        return self._entries

    def leave(self) -> None:
        """Build the table anew when one is wanted next."""
        if self._place is not None:
            self.left.append(self._place)
        self._place = self._entries = None
        self._rows = []

    def give_back(self, left: list[tuple[int, int]]) -> None:
        """Room that nothing reads any more."""
        for first, blocks in left:
            self._memory.give_back(first, blocks)
