"""Blocks that callers name by id themselves: what is known of each, and who may still read it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsswap.config import ModelDims
from hsswap.driver.base import Event, Stream
from hsswap.errors import ArgumentError, ClosedError, DeviceError, shown
from hsswap.loop import QUIET_ATTEMPTS, QUIET_PAUSE_S
from hsswap.tiers import I32, I64
from hsswap.writeback import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """The blocks that a call attends."""

    layer: int
    indices: I64


@dataclass(slots=True)
class NamedBlocks:
    """State of the blocks whose ids callers hold, by layer and index.

    ``valid`` ``[layers, ids]``: tokens offloaded, 0 none. ``resident`` ``[layers, ids]``: the block
    slot in device memory that holds a copy, -1 none. ``uses``: the last event of each stream behind
    work that reads or fills blocks; ``unrecorded``: streams with work behind that, for which an
    event was refused; ``filled``: the last one that filled some, and its stream.
    ``parked``: blocks that are not full, dirty in a host slot, written when they are or at a flush.
    ``plans``: first ids of the lists that are read ahead. ``calls`` under way; ``turn``: one
    offload at a time. ``filling``: layer and index of the block it is about to fill. ``reads``:
    what each call attends. Neither begins while the other is at a block: a slot taken for new
    content holds nothing yet, and what a call under way is going to read must not become another's.
    ``references``: how many of an id's holders came by the id calls; the others are sequences.
    """

    valid: NDArray[np.uint16]
    resident: I32
    parked: dict[tuple[int, int], Batch] = field(default_factory=dict)
    uses: dict[int, Event] = field(default_factory=dict)
    unrecorded: dict[int, Stream] = field(default_factory=dict)
    filled: tuple[Stream, Event] | None = None
    plans: set[int] = field(default_factory=set)
    calls: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    filling: tuple[int, int] | None = None
    reads: list[Reads] = field(default_factory=list)
    references: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, dims: ModelDims, ids: int) -> NamedBlocks:
        """None offloaded yet."""
        shape = dims.layers, ids
        return cls(np.zeros(shape, np.uint16), np.full(shape, -1, np.int32))

    def refer(self, block: int, more: int) -> None:
        """So many holders more of an id."""
        count = self.references.get(block, 0) + more
        if count:
            self.references[block] = count
        else:
            del self.references[block]

    def is_read(self, index: int, layer: int | None = None) -> bool:
        """Whether a call that is under way attends this block, in one layer or in any."""
        return any(
            layer in (None, reads.layer) and bool((reads.indices == index).any())
            for reads in self.reads
        )

    def is_filled(self, layer: int, indices: I64) -> bool:
        """Whether one of these blocks is about to be filled."""
        filling = self.filling
        return filling is not None and filling[0] == layer and bool((indices == filling[1]).any())

    def record(self, stream: Stream) -> Event:
        """An event behind what was enqueued on a stream. Raises what that raises."""
        self.unrecorded[stream.handle] = stream
        event = self.uses[stream.handle] = stream.record()
        del self.unrecorded[stream.handle]
        return event

    def record_rest(self) -> None:
        """The same for streams whose queue was full. Raises DeviceError where one still is."""
        for handle, stream in list(self.unrecorded.items()):
            try:
                self.record(stream)
            except ClosedError:  # by its owner, who has waited for its work
                self.unrecorded.pop(handle, None)

    async def unused(self) -> None:
        """Wait for all work that was enqueued on blocks so far."""
        for _ in range(QUIET_ATTEMPTS):
            try:
                self.record_rest()
                break
            except DeviceError:
                await asyncio.sleep(QUIET_PAUSE_S)
        for event in list(self.uses.values()):
            with suppress(DeviceError):  # told to whoever awaited the result; the work has ended
                await event.wait()

    def length_of(
        self, layer: int, ids: I64, indices: I64, last_valid: int | None, block_size: int
    ) -> int:
        """Tokens of a list of blocks of which ``last_valid`` (None: all offloaded) of the last one
        are seen. Raises ArgumentError.
        """
        if not len(ids):
            raise ArgumentError("seq_block_ids is empty; give the ids of the sequence's blocks")
        if len(np.unique(indices)) < len(indices):
            raise ArgumentError("seq_block_ids holds an id twice; each block is attended once")
        valid = self.valid[layer, indices]
        short = np.flatnonzero(valid[:-1] < block_size)
        if len(short) or not valid[-1]:
            at = int(short[0]) if len(short) else len(ids) - 1
            raise ArgumentError(
                f"block id {ids[at]} has {valid[at]} of {block_size} tokens in layer {layer}; all "
                "blocks but the last must be full, and the last must have been offloaded"
            )
        seen = int(valid[-1]) if last_valid is None else last_valid
        if isinstance(seen, bool) or not isinstance(seen, int | np.integer):
            raise ArgumentError(f"last_block_valid_slots is {shown(seen)}; give a whole number")
        if not 1 <= seen <= int(valid[-1]):
            raise ArgumentError(
                f"last_block_valid_slots is {seen}; block id {ids[-1]} has {valid[-1]} tokens in "
                f"layer {layer}, give 1 to {valid[-1]}"
            )
        return (len(ids) - 1) * block_size + int(seen)
