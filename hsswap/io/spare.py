"""Where the new content of a stored block is kept while it replaces the old one in its place.

A write over bytes that a loss of power must not take goes twice: first to a slot of this file,
which is synced and then named by the block's record (state REPLACED), and only then to its place.
Whenever the power goes, the old content is whole in its place, or the new one is whole here. The
slot is free again when the record has become another on disk.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hsswap.config import DISK_ALIGNMENT
from hsswap.errors import HsswapError
from hsswap.io.base import BlockIO, IOFile, Operation, Priority, Transfer
from hsswap.io.layout import MAX_RUN_BYTES
from hsswap.io.records import REPLACED, Records
from hsswap.io.runs import BlockRun, fill_checksums

SPARE_NAME = "hsswap.spare"

SPARE_SLOTS = MAX_RUN_BYTES // DISK_ALIGNMENT
"""As many as the longest run has blocks (64), so that every run finds room by and by."""


class SlotUse(NamedTuple):
    """A slot that the record of a block names, or did. ``block``: its index."""

    layer: int
    block: int
    slot: int


class Spare:
    """The file and its slots. Made when the first stored block is written again."""

    def __init__(self, io: BlockIO, path: Path, slot_bytes: int, file: IOFile | None) -> None:
        self.nbytes_written = 0
        self._io = io
        self._path = path
        self._slot_bytes = slot_bytes
        self._file = file
        self._making: asyncio.Lock = asyncio.Lock()
        self._free = list(range(SPARE_SLOTS))
        self._named: list[SlotUse] = []

    def take(self, count: int) -> list[int] | None:
        """So many slots, or None while fewer are free."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, slots: list[int]) -> None:
        """These are free."""
        self._free.extend(slots)

    def name(self, layer: int, index: int, slot: int) -> None:
        """The record of a block names this slot from now on."""
        self._named.append(SlotUse(layer, index, slot))

    def free_unnamed(self, records: Records) -> None:
        """Free the slots that no record on disk names any more. After records were synced."""
        still = []
        for use in self._named:
            row = records.blocks[use.layer, use.block]
            named = row["state"] == REPLACED and row["spare"] == use.slot + 1
            if named or records.dirty_blocks(np.array(use.layer), np.array(use.block)):
                still.append(use)
            else:
                self._free.append(use.slot)
        self._named = still

    async def write(self, run: BlockRun, numbers: list[int], slots: list[int]) -> None:
        """Write blocks of a run into slots, and sync. Fills in the run's checksums."""
        async with self._making:  # one run at a time: the backend has room for one transfer
            if self._file is None:
                nbytes = SPARE_SLOTS * self._slot_bytes
                self._file = await self._io.create_file(self._path, nbytes)
            for number, slot in zip(numbers, slots, strict=True):
                await self._write_block(self._file, run, number, slot)
            await self._io.sync(self._file)

    async def _write_block(self, file: IOFile, run: BlockRun, number: int, slot: int) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_done(transfer: Transfer, error: HsswapError | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        transfer = Transfer(
            Operation.WRITE,
            file,
            slot * self._slot_bytes,
            run.addresses[number : number + 1],
            run.span_bytes,
            Priority.NEEDED,
            on_done,
            prepare=None if len(run.crcs) else lambda transfer: fill_checksums(run),
            owner=run.owner,
        )
        self._io.submit([transfer])
        await done
        self.nbytes_written += run.span_bytes


def spare_bytes(slot_bytes: int) -> int:
    """Bytes of the whole file."""
    return SPARE_SLOTS * slot_bytes


def slot_bytes_of(block_bytes: tuple[int, ...]) -> int:
    """Bytes of a slot: the longest block of any layer."""
    return max(block_bytes)
